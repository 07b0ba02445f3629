"""The parts of a report: where each comes from, and that it passes the redactor."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil

from node.commands.find_node import find_node
from node.commands.report_redaction import (
    agent_log,
    environment_document,
    last_lines,
    llama_server_log,
    secrets_in,
    secrets_of,
    settings_document,
)
from node.errors import ConfigError, SwarmError
from node.log_files import AGENT_LOG, EXPERTS_LOG, ROUTER_LOG, log_folder, parts_of
from node.logs import Redactor
from node.paths import cache_dir
from node.peers.identity import state_root
from node.settings.load import Config, load_config
from node.version import version

_DOCUMENT_TIMEOUT_S: Final = 10.0
_DOCUMENT_BYTES_MAX: Final = 16 << 20
_LIBRARIES: Final = (
    "aiohttp",
    "cryptography",
    "gguf",
    "msgpack",
    "msgspec",
    "numpy",
    "psutil",
    "rich",
    "zeroconf",
    "uvloop",
)


@dataclass(frozen=True)
class Sources:
    """Where the parts come from. ``url``: of the node that answers, else why there is none in ``url_problem``.

    ``config`` are the defaults where the settings are wrong, as ``config_problem`` says.
    """

    options: argparse.Namespace
    config: Config
    config_problem: str
    url: str
    url_problem: str
    name: str
    redactor: Redactor

    @property
    def description(self) -> str:
        """Which node this is about, in a line."""
        if self.url:
            return f"It is about node {self.name}, which answered at {self.url}."
        return f"It is about node {self.name}, which did not answer."


async def find_sources(options: argparse.Namespace) -> Sources:
    """Looks for the settings and for a node that answers."""
    config_problem = ""
    try:
        config = load_config(options, os.environ)
    except ConfigError as error:
        config_problem = str(error)
        config = load_config(argparse.Namespace(config=os.devnull), {})
    redactor = Redactor([*secrets_of(config), *secrets_in(os.environ)])
    url = url_problem = ""
    name = config.node.name
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        try:
            url = await find_node(session, options)
            name = str(json.loads(await _body(session, f"{url}/status"))["name"])
        except (SwarmError, ValueError, KeyError, TypeError) as error:
            url_problem = str(error)
    return Sources(options, config, config_problem, url, url_problem, _plain(name), redactor)


def _plain(name: str) -> str:
    """A node's name, which may have been given by anybody, as a part of a file's name."""
    return "".join(char for char in name if char.isascii() and (char.isalnum() or char in "._-"))[:63].lstrip(".-")


@dataclass(frozen=True)
class Part:
    """A part of a report, and its file. ``make`` gives its text, redacted, or raises."""

    name: str
    purpose: str
    make: Callable[[Sources], Awaitable[str]]


def _document(path: str) -> Callable[[Sources], Awaitable[str]]:
    async def make(sources: Sources) -> str:
        return _redacted(sources, json.loads(await _answer(sources, path)))

    return make


async def _metrics(sources: Sources) -> str:
    return sources.redactor.text((await _answer(sources, "/metrics")).decode(errors="replace"))


async def _answer(sources: Sources, path: str) -> bytes:
    if not sources.url:
        raise SwarmError(sources.url_problem)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_DOCUMENT_TIMEOUT_S)) as session:
        return await _body(session, f"{sources.url}{path}")


async def _body(session: aiohttp.ClientSession, url: str) -> bytes:
    """What a node answers. Raises SwarmError."""
    try:
        async with session.get(url) as response:
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > _DOCUMENT_BYTES_MAX:
                    raise SwarmError(f"{url} answers with more than {_DOCUMENT_BYTES_MAX} bytes")
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
        raise SwarmError(f"{url} does not answer: {str(error) or type(error).__name__}") from error
    if response.status != 200:
        raise SwarmError(f"{url} answered with status {response.status}: {body[:400].decode(errors='replace')}")
    return bytes(body)


async def _doctor(sources: Sources) -> str:
    from node.commands.doctor import examine

    return _redacted(sources, {"checks": [asdict(check) for check in await examine(sources.options)]})


async def _settings(sources: Sources) -> str:
    if sources.config_problem:
        raise SwarmError(sources.config_problem)
    settings = settings_document(sources.config)
    return _redacted(sources, {**settings, "environment": environment_document(os.environ)})


async def _machine(sources: Sources) -> str:
    return _redacted(sources, await asyncio.to_thread(_machine_document))


def _machine_document() -> dict[str, Any]:
    memory = psutil.virtual_memory()
    return {
        "swarm_node": version(),
        "build": _build(),
        "python": sys.version,
        "platform": platform.platform(),
        "system": _system(),
        "machine": platform.machine(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "up_s": round(time.time() - psutil.boot_time()),
        "cache": _cache(),
        "libraries": {name: found for name in _LIBRARIES if (found := _library(name))},
    }


def _build() -> dict[str, Any]:
    """What the native code says of itself; where it cannot, why."""
    try:
        import kernels

        programs = ("llama-server", "libggml-swarm.so", "swarm-programs")
        present = {name: _is_there(lambda name=name: kernels.native_path(name)) for name in programs}  # type: ignore[misc]
        return {"id": kernels.build_id(), "programs": present}
    except Exception as error:  # of an extension for another machine, say: it may be what the report is about
        return {"problem": f"{type(error).__name__}: {error}"}


def _is_there(find: Callable[[], Path]) -> bool:
    try:
        return find().exists()
    except OSError:
        return False


def _system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return platform.system()


def _cache() -> dict[str, Any]:
    folder = cache_dir()
    there = next((one for one in (folder, *folder.parents) if one.exists()), Path("/"))
    return {"folder": str(folder), "free_bytes": shutil.disk_usage(there).free}


def _library(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _log(file: str, cut: Callable[[str], str]) -> Callable[[Sources], Awaitable[str]]:
    def read(sources: Sources) -> str:
        folder = _logs_of(sources)
        texts = [cut(part.read_text(errors="replace")) for part in parts_of(folder / file) if part.exists()]
        if not texts:
            raise SwarmError(f"there is no {folder / file}")
        return last_lines(sources.redactor.text("".join(texts)))

    async def make(sources: Sources) -> str:
        return await asyncio.to_thread(read, sources)

    return make


def _logs_of(sources: Sources) -> Path:
    """The folder of the node's logs; where there is none of its name, that of the last node that wrote any."""
    root = state_root(sources.config.node.state_folder, os.environ)
    for name in (sources.name, sources.config.node.name):
        if name and (folder := log_folder(root / name, make=False)).is_dir():
            return folder
    written = {path.stat().st_mtime: path.parent for path in root.glob(f"*/logs/{AGENT_LOG}")}
    if not written:
        raise SwarmError(f"no node has written a log below {root}")
    return written[max(written)]


def _unchanged(text: str) -> str:
    return text


def _redacted(sources: Sources, document: Any) -> str:
    return json.dumps(sources.redactor.value(document), indent=1, default=str) + "\n"


PARTS: Final = (
    Part("status.json", "the swarm as the node sees it", _document("/status")),
    Part("peers.json", "how it found the others, and which addresses answer", _document("/peers")),
    Part("trace.json", "counters of where time went, since the router's engine started", _document("/trace")),
    Part("metrics.txt", "its counters, as Prometheus reads them", _metrics),
    Part("doctor.json", "checks of this machine", _doctor),
    Part("settings.json", "settings that a node would start with now, and variables; no keys", _settings),
    Part("machine.json", "versions, build and machine", _machine),
    Part("agent.log", "the last lines of the node's log", _log(AGENT_LOG, agent_log)),
    # It is asked with numbers, and never sees a text.
    Part("expert-server.log", "the last lines of its expert server's log", _log(EXPERTS_LOG, _unchanged)),
    Part("llama-server.log", "the last lines of its llama-server's log", _log(ROUTER_LOG, llama_server_log)),
)
