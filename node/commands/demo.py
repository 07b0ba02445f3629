"""``swarm-node demo``: the built-in model, its experts in several processes on this machine, and a chat with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from node.commands.chat import ChatError, stream_chat
from node.commands.local_swarm import LocalSwarm, LocalSwarmOptions, local_swarm
from node.expert_server.process import ProcessEvent, SliceAnswer
from node.models.demo import demo_model
from node.models.index import ModelIndex, read_model
from node.router.engine import REPORT_DELAY_S
from node.router.failure import ExpertFailure
from node.router.llama_server import EngineOptions
from node.router.programs import read_programs


@dataclass(frozen=True)
class DemoOptions:
    """``ask``: one question, answered and done; None: a chat prompt. ``max_tokens``: of an answer."""

    nodes: int = 3
    ask: str | None = None
    json: bool = False
    reduce: str = "rows"
    max_tokens: int = 256


class _Screen:
    """What the demo shows, on stderr; stdout gets only the answer, or with --json one object per event."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(stderr=True, quiet=as_json, highlight=False)
        self._in_answer = False

    def answer_text(self, text: str) -> None:
        if text and not self.as_json:
            print(text, end="", flush=True)
            self._in_answer = True
        elif text:
            self.event("text", text=text)

    def answer_end(self) -> None:
        if self._in_answer:
            print(flush=True)
        self._in_answer = False

    def event(self, kind: str, /, **fields: Any) -> None:
        if self.as_json:
            print(json.dumps({"event": kind, **fields}), flush=True)

    def process_event(self, name: str, event: ProcessEvent) -> None:
        if event.kind == "reloaded" or (event.kind == "exited" and event.returncode != 0):
            if self._in_answer:
                self.console.print()
            self.console.print(f"[yellow]{name}[/]: {escape(event.message)}")
            self.event("node", node=name, kind=event.kind, message=event.message)

    def holdings(self, index: ModelIndex, swarm: LocalSwarm) -> None:
        assert swarm.engine is not None
        layers = index.expert_layers
        table = Table(
            title=f"SmolLM2-135M-Instruct, {len(layers)} layers of {index.n_expert} experts: who holds what",
            caption="The router has all of the model but the experts.",
            title_justify="left",
            caption_justify="left",
        )
        for heading in ("node", "process", "port", "layers", "experts of each", "memory"):
            table.add_column(heading)
        table.add_row("router", str(swarm.engine.process.pid), swarm.engine.url.rpartition(":")[2], "", "none", "")
        for node in swarm.nodes:
            experts = sorted({f"{one.first}-{one.last}" for one in node.slices})
            table.add_row(
                node.name,
                str(node.process.pid),
                str(node.process.port),
                f"{min(node.slices).layer}-{max(node.slices).layer}",
                ", ".join(experts),
                f"{node.memory_bytes / 2**20:.1f} MiB",
            )
        self.console.print(table)
        for node in swarm.nodes:
            self.event(
                "holds",
                node=node.name,
                pid=node.process.pid,
                port=node.process.port,
                memory_bytes=node.memory_bytes,
                slices=[one._asdict() for one in node.slices],
            )


async def run_demo(options: DemoOptions) -> int:
    """Runs the demo; returns the exit status. Raises SwarmError."""
    screen = _Screen(options.json)
    failures: list[ExpertFailure] = []
    with tempfile.TemporaryDirectory(prefix="swarm-demo-") as logs:
        async with _started(options, Path(logs), screen, failures) as swarm:
            assert swarm.engine is not None
            screen.event("ready", url=f"{swarm.engine.url}/v1", api_key=swarm.engine.api_key)
            if options.ask is not None:
                return await _ask(swarm, [{"role": "user", "content": options.ask}], options, screen, failures)
            await _chat(swarm, options, screen, failures)
    return 0


