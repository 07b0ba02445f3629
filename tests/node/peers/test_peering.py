"""What a node makes of what discovery finds."""

from __future__ import annotations

from pathlib import Path

from gossip import PROTOCOL_VERSION, Address
from gossip.discovery import Found
from node.peers.identity import hold_identity
from node.peers.peering import Peering
from rigs.agent import config

NODE = "00000000000000aa"
OLD, NEW = Address("192.168.1.9", 4100), Address("192.168.1.10", 4100)


def _found(*addresses: Address, version: int = PROTOCOL_VERSION) -> Found:
    return Found(NODE, "default", version, addresses, f"{NODE}._swarm-node._tcp.local.")


def _peering(folder: Path) -> Peering:
    settings = config(folder)
    with hold_identity(folder / "state", settings.node.name) as identity:
        return Peering(settings, identity, None, lambda: None)


def test_what_is_announced_is_tried_and_what_is_withdrawn_is_not(tmp_path: Path) -> None:
    peering = _peering(tmp_path)
    peering._found(_found(OLD))
    assert [c["address"] for c in peering.document()["candidates"]] == [str(OLD)]
    assert peering.document()["candidates"][0]["found"] == "multicast DNS"
    peering._found(_found(NEW))
    assert [c["address"] for c in peering.document()["candidates"]] == [str(NEW)]
    peering._lost(NODE)
    assert peering.document()["candidates"] == []


def test_a_node_of_another_version_is_shown_before_it_says_a_word(tmp_path: Path) -> None:
    peering = _peering(tmp_path)
    peering._found(_found(OLD, version=PROTOCOL_VERSION + 1))
    document = peering.document()
    assert document["incompatible"] == [{"host": OLD.host, "version": PROTOCOL_VERSION + 1}]
    assert f"version {PROTOCOL_VERSION + 1}" in document["candidates"][0]["problem"]
