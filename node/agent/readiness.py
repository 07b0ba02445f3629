"""Why a swarm does or does not answer, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from node.records import Record, Router
from node.slices import describe


def waits_for(router: Router, names: Mapping[str, str], activity: str) -> str:
    """What a router that does not answer waits for.

    ``names``: those of nodes by id; ``activity``: what the router is at, if anything.
    """
    if router.plan is not None and router.plan.missing:
        return f"no node has memory for {describe(router.plan.missing)}; add a machine"
    if router.not_ready:
        parts = [f"{describe(s)} on {names.get(i, i)}" for i, s in sorted(router.not_ready.items())]
        return "missing: " + "; ".join(parts[:4])
    return {
        "starting": "the router engine is starting",
        "failed": f"the router engine failed: {router.reason}",
    }.get(router.state, activity or "waiting for slices")


def without_router(*, serves: bool, hashes: str | None) -> str:
    """What is lacking where nobody routes.

    ``serves``: whether this node could; ``hashes``: the file that it reads through, if any.
    """
    if serves:
        return "the router is being elected"
    if hashes is not None:
        return f"hashing {hashes}, to know it from others of its name"
    return "no model yet: start a node with --model FILE"


def with_router(record: Record, waits: str) -> str:
    """How it stands with the router of this record. ``waits``: what for; empty when it answers."""
    model = record.model.file if record.model is not None else "a model"
    return f"{model}, router {record.name}: {waits or 'ready'}"
