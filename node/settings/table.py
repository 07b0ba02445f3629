"""Every setting of swarm-node: name, type, default, what it may be, and what it does.

The dataclasses are the one table of them. `SETTINGS` lists it; swarm.toml, the flags and the environment variables all
come from there (node/settings/load.py).
"""

from __future__ import annotations

import dataclasses
import textwrap
from dataclasses import dataclass, field
from typing import Any

from node.environment import DEFAULT_POLL_US, MAX_POLL_US
from node.log_levels import DEFAULT_LEVEL
from node.log_levels import FORM as LEVELS_FORM
from node.settings.checks import (
    ADDRESS_FORM,
    API_KEY_FORM,
    HOST_FORM,
    INTERFACE_FORM,
    NAME_FORM,
    ORIGIN_FORM,
    address_check,
    choice,
    host_check,
    interface_check,
    llama_argument_check,
    log_levels_check,
    matching,
    name_check,
    or_empty,
    origin_check,
    path_check,
    swarm_key_check,
)
from node.settings.kinds import Boolean, Integer, Kind, Text, TextList
from node.settings.toml_text import toml_text

DEFAULT_PORT = 4100


def _setting(default: object, kind: Kind, doc: str, alias: str = "") -> Any:
    return field(default=default, repr=not kind.secret, metadata={"kind": kind, "doc": doc, "alias": alias})


@dataclass(frozen=True)
class NodeSettings:
    """[node]: this node."""

    name: str = _setting(
        "",
        Text(NAME_FORM, or_empty(name_check)),
        "Name of this node, as the others show it. Empty: the machine's host name. Two nodes on one machine need two "
        "names.",
        alias="--name",
    )
    state_folder: str = _setting(
        "",
        Text("a path", path_check, is_path=True),
        "Folder for this node's identity and logs, one folder per node name within. Empty: $XDG_STATE_HOME/swarm-node, "
        "else ~/.local/state/swarm-node (macOS: ~/Library/Application Support/swarm-node).",
    )
    host: str = _setting(
        "lan",
        Text(HOST_FORM, host_check),
        'Where this node listens. "lan": on every interface, for private, link-local and loopback addresses only. '
        '"loopback": for this machine only. Or one address.',
    )
    port: int = _setting(
        DEFAULT_PORT,
        Integer(0, 65535),
        "TCP port of the query endpoint, the status and the other nodes. 0: any free one.",
        alias="--port",
    )
    expert_port: int = _setting(
        0, Integer(0, 65535), "TCP port of the expert server. 0: the one after port; if that is 0 too, any free one."
    )
    poll_us: int = _setting(
        DEFAULT_POLL_US,
        Integer(0, MAX_POLL_US),
        "Microseconds for which a thread of the expert call looks for the next message before it sleeps, as long as no "
        "other thread wants its core. An idle node sleeps in any case. 0 saves power and costs up to a fifth of the "
        "speed.",
    )

    @property
    def listen_hosts(self) -> tuple[str, ...]:
        """The addresses to listen at; for "lan" those that stand for every interface, of IPv4 and of IPv6."""
        return {"lan": ("0.0.0.0", "::"), "loopback": ("127.0.0.1",)}.get(self.host, (self.host,))

    @property
    def expert_host(self) -> str:
        """The same as the expert server's ``--host`` takes it."""
        return "*" if self.host == "lan" else self.listen_hosts[0]

    @property
    def local_url_host(self) -> str:
        """The host of a URL by which this machine reaches its own node."""
        host = "127.0.0.1" if self.host == "lan" else self.listen_hosts[0]
        return f"[{host}]" if ":" in host else host


