"""``swarm-node peers``: how a node found the others and reaches them, on a screen."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from node.commands.find_node import find_document


async def run_peers(options: argparse.Namespace) -> int:
    """Shows how a node found the others and reaches them. Raises SwarmError."""
    document = await find_document(options, "/peers")
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        print_peers(document, Console(file=sys.stdout, highlight=False))
    return 0


def print_peers(document: dict[str, Any], console: Console) -> None:
    """The document of ``/peers`` for people."""
    own = ", ".join(f"{a['address']} ({a['interface']})" for a in document["addresses"]) or "none"
    console.print(f"This node, {document['node']}, can be reached at: {escape(own)}")
    for entry in document["addresses_left_out"]:
        console.print(
            f"  [dim]not {escape(entry['address'])} ({escape(entry['interface'])}): {escape(entry['reason'])}[/]"
        )
    if document["twin"]:
        console.print(
            f"[red]Another machine at {escape(document['twin'])} has this node's id[/]: a copied state folder. "
            f"Remove it there."
        )
    table = Table()
    for heading in ("node", "state", "found", "address", "how it answers"):
        table.add_column(heading)
    for peer in document["peers"]:
        paths = sorted(peer["paths"], key=lambda path: not path["used"]) or [{"address": "none known", "state": ""}]
        colour = {"alive": "green", "suspect": "yellow"}.get(peer["status"], "red")
        heard = "" if peer["heard_s"] is None else f", heard {peer['heard_s']:.0f} s ago"
        name = escape(peer["name"] or peer["node"])
        if peer["problem"]:
            name += f"\n[red]{escape(peer['problem'])}[/]"
        table.add_row(
            name,
            f"[{colour}]{peer['status']}[/]{heard}",
            escape(peer["found"]),
            "\n".join(("→ " if path.get("used") else "  ") + escape(path["address"]) for path in paths),
            "\n".join(escape(path["state"]) for path in paths),
        )
    if document["peers"]:
        console.print(table)
    else:
        console.print("No other node was found yet.")
    for candidate in document["candidates"]:
        console.print(
            f"  {escape(candidate['address'])} ({escape(candidate['found'])}): {escape(candidate['problem'])}, "
            f"tried {candidate['tries']} times"
        )
    for host in document["incompatible"]:
        console.print(
            f"  [red]{escape(host['host'])} speaks gossip version {host['version']}[/]: it is given no work. "
            f"Update the older of the two programs."
        )
    for host in document["other_keys"]:
        console.print(
            f"  [red]{escape(host['host'])} calls itself of this swarm, but {escape(host['problem'])}[/]: one swarm "
            f"has one `\\[swarm] key`."
        )
    statistics = document["statistics"]
    if statistics["foreign"]:
        console.print(
            f"  {statistics['foreign']} packets of other swarms, or of nodes without this swarm's key, were dropped."
        )
