"""The same calls through the expert servers of several builds, and NumPy: how alike the results are, as tables.

Started by scripts/equivalence, which makes the builds. Ends with 1 when a result differs by
more than kernels/tolerances.py allows.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from equivalence_servers import LAYER, MAX_ROWS, Backend, Connection, Inputs, Server, make_inputs, numpy_rows
from numpy.typing import NDArray

import kernels
from kernels.equivalence import compare
from kernels.tolerances import family, problem, tolerance
from node.errors import SwarmError
from node.models.index import ModelIndex, read_model
from node.models.random_blocks import BLOCK_TYPES
from node.models.synthetic import SHAPES, SyntheticShape, write_synthetic_model

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
    """Rows per second by the rows of a call, added up on the server; the median of 5 calls
    after one that is not counted."""
    found = {}
    for n_rows in batches:
        inputs = make_inputs(index, n_rows)
        times_s = [(await connection.call(inputs, "sum"))[1] for _ in range(6)][1:]
        found[n_rows] = n_rows / max(statistics.median(times_s), 1e-6)
    return found


@dataclass
class Job:
    """A layer, what is asked of it, and what came of it by backend: results [n_pairs, n_out], or why there are none."""

    what: str
    index: ModelIndex
    inputs: Inputs
    results: dict[str, NDArray[Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    rows_per_s: dict[str, dict[int, float]] = field(default_factory=dict)
    is_timed: bool = False

    @property
    def expert(self) -> NDArray[np.int32]:
        """The expert of each pair, [pairs]."""
        return self.inputs.expert.reshape(-1)

    def to_json(self, found: list[dict[str, Any]]) -> dict[str, Any]:
        n_outputs = int(self.results[NUMPY].size)
        return {
            "model": self.what,
            "n_pairs": len(self.expert),
            "n_outputs": n_outputs,
            "failures": self.failures,
            "rows_per_s": self.rows_per_s,
            "comparisons": found,
        }


async def compute(options: argparse.Namespace, backend: Backend, jobs: list[Job]) -> None:
    """Has one expert server of the build compute every job, one after the other."""
    server = Server(backend, options.threads, options.folder / f"{backend.name}.log")
    outputs = options.folder / "outputs"
    outputs.mkdir(exist_ok=True)
    try:
        for job in jobs:
            kept = outputs / f"{Path(job.index.paths[0]).stem}-{options.rows}-{backend.name}.npy"
            if options.resume and kept.exists():
                job.results[backend.name] = np.load(kept)
                continue
            started = time.monotonic()
            try:
                async with server.holding(job.index) as connection:
                    y, compute_s = await connection.call(job.inputs)
                    if job.is_timed:
                        job.rows_per_s[backend.name] = await rates(connection, job.index, options.timings)
            except (SwarmError, OSError) as error:
                job.failures[backend.name] = str(error)
                say(f"{job.what}: {backend.name}: {error}")
                continue
            job.results[backend.name] = y
            np.save(kept, y)
            all_s = time.monotonic() - started
            say(f"{job.what}: {backend.name}: computed in {compute_s:.2f} s, with start and load {all_s:.1f} s")
    finally:
        await server.stop()


def comparisons(options: argparse.Namespace, job: Job) -> list[dict[str, Any]]:
    """Figures of every pair of backends, and what is wrong between them by kernels/tolerances.py."""
    kinds = {one.name: "cpu" if one.device == "CPU" else "gpu" for one in options.server}
    tensors = job.index.expert_tensors(LAYER)
    types = {tensor.type for tensor in tensors.values()}
    width = min(tensor.ne[0] for tensor in tensors.values())
    found = []
    for one, other in itertools.combinations(job.results, 2):
        tally = compare(job.results[one], job.results[other], job.expert)
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


def make_jobs(options: argparse.Namespace) -> list[Job]:
    """The layers, written if they are not there. Raises ModelError."""
    jobs = []
    if not options.no_large:
        index = model(options.folder / f"{LARGE}-layer0.gguf", SHAPES[LARGE], None)
        inputs = make_inputs(index, options.rows)
        jobs.append(Job(f"{LARGE}, layer 0", index, inputs, is_timed=bool(options.timings)))
    for kind in options.types:
        index = model(options.folder / f"small-{kind}.gguf", SMALL, kind)
        jobs.append(Job(f"small, {kind.upper()}", index, make_inputs(index, options.rows)))
    return jobs


async def run(options: argparse.Namespace) -> int:
    options.folder.mkdir(parents=True, exist_ok=True)
    jobs = make_jobs(options)
    for backend in options.server:
        await compute(options, backend, jobs)
    documents = []
    for job in jobs:
        job.results[NUMPY] = await asyncio.to_thread(numpy_rows, job.index, job.inputs)
        documents.append(job.to_json(comparisons(options, job)))
    names = [backend.name for backend in options.server]
    if not options.no_large:
        large, index = documents[0], jobs[0].index
        types = sorted({tensor.type.upper() for tensor in index.expert_tensors(LAYER).values()})
        print(
            f"{large['model']}: {index.n_expert} experts, {' and '.join(types)}; {large['n_pairs']} (row, expert) "
            "pairs,"
        )
        print(f"{large['n_outputs']} outputs\n", *table(large["comparisons"]), "", sep="\n")
        if large["rows_per_s"]:
            print("time that the server computes, with results added up there:\n")
            print(*rate_table(large["rows_per_s"], options.timings), "", sep="\n")
    if options.types:
        by_type = dict(zip(options.types, documents[-len(options.types) :], strict=True))
        each = documents[-1]
        print(
            f"{SMALL.n_expert} experts of {SMALL.n_ff} x {SMALL.n_embd}, {each['n_pairs']} pairs, "
            f"{each['n_outputs']} outputs:"
        )
        print("relative L2 against NumPy in float64\n", *type_table(by_type, names), sep="\n")
    if options.json:
        options.json.write_text(json.dumps({"build": kernels.build_id(), "layers": documents}, indent=1) + "\n")
    wrong = []
    for one in documents:
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
    parser.add_argument(
        "--resume",
        action="store_true",
        help="take outputs that an earlier run left in DIR/equivalence/outputs, instead of computing them",
    )
    parser.add_argument("--timings", type=int, nargs="*", default=[], metavar="ROWS",
                        help="measure rows per second with so many rows a call, such as 1 64 512")  # fmt: skip
    parser.add_argument("--json", type=Path, help="write everything to this file too")
    options = parser.parse_args()
    if not all(1 <= n <= MAX_ROWS for n in (options.rows, *options.timings)):
        parser.error(f"a call has 1 to {MAX_ROWS} rows")
    return options


if __name__ == "__main__":
    sys.exit(asyncio.run(run(arguments())))
