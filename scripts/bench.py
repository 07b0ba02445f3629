"""Measures the swarm beside what one would run instead: stock llama.cpp and llama.cpp's RPC backend, in one run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_call import call_costs, print_calls
from bench_chats import failover, print_failover, print_users, users
from bench_link import RATES_MBIT_S, ROUND_TRIPS_MS, lan, print_lan
from bench_ways import STOCK, Way, llama_bench, rpc_server, rpc_way, swarm, swarm_way
from bench_wire import print_wire, wire

import kernels
from node import environment
from node.models.demo import demo_model
from node.models.index import ModelIndex, read_model
from node.models.synthetic import SHAPES, write_synthetic_model
from node.paths import cache_dir
from node.router.table import RoutingTable

SUITES = {
    "call": "one expert call: the cost beside computing",
    "decode": "tokens generated: stock, RPC, the swarm with each number of servers",
    "prompt": "a prompt read, the same",
    "lan": "decode and prompt through links of 0.25 to 5 ms and 1,000 or 100 Mbit/s",
    "users": "1, 2, 4 and 8 chats at once, on the 0.5 ms link",
    "wire": "bytes of expert calls by mode and float format, and the formats' effect",
    "failover": "a server dies in the middle of an answer, and another holds its experts",
}


async def tokens(options: argparse.Namespace, index: ModelIndex, model: str, folder: Path) -> dict[str, Any]:
    """The suites `decode` and `prompt`."""
    suites = [suite for suite in ("decode", "prompt") if suite in options.suites]
    samples: dict[str, dict[str, list[float]]] = {suite: {} for suite in suites}
    async with contextlib.AsyncExitStack() as stack:
        port = await stack.enter_async_context(rpc_server(options, folder))
        ways = [STOCK, rpc_way(f"127.0.0.1:{port}")]
        for servers in options.servers:
            table = await stack.enter_async_context(swarm(index, servers, options, folder / str(servers)))
            ways += [_swarm(table, folder, servers, reduce) for reduce in ("rows", "sum")]
        # Interleaved, so that a slow minute of the machine falls on all of them.
        for number in range(options.repeat):
            for suite in suites:
                for way in ways:
                    options.progress(f"{suite}, round {number + 1} of {options.repeat}: {way.name}")
                    size = {suite: options.prompt_tokens if suite == "prompt" else options.decode_tokens}
                    samples[suite].setdefault(way.name, []).append(await llama_bench(options, model, way, **size))
    return {
        suite: {name: _figures(values, by_way[STOCK.name]) for name, values in by_way.items()}
        for suite, by_way in samples.items()
    }


def _swarm(table: RoutingTable, folder: Path, servers: int, reduce: str) -> Way:
    name = f"swarm, {servers} server{'s' * (servers > 1)}, {reduce}"
    return swarm_way(dataclasses.replace(table, reduce=reduce), folder / f"{servers}-{reduce}.json", name)


def _figures(samples: list[float], stock: list[float]) -> dict[str, float]:
    return {
        "median": statistics.median(samples),
        "least": min(samples),
        "most": max(samples),
        "of_stock": statistics.median(samples) / statistics.median(stock),
    }


async def calls(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The suite `call`: of each number of servers the run with the median of the repeated runs' medians, with and
    without brief polling."""
    runs: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for _ in range(options.repeat):
        for servers in options.call_servers:
            for poll_us in (options.poll_us, 0) if options.poll_us else (0,):
                options.progress(f"call: {servers} servers")
                one = await call_costs(servers, options.call_rounds, poll_us, threads=options.threads)
                runs.setdefault((servers, poll_us), []).append(one)
    return [sorted(of, key=lambda run: float(run["p50_us"]))[len(of) // 2] for of in runs.values()]


async def run(options: argparse.Namespace) -> dict[str, Any]:
    model = str(_model(options))
    index = read_model(model)
    wanted = options.suites
    document: dict[str, Any] = {
        "machine": f"{platform.machine()}, {_cpu_name()}, {kernels.cpu_quota():g} cores",
        "build": kernels.build_id(),
        "model": options.shape or str(options.model or "demo"),
        "layers": len(index.expert_layers),
        "threads_each_process": options.threads,
        "polling": f"expert calls {options.poll_us} us, while a core is free; ggml's threads none",
        "load_before": os.getloadavg(),
    }
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as name:
        folder = Path(name)
        if "call" in wanted:
            document["call"] = await calls(options)
        if {"decode", "prompt"} & set(wanted):
            document["tokens"] = await tokens(options, index, model, folder)
        if "lan" in wanted:
            document["lan"] = await lan(options, index, model, folder)
        if "users" in wanted:
            document["users"] = await users(options, index, model, folder)
        if "wire" in wanted:
            document["wire"] = await wire(options, index, model, folder)
        if "failover" in wanted:
            document["failover"] = await failover(options, index, model, folder)
    return document


def _model(options: argparse.Namespace) -> Path:
    if options.shape is None:
        return Path(options.model or demo_model())
    path = cache_dir() / f"bench-{options.shape}-{options.layers}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        options.progress(f"writing {options.layers} layers of {options.shape}")
        write_synthetic_model(SHAPES[options.shape], path, layers=options.layers)
    return path


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


def print_tables(options: argparse.Namespace, document: dict[str, Any]) -> None:
    layers = f"{document['layers']} layers with experts"
    print(f"{document['machine']}; model: {document['model']}, {layers}; build {document['build']}")
    print(f"threads of each process: {document['threads_each_process']}; polling: {document['polling']}")
    load = ", ".join(" ".join(f"{load:.1f}" for load in document[when]) for when in ("load_before", "load_after"))
    print(f"load of the machine before and at the end: {load}; medians of {options.repeat} interleaved rounds\n")
    if "call" in document:
        print_calls(document["call"])
    for suite, by_way in document.get("tokens", {}).items():
        print(f"{suite} ({options.decode_tokens if suite == 'decode' else options.prompt_tokens} tokens)")
        print(f"  {'':28} {'tokens/s':>9} {'least':>9} {'most':>9} {'of stock':>9}")
        for name, row in by_way.items():
            print(f"  {name:28} {row['median']:9.1f} {row['least']:9.1f} {row['most']:9.1f} {row['of_stock']:9.2f}")
        print()
    if "lan" in document:
        print_lan(document["lan"], options.prompt_tokens)
    if "users" in document:
        print_users(document["users"])
    if "wire" in document:
        print_wire(document["wire"])
    if "failover" in document:
        print_failover(document["failover"])


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def main() -> None:
    suites = "\n".join(f"  {name:9} {doc}" for name, doc in SUITES.items())
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description=f"{__doc__}\n\nsuites:\n{suites}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--suites", nargs="+", choices=SUITES, default=list(SUITES), metavar="SUITE", help="default: all")
    add("--model", type=Path, help="a Mixture-of-Experts GGUF (default: the demo model)")
    add("--shape", choices=SHAPES, help="instead: a model of random weights of this shape")
    add("--layers", type=int, default=4, help="layers of --shape (default: 4; a layer of qwen3-30b-a3b has 0.35 GB)")
    add("--threads", type=int, default=1, help="threads of each process (default: 1)")
    add("--repeat", type=int, default=5, help="rounds; the tables show medians (default: 5)")
    add("--servers", type=int, nargs="+", default=[1, 2, 4], help="for decode and prompt (default: 1 2 4)")
    add("--decode-tokens", type=int, default=64, help="tokens of decode (default: 64)")
    add("--prompt-tokens", type=int, default=512, help="tokens of a prompt (default: 512)")
    add("--call-servers", type=int, nargs="+", default=[1, 2, 4, 8], help="for call (default: 1 2 4 8)")
    add("--call-rounds", type=int, default=5000, help="calls of one run (default: 5000)")
    add("--round-trips", type=float, nargs="+", default=ROUND_TRIPS_MS, metavar="MS", help="for lan")
    add("--rates", type=float, nargs="+", default=RATES_MBIT_S, metavar="MBIT_S", help="for lan")
    add("--users-servers", type=int, nargs="+", default=[1, 2], help="for users (default: 1 2)")
    add("--wire-servers", type=int, nargs="+", default=[1, 2, 4], help="for wire (default: 1 2 4)")
    add("--wire-chunks", type=int, default=6, help="texts of 256 tokens whose next words are compared (default: 6)")
    add(
        "--poll-us", type=int, default=environment.DEFAULT_POLL_US, help="setting [node] poll_us (default: %(default)s)"
    )
    add("--json", action="store_true", help="JSON instead of the tables")
    options = parser.parse_args()
    options.progress = _progress
    # As Ctrl-C does it: the programs that were started are ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ[environment.POLL_US] = str(options.poll_us)
    document = asyncio.run(run(options))
    document["load_after"] = os.getloadavg()
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        print_tables(options, document)


if __name__ == "__main__":
    main()
