"""What of a node's settings and logs may stand in a report: no key, and nothing of what clients ask and get. Pure.

Logs are cut by what is known to be harmless, not by what is known to be dangerous: of llama-server's log, what it wrote
before it served anybody, and after that only lines, or beginnings of lines, that consist of numbers and of words of its
own messages. Its warnings quote what it could not read, and at its level "debug" it writes down everything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from node import environment
from node.log_files import READY_MARK, START_MARK
from node.settings.load import Config
from node.settings.table import SETTINGS
from node.swarm_key import SwarmKey

NOT_SHOWN: Final = "(not shown)"
#: How much of each log is in a report.
LINES_MAX: Final = 2000
BYTES_MAX: Final = 1 << 20

_PREFIXES: Final = ("SWARM_", "GGML_", "LLAMA_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "VK_", "OMP_")
_SECRET_NAME: Final = re.compile(r"key|token|secret|passw|credential|auth|hft", re.IGNORECASE)
# Arguments of llama-server that take a text for the model.
_TEXT_FLAG: Final = re.compile(r"prompt|system|sys\b|template|grammar|schema|-p\b|-j\b", re.IGNORECASE)
_WORD: Final = re.compile(r"[\w.,:/+=-]{1,80}")

_LLAMA_HEAD: Final = re.compile(r"(?:\d+\.)?\d+\.\d\d\.\d{3}\.\d{3} ([IWED]) ")
_LLAMA_SERVES: Final = re.compile(_LLAMA_HEAD.pattern + r"(?:slot |srv +(?:operator\(\)|server_strea))")
# The words of what it says of its own work.
_LLAMA_WORDS: Final = """
I W E srv slot que res cmn llama_server load_model init common_param common_init_ operator get_availabl launch_slot_
print_timing release update_slots update process_sing init_sampler send post pre_decode decode post_decode load save
initializing model loaded listening on http n_threads threadpool n_slots n_ctx_slot kv_unified id task selected by
LRU LCP similarity t_last f_sim_best thold f_keep f_sim processing is_child prompt eval time ms tokens per token
second total graphs reused n_gen tg tg_3s t s stop n_tokens truncated got exception error code cleaning up before
exit new n_ctx n_keep cached memory_seq_rm end all slots are idle skipping empty cache state prompts MiB limits est
looking for better base took saving updating failed to find free space in the KV retrying with smaller batch size
off n_batch ret Invalid input context has been exceeded Compute cancel release slots draft acceptance accepted
generated reprocessing full due lack of data available checkpoint checkpoints created restored erased invalidated
pos_min pos_max n_past n_swa
"""
_LLAMA_VOCABULARY: Final = frozenset(_LLAMA_WORDS.split())
_TOKEN: Final = re.compile(r"[^\W\d]\w*")
# Where ggml gave up: the place in its source says which check failed.
_ASSERT_HEAD: Final = re.compile(r"(?:/?[\w.+-]+/)*[\w+-]+\.(?:c|cc|cpp|cu|cuh|h|hpp|m|metal):\d+: ")
_AGENT_HEAD: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (?:debug|info|warning|error|critical) ")
_FRAME: Final = re.compile(r'[\s|]*File "[^"]*", line \d+, in ')
_TRACEBACK: Final = re.compile(
    r"[\s|+]*(?:Exception Group )?Traceback \(most recent call last\):|"
    r"[\s|+]*(?:During handling of the above exception|The above exception was the direct cause)|[\s|]*\+[-+ \d.]*"
)
_EXCEPTION: Final = re.compile(
    r"([\s|]*(?:(?:[a-z_]\w*\.)+[A-Z]\w*|[A-Z]\w*(?:Error|Exception|Warning|Group|Interrupt|Exit)))(?:: .*)?"
)
_OURS: Final = re.compile(r"[\s|]*(?:node|gossip|kernels)\.")


def secrets_of(config: Config) -> list[str]:
    """The keys in the settings and what is derived from them, none of which a report may hold."""
    found = [config.api.key, config.swarm.key]
    if config.swarm.key:
        key = SwarmKey.parse(config.swarm.key)
        found += [key.derive(purpose).hex() for purpose in ("call", "control", "gossip")]
    return [secret for secret in found if secret]


def secrets_in(environ: Mapping[str, str]) -> list[str]:
    """The values of variables that hold a key, by their names."""
    return [value for name, value in environ.items() if _is_secret(name) and len(value) >= 8]


def settings_document(config: Config) -> dict[str, Any]:
    """The settings in force, by section, with what was said of them."""
    sections: dict[str, dict[str, Any]] = {}
    for setting in SETTINGS:
        value = getattr(getattr(config, setting.section), setting.name)
        if setting.kind.secret:
            value = NOT_SHOWN if value else ""
        elif setting.name == "extra_arguments":
            value = _harmless_arguments(value)
        sections.setdefault(setting.section, {})[setting.name] = value
    return {"file": None if config.path is None else str(config.path), "warnings": config.warnings, **sections}


def environment_document(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that this program, ggml or llama.cpp read, without values that may be keys or texts."""
    shown = {}
    for name, value in sorted(environ.items()):
        if name.startswith(_PREFIXES):
            hidden = _is_secret(name) or _TEXT_FLAG.search(name) or name.endswith("EXTRA_ARGUMENTS")
            shown[name] = NOT_SHOWN if hidden else value
    return shown


