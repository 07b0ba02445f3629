"""The suites of scripts/bench: the same llama-bench run over each way to compute the experts, interleaved in one run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_call import call_costs, print_calls

import kernels
from node.demo_model import demo_model
from node.layer_programs import EXPERT_TENSOR_PATTERN, read_programs, swarm_backend_path
from node.local_swarm import LocalSwarmOptions, expert_servers
from node.model_index import ModelIndex, read_model

# tokens generated (decode) and tokens of the prompt (prompt)
N_DECODE, N_PROMPT = 64, 512
SUITES = ("call", "decode", "prompt")


@dataclass
class Way:
    """A way to compute the experts: what llama-bench needs for it, and its figures in tokens a second by suite."""

    name: str
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)


async def llama_bench(options: argparse.Namespace, model: str, way: Way, suite: str) -> float:
    """Tokens a second of one llama-bench run, the mean of its repetitions."""
    size = ["-p", "0", "-n", str(N_DECODE)] if suite == "decode" else ["-p", str(N_PROMPT), "-n", "0"]
    process = await asyncio.create_subprocess_exec(
        str(kernels.native_path("llama-bench")),
        *("-m", model, "-t", str(options.threads), "--poll", "0", "-r", "1", "-o", "json"),
        *size,
        *way.arguments,
        env={**os.environ, **way.environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"bench: {way.name}, {suite}: llama-bench failed:\n{errors.decode()[-2000:]}")
    (result,) = json.loads(output)
    return float(result["avg_ts"])


@contextlib.asynccontextmanager
async def rpc_server(options: argparse.Namespace, log_folder: Path) -> AsyncIterator[str]:
    """llama.cpp's RPC server on loopback; its HOST:PORT."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (log_folder / "rpc.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            str(kernels.native_path("ggml-rpc-server")),
            *("-H", "127.0.0.1", "-p", str(port), "-t", str(options.threads)),
            stdout=log,
            stderr=log,
        )
    try:
        for _ in range(100):
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
                continue
            writer.close()
            break
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def swarm(index: ModelIndex, nodes: int, options: argparse.Namespace, folder: Path) -> AsyncIterator[list[Way]]:
    """The ways through expert servers that share every layer: one for each of `rows` and `sum`."""
    programs = await read_programs(index)
    swarm_options = LocalSwarmOptions(nodes=nodes, expert_threads=options.threads)
    async with expert_servers(index, programs, swarm_options, log_folder=folder) as (_, table):
        ways = []
        for reduce in ("rows", "sum"):
            path = folder / f"{nodes}-{reduce}.json"
            path.write_text(json.dumps(json.loads(table.to_json()) | {"reduce": reduce}))
            ways.append(
                Way(
                    f"swarm, {nodes} server{'s' * (nodes > 1)}, {reduce}",
                    ["-ot", f"{EXPERT_TENSOR_PATTERN}=Swarm"],
                    {"GGML_BACKEND_PATH": str(swarm_backend_path()), "SWARM_TABLE": str(path)},
                )
            )
        yield ways


async def run(options: argparse.Namespace) -> list[Way]:
    model = str(options.model or demo_model())
    index = read_model(model)
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as name:
        async with contextlib.AsyncExitStack() as stack:
            ways = [Way("stock llama.cpp")]
            endpoint = await stack.enter_async_context(rpc_server(options, Path(name)))
            pattern = EXPERT_TENSOR_PATTERN
            ways.append(
                Way("llama.cpp RPC, 1 server", ["--rpc", endpoint, "-ngl", "0", "-ot", f"{pattern}=RPC0[{endpoint}]"])
            )
            for nodes in options.servers:
                folder = Path(name) / str(nodes)
                folder.mkdir()
                ways += await stack.enter_async_context(swarm(index, nodes, options, folder))
            # Interleaved, so that a slow minute of the machine falls on all of them.
            for number in range(options.repeat):
                for suite in (suite for suite in options.suites if suite != "call"):
                    for way in ways:
                        print(
                            f"\r\033[K{suite}, round {number + 1} of {options.repeat}: {way.name}",
                            end="",
                            file=sys.stderr,
                        )
                        way.samples.setdefault(suite, []).append(await llama_bench(options, model, way, suite))
            print("\r\033[K", end="", file=sys.stderr)
    return ways


async def run_calls(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The suite `call`: of each number of servers the run with the median of the repeated runs' medians."""
    rows = []
    for servers in options.call_servers:
        runs = [await call_costs(servers, options.call_rounds, threads=options.threads) for _ in range(options.repeat)]
        rows.append(sorted(runs, key=lambda run: float(run["p50_us"]))[len(runs) // 2])
    return rows


def report(options: argparse.Namespace, ways: list[Way], calls: list[dict[str, Any]]) -> dict[str, Any]:
    def figures(samples: list[float], stock: list[float]) -> Mapping[str, float]:
        return {
            "median": statistics.median(samples),
            "least": min(samples),
            "most": max(samples),
            "of_stock": statistics.median(samples) / statistics.median(stock),
        }

    stock = ways[0].samples if ways else {}
    return {
        "machine": f"{platform.machine()}, {_cpu_name()}, {kernels.cpu_quota():g} cores",
        "build": kernels.build_id(),
        "model": str(options.model or "demo"),
        "threads_each_process": options.threads,
        "polling": "off in every process",
        "suites": {
            suite: {way.name: figures(way.samples[suite], stock[suite]) for way in ways}
            for suite in options.suites
            if suite != "call"
        },
        "call": calls,
        "load": os.getloadavg(),
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


def print_table(document: dict[str, Any]) -> None:
    print(f"{document['machine']}; model: {document['model']}; build {document['build']}")
    print(f"threads of each process: {document['threads_each_process']}; polling {document['polling']}")
    print(f"load of the machine at the end: {' '.join(f'{load:.1f}' for load in document['load'])}\n")
    if document["call"]:
        print_calls(document["call"])
    for suite, by_way in document["suites"].items():
        print(f"{suite} ({N_DECODE if suite == 'decode' else N_PROMPT} tokens)")
        print(f"  {'':28} {'tokens/s':>9} {'least':>9} {'most':>9} {'of stock':>9}")
        for name, row in by_way.items():
            print(f"  {name:28} {row['median']:9.1f} {row['least']:9.1f} {row['most']:9.1f} {row['of_stock']:9.2f}")
        print()


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--model", type=Path, help="a Mixture-of-Experts GGUF (default: the demo model)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process (default: 1)")
    parser.add_argument("--repeat", type=int, default=5, help="rounds; the table shows medians (default: 5)")
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2], help="swarm sizes (default: 1 2)")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=SUITES)
    parser.add_argument("--call-servers", type=int, nargs="+", default=[1, 2, 4], help="for call (default: 1 2 4)")
    parser.add_argument("--call-rounds", type=int, default=5000, help="calls of one run (default: 5000)")
    parser.add_argument("--json", action="store_true", help="JSON instead of the table")
    options = parser.parse_args()
    calls = asyncio.run(run_calls(options)) if "call" in options.suites else []
    ways = asyncio.run(run(options)) if set(options.suites) - {"call"} else []
    document = report(options, ways, calls)
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        print_table(document)


if __name__ == "__main__":
    main()
