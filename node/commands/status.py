"""``swarm-node status``: the swarm as a node sees it, on a screen."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from node.commands.find_node import find_document
from node.slices import Slice, count, describe


async def run_status(options: argparse.Namespace) -> int:
    """Shows the swarm as a node sees it; 0 when queries can be answered, 3 when not. Raises SwarmError."""
    document = await find_document(options, "/status")
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        print_status(document, Console(file=sys.stdout, highlight=False))
    return 0 if document["ready"] else 3


def print_status(document: dict[str, Any], console: Console) -> None:
    """The document of ``/status`` for people."""
    model = document["model"]
    if model is not None:
        size = (model["trunk_bytes"] + model["expert_bytes"]) / 2**30
        console.print(
            f"[bold]{escape(model['file'])}[/] ({escape(model['architecture'])}, {model['layers']} layers, "
            f"{model['experts']} experts, {size:.1f} GiB) in swarm {document['swarm']!r}\n"
            f"[dim]model {escape(model['id'])}[/]"
        )
    else:
        console.print(f"swarm {document['swarm']!r}: no model yet")
    if document["ready"]:
        router = document["router"]
        speed = f", {router['tokens_per_s']:g} tokens/s" if router["tokens_per_s"] else ""
        console.print(f"[green]ready[/], router {escape(router['name'])}, term {router['term']}{speed}")
    else:
        console.print(f"[yellow]not ready[/]: {escape(document['waits_for'])}")
    table = Table()
    for heading in ("node", "state", "device", "offers", "holds"):
        # What is cut there is of no use.
        table.add_column(heading, overflow="fold", no_wrap=heading in ("node", "device", "offers"))
    for node in document["nodes"]:
        state = "alive" if node["alive"] else f"silent for {node['silent_s']:.0f} s"
        role = ", router" if document["router"] and node["node"] == document["router"]["node"] else ""
        planned, ready = count([Slice(*one) for one in node["planned"]]), [Slice(*one) for one in node["ready"]]
        holds = _holds(ready)
        if planned > count(ready):
            holds += f" ({count(ready)} of {planned} experts ready)"
        other = node["model"]
        if other is not None and model is not None and other["id"] != model["id"]:
            holds += f"\n[yellow]has another model: {escape(other['file'])}, {escape(other['id'])}[/]"
        if node["activity"]:
            holds += f"\n{escape(node['activity'])}"
        table.add_row(
            f"{escape(node['name'])}\n[dim]{escape(node['url'].removeprefix('http://'))}[/]",
            f"{state}{role}\n[dim]{escape(node['platform'])}[/]",
            escape(", ".join(f"{d['name']} ({d['type']})" for d in node["devices"]) or "-")
            + _speed(node["expert_bytes_per_s"]),
            f"{node['memory_bytes'] / 2**30:.1f} GiB",
            holds + (f"\n[red]{escape(node['problem'])}[/]" if node["problem"] else ""),
        )
    console.print(table)
    for failure in document["failures"]:
        console.print(f"[red]failed[/]: {escape(failure)}")


def _holds(ready: list[Slice]) -> str:
    """Slices in a few words, even where each layer is cut in another place."""
    ranges = {(first, last) for _, first, last in ready}
    if len(ranges) == 1:
        return describe(ready)
    layers = len({layer for layer, _, _ in ready})
    return f"{count(ready)} experts of {layers} layers" if ready else "nothing"


def _speed(bytes_per_s: float) -> str:
    """A line of its own, with no space at which it would be cut."""
    if bytes_per_s <= 0:
        return ""
    number, unit = (bytes_per_s / 1e9, "GB/s") if bytes_per_s >= 1e8 else (bytes_per_s / 1e6, "MB/s")
    return f"\n{number:.1f}\N{NO-BREAK SPACE}{unit}"
