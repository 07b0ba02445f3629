"""The `call` suite of scripts/bench: what one expert call costs besides computing, from
inside the router's transport."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import kernels
from node import environment
from node.expert_server.process import ExpertProcess, SliceOrder
from node.expert_server.speed import SWIGLU_PROGRAM
from node.router.table import RoutingNode, RoutingSlice, RoutingTable, even_split
from node.slices import Slice

N_EMBD, N_FF, N_EXPERT = 3072, 4, 8


async def call_costs(n_servers: int, rounds: int, poll_us: int, threads: int = 1) -> dict[str, Any]:
    """Times in microseconds of calls for one token that uses one expert on each of the servers, in mode `sum`."""
    variables = {environment.POLL_US: str(poll_us)}
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-bench-")))
        generator = np.random.default_rng(0)
        tensors, offsets = {}, {}
        with (folder / "experts").open("wb") as file:
            for name, ne in (("up", (N_EMBD, N_FF)), ("gate", (N_EMBD, N_FF)), ("down", (N_FF, N_EMBD))):
                offsets[name] = file.tell()
                tensors[name] = ne
                values = generator.standard_normal((N_EXPERT, *ne), np.float32) * np.float32(0.01)
                file.write(values.tobytes())
        nodes, slices = [], []
        for number, (first, last) in enumerate(even_split(N_EXPERT, n_servers)):
            server = ExpertProcess(
                f"n{number}", threads=threads, stderr=folder / f"{number}.log", environment=variables
            )
            await server.start()
            stack.push_async_callback(server.stop)
            described = {}
            for name, ne in tensors.items():
                one = 4 * ne[0] * ne[1]
                part = {
                    "path": str(folder / "experts"),
                    "offset": offsets[name] + first * one,
                    "bytes": (last - first + 1) * one,
                }
                described[f"ffn_{name}_exps.weight"] = {"type": "f32", "ne": list(ne), "parts": [part]}
            order = SliceOrder(Slice(0, first, last), described)
            (answer,) = await server.load("bench", {0: SWIGLU_PROGRAM}, {0: N_EXPERT}, {0: N_EXPERT}, [order])
            if answer.reason is not None:
                raise SystemExit(f"bench: {answer.reason}")
            nodes.append(RoutingNode(f"n{number}", "127.0.0.1", server.port))
            slices.append(RoutingSlice(0, first, last, (number,)))
        table = RoutingTable("bench", tuple(nodes), tuple(slices), 1, 1, reduce="sum", deadline_floor_ms=10_000)
        (folder / "table.json").write_text(table.to_json())
        process = await asyncio.create_subprocess_exec(
            str(kernels.native_path("swarm-bench-call")),
            str(folder / "table.json"),
            *(str(value) for value in (kernels.Program(SWIGLU_PROGRAM).digest, N_EMBD, n_servers, N_EXPERT, rounds, 1)),
            env={**os.environ, **variables},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        if process.returncode != 0:
            raise SystemExit(f"bench: {errors.decode()[-2000:]}")
        measured = json.loads(output)
        polled = "off" if poll_us == 0 else f"{poll_us} us"
        return {"servers": n_servers, "reduce": "sum", "polling": polled, "rounds": rounds, **measured}


def print_calls(rows: list[dict[str, Any]]) -> None:
    print(f"call (1 token, n_embd {N_EMBD}, one expert of {N_FF} on each server, f32; microseconds)")
    print("  a round's p50, p99 and least; of an average round: splitting and sending, waiting, adding up;")
    print("  of these: making a request, reading a reply; of waiting: computing, as a server says")
    names = ("p50", "p99", "least", "send", "wait", "add", "encode", "decode", "compute")
    print(f"  {'servers':>7} {'polling':>7} " + " ".join(f"{name:>8}" for name in names))
    for row in rows:
        values = [row[f"{name}_us"] for name in names]
        print(f"  {row['servers']:7} {row['polling']:>7} " + " ".join(f"{value:8.1f}" for value in values))
    print()
