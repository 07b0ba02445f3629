"""The same calls through the expert servers of several builds, and NumPy: how alike the results are, as tables.

Started by scripts/equivalence, which makes the builds. Ends with 1 when a result differs by more than kernels/tolerances.py allows.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from equivalence_servers import LAYER, MAX_ROWS, Backend, Connection, holding, make_inputs, numpy_rows
from numpy.typing import NDArray

import kernels
from kernels.equivalence import compare
from kernels.tolerances import family, problem, tolerance
from node.errors import SwarmError
from node.model_index import ModelIndex, read_model
from node.random_blocks import BLOCK_TYPES
from node.synthetic_model import SHAPES, SyntheticShape, write_synthetic_model

LARGE = "qwen3.5-122b"
# Blocks are 256 wide at most; small enough for an emulated processor, and for a table of all types.
SMALL = SyntheticShape(*("qwen3moe", 1, 512, 8, 2, 64), n_expert=16, n_used=4, n_ff=256, n_vocab=512, rope_dim=64)
NUMPY = "numpy"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def model(path: Path, shape: SyntheticShape, expert_type: str | None) -> ModelIndex:
    """The first layer of a shape, written if it is not there. Raises ModelError."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_synthetic_model(shape, path, layers=1, expert_type=expert_type)
    return read_model(path)


async def rates(connection: Connection, index: ModelIndex, batches: Sequence[int]) -> dict[int, float]:
    """Rows per second by the rows of a call, added up on the server; the median of 5 calls after one that is not counted."""
    found = {}
    for n_rows in batches:
        inputs = make_inputs(index, n_rows)
        times_s = [(await connection.call(inputs, "sum"))[1] for _ in range(6)][1:]
        found[n_rows] = n_rows / max(statistics.median(times_s), 1e-6)
    return found


async def results(
    options: argparse.Namespace, index: ModelIndex, what: str, rows_per_s: dict[str, dict[int, float]] | None = None
) -> tuple[NDArray[np.int32], dict[str, NDArray[Any]], dict[str, str]]:
    """The experts of all pairs, the results by backend, NumPy's with them, and why others have none. `rows_per_s`: gets
    the measured rates by backend, if it is given."""
    inputs = make_inputs(index, options.rows)
    by_name: dict[str, NDArray[Any]] = {}
    failures = {}
    for backend in options.server:
        started = time.monotonic()
        try:
            async with holding(backend, index, options.threads, options.folder / f"{backend.name}.log") as connection:
                by_name[backend.name], compute_s = await connection.call(inputs)
                if rows_per_s is not None and options.timings:
                    rows_per_s[backend.name] = await rates(connection, index, options.timings)
        except SwarmError as error:
            failures[backend.name] = str(error)
            say(f"{what}: {backend.name}: {error}")
            continue
        say(
            f"{what}: {backend.name}: computed in {compute_s:.2f} s, with start and load {time.monotonic() - started:.1f} s"
        )
    started = time.monotonic()
    by_name[NUMPY] = await asyncio.to_thread(numpy_rows, index, inputs)
    say(f"{what}: {NUMPY}: {time.monotonic() - started:.1f} s")
    return inputs.expert.reshape(-1), by_name, failures


def comparisons(
    options: argparse.Namespace, index: ModelIndex, expert: NDArray[np.int32], by_name: dict[str, NDArray[Any]]
) -> list[dict[str, Any]]:
    """Figures of every pair of backends, and what is wrong between them by kernels/tolerances.py."""
    kinds = {one.name: "cpu" if one.device == "CPU" else "gpu" for one in options.server}
    tensors = index.expert_tensors(LAYER)
    types = {tensor.type for tensor in tensors.values()}
    width = min(tensor.ne[0] for tensor in tensors.values())
    found = []
    for one, other in itertools.combinations(by_name, 2):
        tally = compare(by_name[one], by_name[other], expert)
        families = ["reference" if name == NUMPY else family(kinds[name]) for name in (one, other)]
        allowed = tolerance(families[0], families[1], types)
        problems = [f"expert {e}: {text}" for e, c in tally.experts().items() if (text := problem(c, allowed, width))]
        found.append({"a": one, "b": other, **asdict(tally.result()), "problems": problems})
    return found


def table(found: list[dict[str, Any]]) -> list[str]:
    """Markdown, a line each pair of backends."""
    lines = [
        "| a | b | cosine | relative L2 | max-abs | gain of an expert, at most off by |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        figures = (
            f"{one['cosine']:.10f} | {one['relative_l2']:.2e} | {one['max_abs']:.2e} | {one['gain_deviation']:.1e}"
        )
        lines.append(f"| {one['a']} | {one['b']} | {figures} |" + (" **differs**" if one["problems"] else ""))
    return lines