def _is_secret(name: str) -> bool:
    by_setting = any(setting.variable == name and setting.kind.secret for setting in SETTINGS)
    return by_setting or (
        name.startswith(_PREFIXES) and (name == environment.CALL_KEY or bool(_SECRET_NAME.search(name)))
    )


def _harmless_arguments(arguments: Sequence[str]) -> list[str]:
    """Arguments of llama-server: flags, and values that are one word and belong to no flag for keys or texts."""
    shown = []
    hide_next = False
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        is_flag = bool(re.fullmatch(r"--?[A-Za-z][\w-]*", flag))
        if is_flag:
            hide_next = bool(_SECRET_NAME.search(flag) or _TEXT_FLAG.search(flag))
            shown.append(f"{flag}={NOT_SHOWN}" if equals and hide_next else argument)
        else:
            shown.append(NOT_SHOWN if hide_next or not _WORD.fullmatch(argument) else argument)
    return shown


def agent_log(text: str) -> str:
    """An agent's log without what others' errors quote: an HTTP parser's error shows what it could not read."""
    kept = []
    after_frame = False
    for line in text.splitlines():
        if _AGENT_HEAD.match(line) or _FRAME.match(line) or _TRACEBACK.match(line) or after_frame:
            kept.append(line)
        elif found := _EXCEPTION.fullmatch(line):
            kept.append(line if _OURS.match(line) else found[1])
        after_frame = bool(_FRAME.match(line))
    return _lines(kept)


def llama_server_log(text: str) -> str:
    """llama-server's log without what clients asked or were answered, as the module's text says."""
    lines = text.splitlines()
    kept: list[str] = []
    left_out = 0
    serves = not lines or not lines[0].startswith(START_MARK.decode())
    for line in lines:
        # The mark is missing where the disk was full.
        serves = serves or f"{line}\n" == READY_MARK.decode() or _LLAMA_SERVES.match(line) is not None
        shown = _harmless_part(line) if serves else line
        if shown is None:
            left_out += 1
            continue
        if left_out:
            kept.append(f"[lines left out: {left_out}]")
            left_out = 0
        kept.append(shown)
    if left_out:
        kept.append(f"[lines left out: {left_out}]")
    return _lines(kept)


def _harmless_part(line: str) -> str | None:
    """The part of a line in which nothing of a client can stand, once llama-server serves; None where all may be."""
    if f"{line}\n" == READY_MARK.decode():
        return line
    if (place := _ASSERT_HEAD.match(line)) is not None:
        return place[0] + "[…]"
    head = _LLAMA_HEAD.match(line)
    if head is None or head[1] == "D":
        return None
    for token in _TOKEN.finditer(line):
        if token[0] not in _LLAMA_VOCABULARY:
            return line[: token.start()] + "[…]"
    return line


def last_lines(text: str) -> str:
    """The end of a log: whole lines, at most LINES_MAX and BYTES_MAX."""
    lines = text.splitlines()[-LINES_MAX:]
    size = 0
    for count, line in enumerate(reversed(lines)):
        size += len(line.encode()) + 1
        if size > BYTES_MAX:
            lines = lines[len(lines) - count :]
            break
    return _lines(lines)


def _lines(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
