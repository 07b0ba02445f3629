"""``swarm-node model list`` and ``prune``: the models of this machine's cache and of the swarm."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from node.errors import ModelError, SwarmError

if TYPE_CHECKING:
    from node.transfer.store import ModelStore, StoredInfo

    # argparse's subparsers have no public type.
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_list(parts: Commands) -> None:
    """Adds ``list`` to the subcommands of ``model``."""
    command = parts.add_parser(
        "list",
        help="list the models of the swarm, and what was fetched of them to this machine",
        description="Lists the models that nodes of a running swarm have, as the node of this machine or of --url "
        "sees them, and "
        "what this machine's cache holds. `swarm-node --model NAME` takes part in one of them, by file name or "
        "beginning of its id.",
    )
    command.add_argument("--url", metavar="URL", help="a node, http://HOST:PORT (default: found by itself)")
    command.add_argument("--config", metavar="FILE", help="swarm.toml with this machine's port")
    command.add_argument("--json", action="store_true", help="JSON, for scripts")
    command.set_defaults(run=run_list)


def add_prune(parts: Commands) -> None:
    """Adds ``prune`` to the subcommands of ``model``."""
    command = parts.add_parser(
        "prune",
        help="remove what was fetched to this machine and is not in use",
        description="Removes fetched models from this machine's cache, the least recently used first, until the "
        "cache is within "
        "[model] cache_gib; or those that are named. What a running node uses stays. Your own model files are never "
        "touched.",
        epilog="examples: swarm-node model prune    swarm-node model prune --all    swarm-node model prune 8b6b72",
    )
    command.add_argument("ids", nargs="*", metavar="ID", help="the beginning of a model's id: only these")
    command.add_argument("--all", action="store_true", help="everything that is not in use")
    command.add_argument("--config", metavar="FILE", help="swarm.toml with this machine's cache_gib")
    command.set_defaults(run=run_prune)


async def run_list(options: argparse.Namespace) -> int:
    """Shows the models of cache and swarm."""
    from node.commands.find_node import find_document

    cached = await asyncio.to_thread(_store(options).models)
    try:
        swarm: list[dict[str, Any]] | None = list((await find_document(options, "/status")).get("catalogue", []))
    except SwarmError as error:
        swarm = None
        print(f"swarm-node: the swarm's models are not known: {error}", file=sys.stderr)
    if options.json:
        print(json.dumps({"swarm": swarm, "cache": [_document(info) for info in cached]}, indent=1))
        return 0
    _print(swarm, cached)
    return 0


async def run_prune(options: argparse.Namespace) -> int:
    """Removes models from the cache. Raises ModelError for an id that means none, or several."""
    return await asyncio.to_thread(_prune, options)


def _prune(options: argparse.Namespace) -> int:
    store = _store(options)
    infos = store.models()
    removed = []
    if options.ids:
        for beginning in options.ids:
            meant = [info for info in infos if info.model_id.startswith(beginning)]
            if len(meant) != 1:
                raise ModelError(f"{len(meant)} models of {store.folder} have an id that begins with {beginning!r}")
            removed += store.prune(-1, only=meant[0].model_id)
    else:
        removed = store.prune(-1 if options.all else store.limit_bytes())
    for info in removed:
        print(f"removed {info.name} ({info.model_id}): {_size(info.disk_bytes)}")
    kept = [info for info in store.models() if info.in_use]
    for info in kept:
        print(f"in use, kept: {info.name} ({info.model_id}): {_size(info.disk_bytes)}")
    if not removed and not kept:
        print(f"nothing to remove: {store.folder} holds {_size(store.used_bytes())} of {_size(store.limit_bytes())}")
    return 0


def _store(options: argparse.Namespace) -> ModelStore:
    from node.paths import cache_dir
    from node.settings.load import load_config
    from node.transfer.store import ModelStore

    config = load_config(argparse.Namespace(config=options.config), os.environ)
    return ModelStore(cache_dir() / "models", config.model.cache_gib << 30)


def _print(swarm: list[dict[str, Any]] | None, cached: list[StoredInfo]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    if swarm:
        table = Table("model", "id", "size", "nodes", title="in the swarm", title_justify="left")
        for one in swarm:
            nodes = [*one["whole"], *(f"{name} (in part)" for name in one["part"])]
            table.add_row(escape(one["file"]), one["id"][:12], _size(one["bytes"]), escape(", ".join(nodes)))
        console.print(table)
    elif swarm is not None:
        console.print("No node of the swarm has a model yet.")
    if cached:
        table = Table("model", "id", "here", "of", "used", title="in this machine's cache", title_justify="left")
        for info in cached:
            age = "now" if info.in_use else f"{(time.time() - info.used_s) / 86400:.0f} days ago"
            table.add_row(
                escape(info.name), info.model_id[:12], _size(info.present_bytes), _size(info.total_bytes), age
            )
        console.print(table)
    else:
        console.print("Nothing was fetched to this machine.")


def _document(info: StoredInfo) -> dict[str, Any]:
    return {
        "id": info.model_id,
        "file": info.name,
        "bytes": info.total_bytes,
        "present_bytes": info.present_bytes,
        "disk_bytes": info.disk_bytes,
        "used_s": info.used_s,
        "in_use": info.in_use,
    }


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
