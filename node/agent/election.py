"""Who routes: the one rule, on the records of live nodes. Pure; every node that sees the same records agrees."""

from __future__ import annotations

from collections.abc import Iterable

from node.records import Record

#: How long after its start a node first takes part: by then every announced peer had time to answer.
DELAY_S = 3.0


def routing(records: Iterable[Record]) -> Record | None:
    """The router: who routes with the highest term, of equal terms the lowest id. None: nobody routes."""
    return min(
        (record for record in records if record.router is not None),
        key=lambda record: (0 if record.router is None else -record.router.term, record.node),
        default=None,
    )


def elect(records: Iterable[Record]) -> Record | None:
    """Who is to route: the router, if there is one, whatever else comes: nobody displaces a live one.

    Else the able node with the lowest id, of those that have the model's file if there are any. None: nobody is able.
    """
    all_records = list(records)
    able = (record for record in all_records if record.can_route)
    return routing(all_records) or min(able, key=lambda record: (record.fetches, record.node), default=None)


def highest_term(records: Iterable[Record]) -> int:
    """The highest term that is told of; 0 if none is. Expert servers refuse a term below one they have seen."""
    return max((record.router.term for record in records if record.router is not None), default=0)
