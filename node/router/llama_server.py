"""llama-server as a child process: started on loopback with a key of its own, awaited, ended.

It is the router's engine with the Swarm backend, and stock llama.cpp without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import aiohttp

import kernels
from node.log_files import open_log
from node.router.failure import RouterEngineError

_HEALTH_PERIOD_S = 0.1
_STOP_WITHIN_S = 3.0


@dataclass(frozen=True)
class EngineOptions:
    """How llama-server runs. ``threads`` 0 takes the CPU quota; ``extra`` goes to llama-server as it is."""

    context: int = 4096
    parallel: int = 1
    threads: int = 0
    ubatch: int = 512
    cache_ram_mib: int = 0
    extra: tuple[str, ...] = ()


@dataclass
class LlamaServer:
    """A running llama-server. Made by :func:`llama_server`."""

    url: str
    api_key: str = field(repr=False)
    process: asyncio.subprocess.Process
    log_path: Path

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that it wants with every request."""
        return {"Authorization": f"Bearer {self.api_key}"}

    async def watch(self) -> NoReturn:
        """Waits until it ends, which it does not do by itself. Raises RouterEngineError."""
        await self.process.wait()
        raise self._ended()

    def check(self) -> None:
        """Raises RouterEngineError if it has ended."""
        if self.process.returncode is not None:
            raise self._ended()

    async def until_healthy(self, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
        """Waits until it answers; ``check`` is called every tenth of a second meanwhile, and what it raises is raised.

        Raises RouterEngineError when it ends, or does not answer within ``timeout_s``.
        """
        try:
            async with asyncio.timeout(timeout_s), aiohttp.ClientSession(headers=self.headers) as session:
                while not await self._healthy(session):
                    await asyncio.sleep(_HEALTH_PERIOD_S)
                    self.check()
                    check()
        except TimeoutError:
            raise RouterEngineError(
                f"llama-server did not answer within {timeout_s:.0f} s:\n{self.log_tail()}"
            ) from None

    def log_tail(self, lines: int = 15) -> str:
        """The end of its log, or why there is none."""
        try:
            text = self.log_path.read_text(errors="replace")
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join(text.splitlines()[-lines:])

    def _ended(self) -> RouterEngineError:
        return RouterEngineError(f"llama-server ended with status {self.process.returncode}:\n{self.log_tail()}")

    async def _healthy(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self.url}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False


@contextlib.asynccontextmanager
async def llama_server(
    model_path: str,
    options: EngineOptions,
    *,
    log_path: Path,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[LlamaServer]:
    """Starts llama-server on ``model_path``, which then answers after a while; ends it on leaving, within 4 s.

    ``arguments`` come before those of ``options.extra``; ``environment`` is the whole of it, this process's if None;
    the log is appended to. Raises OSError.
    """
    (port,) = free_ports(1)
    api_key = secrets.token_urlsafe(24)
    with open_log(log_path) as log_file:
        process = await asyncio.create_subprocess_exec(
            str(kernels.native_path("llama-server")),
            *("--model", model_path, "--host", "127.0.0.1", "--port", str(port)),
            *_arguments(options),
            *arguments,
            *options.extra,
            # The key is not on the command line, where every user of the machine could read it.
            env={**(os.environ if environment is None else environment), "LLAMA_API_KEY": api_key},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,  # Ctrl-C on the terminal is for the agent, which then ends its children in order
        )
    try:
        yield LlamaServer(f"http://127.0.0.1:{port}", api_key, process, log_path)
    finally:
        await _stop(process)


def _arguments(options: EngineOptions) -> list[str]:
    threads = options.threads or kernels.default_threads()
    return [
        *("--ctx-size", str(options.context), "--parallel", str(options.parallel)),
        *("--ubatch-size", str(options.ubatch)),
        # While it computes a batch (2,048 tokens by default), it neither looks for clients that left nor for new ones.
        *("--batch-size", str(options.ubatch)),
        *("--threads", str(threads), "--poll", "0", "--no-warmup", "--fit", "off"),
        *("--cache-ram", str(options.cache_ram_mib), "--ctx-checkpoints", "0" if options.cache_ram_mib == 0 else "8"),
    ]


def free_ports(count: int) -> list[int]:
    """TCP ports of loopback that nothing listens on now, each another."""
    with contextlib.ExitStack() as open_sockets:
        probes = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_WITHIN_S)
    except TimeoutError:
        process.kill()
        await process.wait()