@dataclass(frozen=True)
class SwarmSettings:
    """[swarm]: who belongs together."""

    name: str = _setting(
        "default", Text(NAME_FORM, name_check), "Name of the swarm. Nodes with another name are left alone."
    )
    key: str = _setting(
        "",
        Text('a key made by "swarm-node keygen"', or_empty(swarm_key_check), secret=True),
        'Key of the swarm, made by "swarm-node keygen" and the same on every node: nodes without it are refused. '
        "Empty: the swarm is open to every private and link-local address. Only the owner should be able to read a "
        "file with it.",
        alias="--key",
    )
    seeds: tuple[str, ...] = _setting(
        (),
        TextList(ADDRESS_FORM, address_check),
        "Nodes to contact besides those found on the network, for networks without multicast. Without a port: 4100.",
        alias="--seed",
    )
    interfaces: tuple[str, ...] = _setting(
        (),
        TextList(INTERFACE_FORM, interface_check),
        "Network interfaces to use. Empty: all of them.",
    )
    exclude_interfaces: tuple[str, ...] = _setting(
        (),
        TextList(INTERFACE_FORM, interface_check),
        "Network interfaces not to use, such as those of a VPN.",
    )


@dataclass(frozen=True)
class ModelSettings:
    """[model]: the model that the swarm serves."""

    path: str = _setting(
        "",
        Text("a path", path_check, is_path=True, words=("demo",)),
        "The model, a GGUF file (of a split model the first part), a folder of them, demo (the small built-in chat "
        "model), or the name or the beginning of the id of a model that other nodes have: it is fetched from them, as "
        "far as it is needed here. Empty or a folder: the model of the swarm that this node joins.",
        alias="--model",
    )
    context_tokens: int = _setting(
        4096,
        Integer(256, 1 << 24),
        "Tokens of context for each request. The router reserves memory for parallel times as many.",
    )
    parallel: int = _setting(4, Integer(1, 256), "Requests that are answered at the same time; more of them wait.")
    ubatch_tokens: int = _setting(
        512, Integer(1, 16384), "Tokens of a prompt that are computed at once: the largest expert call."
    )
    prompt_cache_mib: int = _setting(
        256, Integer(0, 1 << 20), "Memory of the router, in MiB, that keeps prompts which may come again. 0: none."
    )
    reduce: str = _setting(
        "sum",
        choice("sum", "rows"),
        'What expert servers send back. "sum": one row per token. "rows": one per token and expert, which is more '
        "traffic and gives the bits that one machine would give.",
    )
    dtype: str = _setting(
        "f32",
        choice("f32", "bf16", "f16"),
        "Number format of expert calls. The shorter ones halve the traffic and lose precision.",
    )
    cache_gib: int = _setting(
        0,
        Integer(0, 1 << 20),
        "Disk space, in GiB, for what is fetched of models that other nodes have. When it is full, the models that "
        "were not used for longest are removed. 0: all but a tenth of the disk.",
    )
    transfer_mbit_s: int = _setting(
        0,
        Integer(0, 1 << 20),
        "The most that this node sends of its models to others, and as much that it fetches, in Mbit/s: for networks "
        "that others use too. 0: no limit.",
    )

    @property
    def context_total_tokens(self) -> int:
        """Context of all parallel requests together: what llama-server calls the context size."""
        return self.context_tokens * self.parallel


@dataclass(frozen=True)
class ExpertSettings:
    """[experts]: the experts that this node holds."""

    enabled: bool = _setting(True, Boolean(), "Whether this node holds experts.")
    device: str = _setting(
        "auto",
        Text('"auto" or a device', matching(r"[\x21-\x7e]{1,64}", '"auto" or a device')),
        'Device that holds and computes them, as "swarm-node doctor" names it. "auto": the fastest kind there is.',
        alias="--device",
    )
    threads: int = _setting(0, Integer(0, 1024), "Threads that compute experts. 0: as many as the CPU quota allows.")
    memory_mib: int = _setting(
        0, Integer(0, 1 << 24), "Memory for experts, in MiB. 0: what is free at the start, less a tenth."
    )


@dataclass(frozen=True)
class RouterSettings:
    """[router]: this node as the router."""

    enabled: bool = _setting(
        True, Boolean(), "Whether this node may become the router, which runs all but the experts."
    )
    threads: int = _setting(0, Integer(0, 1024), "Threads of the router. 0: as many as the CPU quota allows.")
    extra_arguments: tuple[str, ...] = _setting(
        (),
        TextList("arguments of llama-server", llama_argument_check, shell_words=True),
        'More arguments for llama-server, each word in quotes of its own: ["--flash-attn", "on"]. In a flag or a '
        "variable: one text, split as a shell does.",
    )


