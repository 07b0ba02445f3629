"""How this node found the others, and how it reaches them: the document of ``GET /peers``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gossip import Member, Service
from gossip.discovery import LeftOut, LocalAddress
from node.peers.membership import Membership


def peers_document(
    service: Service,
    membership: Membership,
    addresses: Sequence[LocalAddress],
    left_out: Sequence[LeftOut],
    now_s: float,
) -> dict[str, Any]:
    """Members, candidates, this node's own addresses, and what gossip counted. Times in seconds."""
    core = service.core
    known = membership.known(now_s)
    live_hosts = {member.address.host for member in core.members if member.is_live and member.address is not None}
    found_by = {candidate.member: candidate.source for candidate in core.candidates if candidate.member is not None}
    return {
        "node": core.node.hex(),
        "addresses": [{"address": a.address, "interface": a.interface} for a in addresses],
        "addresses_left_out": [{"address": a.address, "interface": a.interface, "reason": a.reason} for a in left_out],
        "peers": [
            _peer(member, found_by.get(member.node, member.source), membership, known, now_s) for member in core.members
        ],
        "candidates": [
            {
                "address": str(candidate.address),
                "found": candidate.source,
                "tries": candidate.tries,
                "problem": candidate.problem or "no answer yet",
            }
            for candidate in core.candidates
            if candidate.member is None
        ],
        "incompatible": [{"host": host, "version": version} for host, version in core.incompatible.items()],
        "other_keys": [
            {"host": host, "problem": problem}
            for host, problem in service.wrong_keys.items()
            if host not in live_hosts  # it has the key by now
        ],
        "twin": None if core.twin is None else str(core.twin),
        "health": core.health.score,
        "statistics": asdict(service.statistics),
    }


def _peer(member: Member, found: str, membership: Membership, known: Any, now_s: float) -> dict[str, Any]:
    peer = known.get(member.node.hex())
    return {
        "node": member.node.hex(),
        "name": peer.record.name if peer is not None else "",
        "status": member.status.name.lower(),
        "since_s": round(now_s - member.since_s, 1),
        "heard_s": None if member.heard_s is None else round(now_s - member.heard_s, 1),
        "incarnation": member.incarnation,
        "record_version": member.record.version if member.record is not None else None,
        "found": found,
        "address": None if member.address is None else str(member.address),
        "paths": [
            {
                "address": str(path.address),
                "from": path.source,
                "state": path.describe(),
                "used": path.address == member.address,
                "rtt_ms": None if path.rtt_s is None else round(1000 * path.rtt_s, 2),
            }
            for path in member.paths.all()
        ],
        "problem": membership.refusal(member.node),
    }
