"""The suite `wire` of scripts/bench: bytes of expert calls for each mode and float
format, and what the format changes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from bench_ways import STOCK, llama_bench, output_of, swarm, swarm_way

from node.models.index import ModelIndex
from node.number_formats import ITEM_BYTES

TOKENS = 32
CONTEXT = 256
ROOT = Path(__file__).resolve().parents[1]


async def wire(options: argparse.Namespace, index: ModelIndex, model: str, folder: Path) -> list[dict[str, Any]]:
    """Bytes of one token and layer, counted by the Swarm backend, beside the limit; and
    the distance to stock's words."""
    rows = []
    text = folder / "text"
    # English prose that is at hand on every machine: the project's own.
    text.write_text("\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))))
    base = folder / "base"
    arguments = ["-m", model, "-t", str(options.threads), "--poll", "0", "-f", str(text), "-c", str(CONTEXT)]
    arguments += ["--chunks", str(options.wire_chunks), "--kl-divergence-base", str(base)]
    with contextlib.suppress(FileNotFoundError):
        base.unlink()
    options.progress("wire: stock's probabilities")
    await output_of("llama-perplexity", arguments, STOCK)
    for servers in options.wire_servers:
        async with swarm(index, servers, options, folder / f"wire-{servers}") as table:
            for reduce in ("sum", "rows"):
                for dtype in ("f32", "bf16", "f16"):
                    options.progress(f"wire: {servers} servers, {reduce}, {dtype}")
                    over = dataclasses.replace(table, reduce=reduce, dtype=dtype)
                    way = swarm_way(over, folder / "wire.json", f"swarm, {reduce}, {dtype}")
                    statistics_path = folder / "statistics.json"
                    way.environment["SWARM_STATS"] = str(statistics_path)
                    await llama_bench(options, model, way, decode=TOKENS)
                    counted = json.loads(statistics_path.read_text())
                    rounds = sum(layer["rounds"] for layer in counted["layers"])
                    sent = sum(node["bytes_sent"] for node in counted["nodes"]) / rounds
                    received = sum(node["bytes_received"] for node in counted["nodes"]) / rounds
                    pairs = sum(node["pairs"] for node in counted["nodes"]) / rounds
                    row = {"servers": servers, "reduce": reduce, "dtype": dtype, "sent": sent, "received": received}
                    row["limit"] = None
                    if reduce == "sum":
                        row["limit"] = servers * (2 * index.n_embd * ITEM_BYTES[dtype] + 200) + 16 * pairs
                    row |= {"divergence": None, "same_top": None}
                    # One server adds up as stock does; with two, only the order of additions differs: what f32 changes
                    # there is the measure of what is little.
                    if servers <= 2:
                        output = await output_of("llama-perplexity", [*arguments, "--kl-divergence"], way)
                        row |= {"divergence": _figure(output, "Mean    KLD"), "same_top": _figure(output, "Same top p")}
                    rows.append(row)
    return rows


def _figure(output: str, name: str) -> float:
    match = re.search(rf"{re.escape(name)}:\s*(-?[\d.e+-]+|nan)", output)
    if match is None:
        raise SystemExit(f"bench: llama-perplexity prints no '{name}':\n{output[-2000:]}")
    return float(match[1])


def print_wire(rows: list[dict[str, Any]]) -> None:
    print("wire (bytes of one token and layer, all servers together, frames and messages included)")
    print(
        "  'limit': servers x (2 x n_embd x bytes of a value + 200) + 16 a pair; KLD: of stock's next-word "
        "probabilities"
    )
    print(
        f"  {'servers':>7} {'mode':>5} {'format':>6} {'sent':>8} {'received':>9} {'together':>9} {'limit':>9} "
        f"{'KLD':>10} {'same first':>10}"
    )
    for row in rows:
        limit = "" if row["limit"] is None else f"{row['limit']:9.0f}"
        divergence = "" if row["divergence"] is None else f"{row['divergence']:10.6f}"
        same = "" if row["same_top"] is None else f"{row['same_top']:8.2f} %"
        print(
            f"  {row['servers']:7} {row['reduce']:>5} {row['dtype']:>6} {row['sent']:8.0f} {row['received']:9.0f} "
            f"{row['sent'] + row['received']:9.0f} {limit:>9} {divergence:>10} {same:>10}"
        )
    print()