@dataclass(frozen=True)
class ApiSettings:
    """[api]: who may ask."""

    key: str = _setting(
        "",
        Text(API_KEY_FORM, or_empty(matching(r"[\x21-\x7e]{8,256}", API_KEY_FORM)), secret=True),
        "API key that clients must send (Authorization: Bearer KEY, or x-api-key: KEY). Empty: none is asked for.",
    )
    allowed_hosts: tuple[str, ...] = _setting(
        (),
        TextList(ADDRESS_FORM, address_check),
        "Names under which clients may reach this node, besides its own names and addresses: those of a proxy, for "
        "example.",
    )
    allowed_origins: tuple[str, ...] = _setting(
        (),
        TextList(ORIGIN_FORM, origin_check),
        "Web pages that may use this node from a browser, by origin, such as http://chat.example:8080.",
    )


@dataclass(frozen=True)
class LogSettings:
    """[log]: what is logged, on stderr and, in at most 2 MiB a process, in the state folder."""

    format: str = _setting("text", choice("text", "json"), 'For people ("text") or one JSON object a line ("json").')
    level: str = _setting(
        DEFAULT_LEVEL,
        Text(LEVELS_FORM, log_levels_check),
        "The least important that is logged. A package or module of this program can have a level of its own, which "
        'holds for all below it: "info,node.api=debug" shows what becomes of each request.',
    )


SECTIONS: dict[str, type[Any]] = {
    "node": NodeSettings,
    "swarm": SwarmSettings,
    "model": ModelSettings,
    "experts": ExpertSettings,
    "router": RouterSettings,
    "api": ApiSettings,
    "log": LogSettings,
}


@dataclass(frozen=True)
class Setting:
    """One line of the table."""

    section: str
    name: str
    kind: Kind
    default: Any
    doc: str
    alias: str

    @property
    def variable(self) -> str:
        """The environment variable, such as SWARM_NODE_PORT."""
        return f"SWARM_{self.section}_{self.name}".upper()

    @property
    def flag(self) -> str:
        """The flag, such as --node-port."""
        return f"--{self.section}-{self.name}".replace("_", "-")

    def __str__(self) -> str:
        return f"[{self.section}] {self.name}"


SETTINGS: tuple[Setting, ...] = tuple(
    Setting(section, one.name, one.metadata["kind"], one.default, one.metadata["doc"], one.metadata["alias"])
    for section, settings in SECTIONS.items()
    for one in dataclasses.fields(settings)
)


def section_doc(section: str) -> str:
    """A sentence on what the section is about."""
    doc = (SECTIONS[section].__doc__ or "").partition(": ")[2]
    return doc[:1].upper() + doc[1:]


_HEAD = """\
# The settings of swarm-node, each with its default. Remove the "#" in front of one to change it.
#
# A setting is taken from the first place that has it:
#   1. the command line      --node-port 4100    (short: --model, --port, --name, --key, --seed, --device)
#   2. the environment       SWARM_NODE_PORT=4100; an empty variable counts as not set
#   3. a file like this one: --config PATH, else $SWARM_CONFIG, else ./swarm.toml, else
#      ~/.config/swarm-node/swarm.toml ($XDG_CONFIG_HOME instead of ~/.config where it is set)
#   4. its default
# Lists are ["a", "b"] here, and a,b in variables and flags. Relative paths here start at this file's folder.
"""


def documented_file() -> str:
    """The text of swarm.toml: every setting with its default, commented."""
    parts = [_HEAD]
    for section in SECTIONS:
        parts.append(f"\n# {section_doc(section)}\n[{section}]\n")
        for setting in SETTINGS:
            if setting.section == section:
                prose = textwrap.wrap(setting.doc, 110, break_long_words=False, break_on_hyphens=False)
                prose += textwrap.wrap(f"Value: {setting.kind.form}.", 110, break_on_hyphens=False)
                parts.append("\n" + "".join(f"# {line}\n" for line in prose))
                parts.append(f"#{setting.name} = {toml_text(setting.default)}\n")
    return "".join(parts)