def type_table(by_type: dict[str, dict[str, Any]], names: list[str]) -> list[str]:
    """Markdown: relative L2 against NumPy, a line each type of weights, a column each backend."""
    lines = ["| weights | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for kind, of_type in by_type.items():
        cells = []
        for name in names:
            one = next((c for c in of_type["comparisons"] if c["a"] == name and c["b"] == NUMPY), None)
            cells.append(
                "failed" if one is None else f"{one['relative_l2']:.1e}" + (" **!**" if one["problems"] else "")
            )
        lines.append(f"| {kind.upper()} | " + " | ".join(cells) + " |")
    return lines


def rate_table(rows_per_s: dict[str, dict[int, float]], batches: Sequence[int]) -> list[str]:
    """Markdown: rows per second, a line each backend, a column each number of rows of a call."""
    lines = ["| rows of a call | " + " | ".join(map(str, batches)) + " |", "|---" * (len(batches) + 1) + "|"]
    for name, by_batch in rows_per_s.items():
        lines.append(f"| {name}, rows/s | " + " | ".join(f"{by_batch[n]:.0f}" for n in batches) + " |")
    return lines


async def measure(
    options: argparse.Namespace, what: str, index: ModelIndex, rows_per_s: dict[str, dict[int, float]] | None = None
) -> dict[str, Any]:
    expert, by_name, failures = await results(options, index, what, rows_per_s)
    found = comparisons(options, index, expert, by_name)
    n_outputs = int(by_name[NUMPY].size)
    return {"model": what, "n_pairs": len(expert), "n_outputs": n_outputs, "failures": failures, "comparisons": found}


async def run(options: argparse.Namespace) -> int:
    options.folder.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"build": kernels.build_id(), "types": {}}
    names = [backend.name for backend in options.server]
    if not options.no_large:
        index = model(options.folder / f"{LARGE}-layer0.gguf", SHAPES[LARGE], None)
        rows_per_s = document["rows_per_s"] = {}
        large = document["large"] = await measure(options, f"{LARGE}, layer 0", index, rows_per_s)
        types = sorted({tensor.type.upper() for tensor in index.expert_tensors(LAYER).values()})
        print(
            f"{large['model']}: {index.n_expert} experts, {' and '.join(types)}; {large['n_pairs']} (row, expert) pairs,"
        )
        print(f"{large['n_outputs']} outputs\n", *table(large["comparisons"]), "", sep="\n", flush=True)
        if options.timings:
            print("time that the server computes, with results added up there:\n")
            print(*rate_table(rows_per_s, options.timings), "", sep="\n", flush=True)
    for kind in options.types:
        index = model(options.folder / f"small-{kind}.gguf", SMALL, kind)
        document["types"][kind] = await measure(options, f"small, {kind.upper()}", index)
    if options.types:
        each = next(iter(document["types"].values()))
        print(
            f"{SMALL.n_expert} experts of {SMALL.n_ff} x {SMALL.n_embd}, {each['n_pairs']} pairs, {each['n_outputs']} outputs:"
        )
        print("relative L2 against NumPy in float64\n", *type_table(document["types"], names), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    wrong = []
    for one in filter(None, [document.get("large"), *document["types"].values()]):
        wrong += [f"{one['model']}: {name}: {reason}" for name, reason in one["failures"].items()]
        for pair in one["comparisons"]:
            wrong += [f"{one['model']}: {pair['a']} against {pair['b']}: {text}" for text in pair["problems"]]
    for text in wrong:
        say(text)
    say(f"{len(wrong)} differences that are more than noise" if wrong else "no difference that is more than noise")
    return int(bool(wrong))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/equivalence", description="Options after the backends and --.")
    parser.add_argument("--folder", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--server", type=Backend.parse, action="append", required=True, help=argparse.SUPPRESS)
    parser.add_argument(
        "--rows", type=int, default=32, help="rows of a call; each uses the model's experts per token (default: 32)"
    )
    parser.add_argument("--threads", type=int, default=0, help="of each server; 0: as the CPU quota allows")
    parser.add_argument("--no-large", action="store_true", help=f"without the layer of {LARGE} (1.58 GB)")
    parser.add_argument("--types", nargs="*", choices=BLOCK_TYPES, default=list(BLOCK_TYPES), metavar="TYPE",
                        help="of weights, for small layers (default: all)")  # fmt: skip
    parser.add_argument("--timings", type=int, nargs="*", default=[], metavar="ROWS",
                        help="measure rows per second with so many rows a call, such as 1 64 512")  # fmt: skip
    parser.add_argument("--json", type=Path, help="write everything to this file too")
    options = parser.parse_args()
    if not all(1 <= n <= MAX_ROWS for n in (options.rows, *options.timings)):
        parser.error(f"a call has 1 to {MAX_ROWS} rows")
    return options


if __name__ == "__main__":
    sys.exit(asyncio.run(run(arguments())))
