"""The suites of scripts/bench that ask llama-server: `users`, many chats at once, and
`failover`, a server that dies in one."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import socket
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from bench_link import link
from bench_ways import STOCK, Way, rpc_server, rpc_way, swarm_nodes, swarm_way, through

import kernels
from node.models.index import ModelIndex
from node.router.table import RoutingSlice, RoutingTable

CHATS = (1, 2, 4, 8)
TOKENS = 48
LINK_MS, LINK_MBIT_S = 0.5, 1000
KILLED_AT = 20


@contextlib.asynccontextmanager
async def llama_server(
    options: argparse.Namespace, model: str, way: Way, log: Path, parallel: int
) -> AsyncIterator[aiohttp.ClientSession]:
    """llama-server with a slot for each of `parallel` chats; a client of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["-m", model, "--host", "127.0.0.1", "--port", str(port), "-t", str(options.threads), "--poll", "0"]
    arguments += ["--parallel", str(parallel), "-c", str(512 * parallel), "--no-warmup", "--cache-ram", "0"]
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            str(kernels.native_path("llama-server")),
            *arguments,
            *way.arguments,
            env={**os.environ, **way.environment},
            stdout=out,
            stderr=out,
        )
    try:
        # llama-server ends a connection that is idle for 5 s, also as the next request is on its way.
        connector = aiohttp.TCPConnector(force_close=True)
        timeout = aiohttp.ClientTimeout(600)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector, timeout=timeout) as client:
            for _ in range(1200):
                with contextlib.suppress(aiohttp.ClientError):
                    async with client.get("/health") as answer:
                        if answer.status == 200:
                            break
                if process.returncode is not None:
                    text = await asyncio.to_thread(log.read_text)
                    raise SystemExit(f"bench: llama-server with {way.name} ended:\n{text[-2000:]}")
                await asyncio.sleep(0.1)
            yield client
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def complete(client: aiohttp.ClientSession, prompt: str, tokens: int) -> AsyncIterator[list[int]]:
    """The ids of the tokens, as they come."""
    body = {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
    async with client.post("/completion", json={**body, "stream": True, "return_tokens": True}) as answer:
        if answer.status != 200:
            raise SystemExit(f"bench: llama-server answered {answer.status}: {(await answer.text())[:500]}")
        async for line in answer.content:
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise SystemExit(f"bench: llama-server: {event['error']}")
                if event.get("tokens"):
                    yield event["tokens"]


async def _chat(client: aiohttp.ClientSession, number: int) -> int:
    n_tokens = 0
    async for tokens in complete(client, f"Story {number}: once upon a time there was", TOKENS):
        n_tokens += len(tokens)
    return n_tokens


async def users(options: argparse.Namespace, index: ModelIndex, model: str, folder: Path) -> list[dict[str, Any]]:
    """Tokens a second of all chats together: stock, RPC and the swarm behind a link."""
    async with contextlib.AsyncExitStack() as stack:
        rpc_port = await stack.enter_async_context(rpc_server(options, folder))
        tables = []
        for servers in options.users_servers:
            _, table = await stack.enter_async_context(
                swarm_nodes(index, servers, options, folder / f"users-{servers}")
            )
            tables.append(dataclasses.replace(table, reduce="sum"))
        ports = [rpc_port, *(node.port for table in tables for node in table.nodes)]
        cable = await stack.enter_async_context(link(LINK_MS, LINK_MBIT_S, ports))
        port_of = dict(zip(ports, cable.ports, strict=True))
        ways = [STOCK, rpc_way(f"127.0.0.1:{cable.ports[0]}", f"llama.cpp RPC, 1 server, {cable.name}")]
        for servers, table in zip(options.users_servers, tables, strict=True):
            name = f"swarm, {servers} server{'s' * (servers > 1)}, sum, {cable.name}"
            ways.append(swarm_way(through(table, port_of), folder / f"users-{servers}.json", name))
        samples: dict[tuple[str, int], list[float]] = {}
        for _ in range(options.repeat):
            for number, way in enumerate(ways):
                options.progress(f"users: {way.name}")
                async with llama_server(options, model, way, folder / f"server-{number}.log", max(CHATS)) as client:
                    await _chat(client, 0)
                    for chats in CHATS:
                        begun = time.perf_counter()
                        counts = await asyncio.gather(*(_chat(client, chat) for chat in range(chats)))
                        rate = sum(counts) / (time.perf_counter() - begun)
                        samples.setdefault((way.name, chats), []).append(rate)
    return [
        {
            "way": way.name,
            "chats": chats,
            "tokens_per_s": statistics.median(samples[way.name, chats]),
            "least": min(samples[way.name, chats]),
            "most": max(samples[way.name, chats]),
            "of_one": statistics.median(samples[way.name, chats]) / statistics.median(samples[way.name, 1]),
        }
        for way in ways
        for chats in CHATS
    ]


def print_users(rows: list[dict[str, Any]]) -> None:
    print(f"users (all chats together, {TOKENS} tokens each, prompts included)")
    print(f"  {'':46} {'chats':>5} {'tokens/s':>9} {'least':>8} {'most':>8} {'of one':>7}")
    for row in rows:
        print(
            f"  {row['way']:46} {row['chats']:5} {row['tokens_per_s']:9.1f} {row['least']:8.1f} {row['most']:8.1f} "
            f"{row['of_one']:7.2f}"
        )
    print()


async def failover(options: argparse.Namespace, index: ModelIndex, model: str, folder: Path) -> list[dict[str, Any]]:
    """A chat in which the server of all experts dies, and another holds them too. Compared with stock's tokens."""
    prompt, tokens = "The capital of France is", 64
    async with llama_server(options, model, STOCK, folder / "stock.log", 1) as client:
        expected = [token async for some in complete(client, prompt, tokens) for token in some]
    rows = []
    for kind, signal_number in (("killed", signal.SIGKILL), ("frozen", signal.SIGSTOP)):
        delays, equal = [], True
        for number in range(options.repeat):
            options.progress(f"failover: {kind}, round {number + 1}")
            async with contextlib.AsyncExitStack() as stack:
                (first,), table = await stack.enter_async_context(swarm_nodes(index, 1, options, folder / "first"))
                _, second = await stack.enter_async_context(swarm_nodes(index, 1, options, folder / "second"))
                both = _both(table, second)
                way = swarm_way(dataclasses.replace(both, reduce="rows"), folder / "failover.json", "swarm, rows")
                client = await stack.enter_async_context(llama_server(options, model, way, folder / "failover.log", 1))
                got: list[int] = []
                times: list[float] = []
                pid = first.process.pid
                assert pid is not None
                async for some in complete(client, prompt, tokens):
                    got += some
                    times.append(time.perf_counter())
                    if len(got) == KILLED_AT:
                        os.kill(pid, signal_number)
                gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
                delays.append((max(gaps[KILLED_AT - 2 :]) - statistics.median(gaps)) * 1000)
                equal = equal and got == expected
                if signal_number == signal.SIGSTOP:
                    os.kill(pid, signal.SIGKILL)  # frozen, it would not end by itself
        rows.append(
            {
                "server": kind,
                "added_delay_ms": statistics.median(delays),
                "least": min(delays),
                "most": max(delays),
                "tokens_as_stock": equal,
            }
        )
    return rows


def _both(first: RoutingTable, second: RoutingTable) -> RoutingTable:
    """One table over two that hold the same slices: the nodes of the first are asked first."""
    nodes = (*first.nodes, *(dataclasses.replace(node, name=f"{node.name}-2") for node in second.nodes))
    slices = tuple(
        RoutingSlice(one.layer, one.first, one.last, (*one.nodes, *(n + len(first.nodes) for n in one.nodes)))
        for one in first.slices
    )
    return dataclasses.replace(first, nodes=nodes, slices=slices)


def print_failover(rows: list[dict[str, Any]]) -> None:
    print(
        f"failover (the server of all experts, in the middle of an answer; another holds them too; after {KILLED_AT} "
        "tokens)"
    )
    print(f"  {'server':8} {'added delay':>12} {'least':>9} {'most':>9}  tokens")
    for row in rows:
        same = "those of stock" if row["tokens_as_stock"] else "OTHERS THAN STOCK'S"
        print(f"  {row['server']:8} {row['added_delay_ms']:9.1f} ms {row['least']:9.1f} {row['most']:9.1f}  {same}")
    print()