@contextlib.asynccontextmanager
async def _started(
    options: DemoOptions, logs: Path, screen: _Screen, failures: list[ExpertFailure]
) -> AsyncIterator[LocalSwarm]:
    with screen.console.status("Preparing the demo model …") as status:
        path = await asyncio.to_thread(
            demo_model, progress=lambda done, total: status.update(f"Carving SmolLM2 into experts … {done / total:.0%}")
        )
        index = await asyncio.to_thread(read_model, path)
        status.update("Reading the layer programs from llama.cpp …")
        programs = await read_programs(index)
        status.update(f"Starting {options.nodes} expert servers …")
        n_slices = options.nodes * len(programs.layers)
        ready = 0

        def on_slice(name: str, answer: SliceAnswer) -> None:
            nonlocal ready
            ready += 1
            status.update(
                f"Loading experts … {ready} of {n_slices} slices" if ready < n_slices else "Starting the router …"
            )

        swarm_options = LocalSwarmOptions(
            nodes=options.nodes, reduce=options.reduce, engine=EngineOptions(context=4096, parallel=2)
        )
        stack = contextlib.AsyncExitStack()
        try:
            swarm = await stack.enter_async_context(
                local_swarm(
                    index,
                    programs,
                    swarm_options,
                    log_folder=logs,
                    on_slice=on_slice,
                    on_event=screen.process_event,
                    on_failure=failures.append,
                )
            )
        except BaseException:
            await stack.aclose()
            raise
    async with stack:
        screen.holdings(index, swarm)
        yield swarm


async def _ask(
    swarm: LocalSwarm,
    messages: list[dict[str, str]],
    options: DemoOptions,
    screen: _Screen,
    failures: list[ExpertFailure],
) -> int:
    assert swarm.engine is not None
    failures.clear()
    answer = ""
    timings: dict[str, Any] = {}
    started_s = time.monotonic()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            async for chunk in stream_chat(
                session, swarm.engine.url, messages, headers=swarm.engine.headers, max_tokens=options.max_tokens
            ):
                answer += chunk.text
                timings = dict(chunk.timings or timings)
                screen.answer_text(chunk.text)
    except ChatError as error:
        # llama-server only says "Compute error."; which node, layer and experts failed comes by the control channel.
        if not failures:
            await asyncio.sleep(REPORT_DELAY_S)
        causes = [str(failure) for failure in failures] or [str(error)]
        screen.answer_end()
        for cause in causes:
            screen.console.print(f"[red]The answer failed:[/] {escape(cause)}")
        screen.event("error", message=str(error), causes=causes)
        return 1
    screen.answer_end()
    messages.append({"role": "assistant", "content": answer})
    tokens, speed = timings.get("predicted_n", 0), timings.get("predicted_per_second", 0.0)
    screen.console.print(f"[dim]{tokens} tokens, {speed:.1f} a second[/]")
    screen.event(
        "answer", text=answer, tokens=tokens, tokens_per_s=speed, seconds=round(time.monotonic() - started_s, 3)
    )
    return 0


async def _chat(swarm: LocalSwarm, options: DemoOptions, screen: _Screen, failures: list[ExpertFailure]) -> None:
    assert swarm.engine is not None
    has_terminal = sys.stdin is not None and sys.stdin.isatty()
    prompt = "[bold]you>[/] " if has_terminal else ""
    screen.console.print(
        f"\nOpenAI API: [bold]{swarm.engine.url}/v1[/]  key: {swarm.engine.api_key}\n"
        + ("Ctrl-C or Ctrl-D ends everything.\n" if has_terminal else "Up until SIGINT or SIGTERM.")
    )
    messages: list[dict[str, str]] = []
    try:
        screen.console.print(prompt, end="")
        async with contextlib.aclosing(_stdin_lines()) as lines:
            async for line in lines:
                if text := line.strip():
                    messages.append({"role": "user", "content": text})
                    if await _ask(swarm, messages, options, screen, failures) != 0:
                        messages.pop()
                screen.console.print(prompt, end="")
        if not has_terminal:
            await asyncio.Event().wait()
    finally:
        if has_terminal:
            screen.console.print()  # the shell's prompt gets a line of its own


async def _stdin_lines() -> AsyncGenerator[str, None]:
    # Not as a pipe of asyncio's, which makes stdin non-blocking, and with it stdout and stderr on the same terminal.
    if sys.stdin is None:
        return
    loop = asyncio.get_running_loop()
    descriptor = sys.stdin.fileno()
    chunks: asyncio.Queue[bytes] = asyncio.Queue()

    def read() -> None:
        try:
            chunk = os.read(descriptor, 65536)
        except OSError:  # the terminal is gone
            chunk = b""
        if not chunk:
            loop.remove_reader(descriptor)
        chunks.put_nowait(chunk)

    try:
        loop.add_reader(descriptor, read)
    except OSError:  # a file or /dev/null, which never keep one waiting
        chunks.put_nowait(sys.stdin.buffer.read())
        chunks.put_nowait(b"")
    try:
        text = b""
        while chunk := await chunks.get():
            *lines, text = (text + chunk).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace")
        if text:
            yield text.decode(errors="replace")
    finally:
        loop.remove_reader(descriptor)
