"""Links with a round trip and a rate for scripts/bench, and the suite `lan`: what decoding and
reading a prompt take over them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import socket
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from bench_ways import STOCK, Way, llama_bench, rpc_server, rpc_way, swarm, swarm_way, through

import kernels
from node.models.index import ModelIndex

ROUND_TRIPS_MS = (0.25, 0.5, 1.0, 5.0)
RATES_MBIT_S = (1000, 100)


@dataclasses.dataclass(frozen=True)
class Link:
    """A cable. `measured_ms`: the round trip of one byte through it, less that without it."""

    round_trip_ms: float
    rate_mbit_s: float
    measured_ms: float
    ports: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.round_trip_ms:g} ms, {self.rate_mbit_s:g} Mbit/s"


@contextlib.asynccontextmanager
async def _relay(
    round_trip_us: float, rate_mbit_s: float, less_us: float, ports: Sequence[int]
) -> AsyncIterator[list[int]]:
    process = await asyncio.create_subprocess_exec(
        str(kernels.native_path("swarm-bench-relay")),
        *(f"{value:.1f}" for value in (round_trip_us, rate_mbit_s, less_us)),
        *(str(port) for port in ports),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield json.loads(await process.stdout.readline())
    finally:
        process.stdin.close()
        await process.wait()


async def _echo_us(port: int, rounds: int = 300) -> float:
    """The median round trip of a byte, in microseconds."""

    def measure() -> float:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times = []
            for _ in range(rounds):
                begun = time.perf_counter()
                connection.sendall(b"x")
                connection.recv(1)
                times.append(time.perf_counter() - begun)
        return statistics.median(times) * 1e6

    return await asyncio.to_thread(measure)


@contextlib.asynccontextmanager
async def _echo_server() -> AsyncIterator[int]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@contextlib.asynccontextmanager
async def link(round_trip_ms: float, rate_mbit_s: float, ports: Sequence[int]) -> AsyncIterator[Link]:
    """A relay to these ports of loopback, whose own cost is measured first and taken off its delay."""
    async with _echo_server() as echo:
        direct_us = await _echo_us(echo)
        async with _relay(0, 100_000, 0, [echo]) as (port,):
            own_us = await _echo_us(port) - direct_us
        async with _relay(round_trip_ms * 1000, rate_mbit_s, own_us, [echo]) as (port,):
            measured_ms = (await _echo_us(port) - direct_us) / 1000
    async with _relay(round_trip_ms * 1000, rate_mbit_s, own_us, ports) as relayed:
        yield Link(round_trip_ms, rate_mbit_s, measured_ms, tuple(relayed))


async def lan(options: argparse.Namespace, index: ModelIndex, model: str, folder: Path) -> list[dict[str, Any]]:
    """Decoding and a prompt with all experts on one server behind a link, and on loopback: one row per link and way."""
    rows = []
    async with contextlib.AsyncExitStack() as stack:
        rpc_port = await stack.enter_async_context(rpc_server(options, folder))
        table = dataclasses.replace(
            await stack.enter_async_context(swarm(index, 1, options, folder / "lan")), reduce="sum"
        )
        server_port = table.nodes[0].port
        layers = len({one.layer for one in table.slices})
        links: list[Link | None] = [None]
        for rate in options.rates:
            for round_trip in options.round_trips:
                links.append(await stack.enter_async_context(link(round_trip, rate, [rpc_port, server_port])))
        for number, one in enumerate(links):
            rpc_at, server_at = one.ports if one is not None else (rpc_port, server_port)
            over = through(table, {server_port: server_at})
            ways: list[tuple[Way, str]] = [(rpc_way(f"127.0.0.1:{rpc_at}"), "")]
            for dtype in ("f32", "bf16") if one is not None and one.rate_mbit_s < 1000 else ("f32",):
                path = folder / f"lan-{number}-{dtype}.json"
                named = f"swarm, 1 server, sum, {dtype}"
                ways.append((swarm_way(dataclasses.replace(over, dtype=dtype), path, named), dtype))
            if one is None:
                ways.insert(0, (STOCK, ""))
            for way, dtype in ways:
                rows.append({"link": one, "way": way, "dtype": dtype, "decode": [], "prompt": []})
        # Slow links take few tokens: 30 layers of 5 ms are a seventh of a second for one.
        for _ in range(options.repeat):
            for row in rows:
                slow = row["link"] is not None and row["link"].round_trip_ms >= 1
                row["decode"].append(await llama_bench(options, model, row["way"], decode=8 if slow else 32))
                row["prompt"].append(await llama_bench(options, model, row["way"], prompt=options.prompt_tokens))
                options.progress(f"lan: {row['link'].name if row['link'] else 'loopback'}, {row['way'].name}")
    loopback_s = {
        row["dtype"]: 1 / statistics.median(row["decode"]) for row in rows if row["link"] is None and row["dtype"]
    }
    result = []
    for row in rows:
        one = row["link"]
        decode, prompt = statistics.median(row["decode"]), statistics.median(row["prompt"])
        beyond = None
        if one is not None and row["dtype"]:
            # A token's time, less a round trip for each layer, beside that on loopback.
            beyond = (1 / decode - layers * one.measured_ms / 1000) / loopback_s["f32"] - 1
        result.append(
            {
                "link": one.name if one is not None else "loopback",
                "measured_round_trip_ms": one.measured_ms if one is not None else 0.0,
                "way": row["way"].name,
                "decode_tokens_per_s": decode,
                "decode_least": min(row["decode"]),
                "decode_most": max(row["decode"]),
                "prompt_tokens_per_s": prompt,
                "beyond_round_trips": beyond,
            }
        )
    return result


def print_lan(rows: list[dict[str, Any]], prompt_tokens: int) -> None:
    print(f"lan (decode; prompt of {prompt_tokens} tokens; experts on one server behind a link)")
    print("  'beyond': time of a token less a round trip per layer, more than on loopback")
    print(
        f"  {'link':18} {'measured':>9}  {'way':28} {'tokens/s':>9} {'least':>7} {'most':>7} {'beyond':>7} "
        f"{'prompt':>8}"
    )
    for row in rows:
        beyond = "" if row["beyond_round_trips"] is None else f"{row['beyond_round_trips']:+.0%}"
        measured = f"{row['measured_round_trip_ms']:.2f} ms" if row["measured_round_trip_ms"] else ""
        print(
            f"  {row['link']:18} {measured:>9}  {row['way']:28} {row['decode_tokens_per_s']:9.1f} "
            f"{row['decode_least']:7.1f} "
            f"{row['decode_most']:7.1f} {beyond:>7} {row['prompt_tokens_per_s']:8.1f}"
        )
    print()
