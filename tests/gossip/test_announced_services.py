"""What announcements say, and which are kept: anybody on the LAN may announce anything, any number of times."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zeroconf import ServiceInfo

from gossip.address import Address
from gossip.discovery.announced_services import (
    SERVICES_MAX,
    Found,
    KnownServices,
    announced_swarm,
    announced_text,
    parse,
)
from gossip.discovery.multicast_dns import SERVICE_TYPE
from gossip.discovery.service_browser import is_name

ID = "0123456789abcdef"
TEXT = announced_text(ID, "home", 1)


def service(properties: Any = TEXT, addresses: tuple[str, ...] = ("10.0.0.1",), port: int = 4100) -> ServiceInfo:
    return ServiceInfo(
        SERVICE_TYPE, f"{ID}.{SERVICE_TYPE}", port, properties=properties, parsed_addresses=list(addresses)
    )


def hosts(*addresses: str, loopback: bool = False) -> list[str]:
    found = parse(service(addresses=addresses), "home", loopback=loopback)
    return [] if found is None else [address.host for address in found.addresses]


def test_what_is_announced_is_read() -> None:
    assert parse(service(), "home", loopback=False) == Found(
        ID, "home", 1, (Address("10.0.0.1", 4100),), f"{ID}.{SERVICE_TYPE}"
    )


@pytest.mark.parametrize("name", ["home", "a" * 63, "a" * 64, "Zuhause im Grünen", "é" * 40, "", "x" * 10000])
def test_a_swarm_of_any_name_finds_itself_and_no_other(name: str) -> None:
    info = service(announced_text(ID, name, 1))
    # RFC 6763: a string of a TXT record has at most 255 bytes; we stay far below, for one small packet.
    assert len(info.text) <= 100
    found = parse(info, name, loopback=False)
    assert found is not None
    assert found.swarm == name
    assert parse(info, f"{name}x", loopback=False) is None
    assert parse(info, announced_swarm("y" * 64), loopback=False) is None


@pytest.mark.parametrize(
    "properties",
    [
        {},
        {"swarm": "home"},
        {**TEXT, "id": ID.upper()},
        {**TEXT, "id": ID[:-1]},
        {**TEXT, "id": f"{ID}0"},
        {**TEXT, "id": f"{ID[:-1]}\n"},
        {**TEXT, "id": None},
        {**TEXT, "v": "0"},
        {**TEXT, "v": "-1"},
        {**TEXT, "v": "1.5"},
        {**TEXT, "v": "999999"},
        {**TEXT, "v": "\u0661"},
        {**TEXT, "v": None},
        {**TEXT, "swarm": None},
        {**TEXT, "swarm": b"\xff"},
    ],
)
def test_what_no_node_announces_is_passed_over(properties: dict[str, Any]) -> None:
    assert parse(service(properties), "home", loopback=False) is None


def test_another_version_is_told() -> None:
    found = parse(service({**TEXT, "v": "65535"}), "home", loopback=False)
    assert found is not None
    assert found.version == 65535


@pytest.mark.parametrize("port", [0, 65536])
def test_a_port_nobody_listens_on(port: int) -> None:
    assert parse(service(port=port), "home", loopback=False) is None


def test_addresses_best_first() -> None:
    assert hosts("fd00::1", "169.254.1.1", "10.0.0.2", "10.0.0.1") == ["10.0.0.1", "10.0.0.2", "fd00::1", "169.254.1.1"]


def test_addresses_that_lead_nowhere_are_left_out() -> None:
    assert hosts("0.0.0.0", "224.0.0.1", "ff02::1", "::", "10.0.0.1", "::ffff:10.0.0.1") == ["10.0.0.1"]
    # Link-local without the link it was heard on, and loopback, which would be this machine.
    assert hosts("fe80::1", "127.0.0.1", "::1") == []
    assert hosts("127.0.0.1", loopback=True) == ["127.0.0.1"]


def test_a_link_local_address_has_the_name_of_its_link() -> None:
    info = ServiceInfo(
        SERVICE_TYPE, f"{ID}.{SERVICE_TYPE}", 1, properties=TEXT, parsed_addresses=["fe80::1"], interface_index=1
    )
    found = parse(info, "home", loopback=False)
    assert found is not None
    assert found.addresses == (Address("fe80::1%lo", 1),)


def test_no_more_addresses_than_are_kept() -> None:
    assert hosts(*(f"10.0.0.{n}" for n in range(1, 100))) == [f"10.0.0.{n}" for n in range(1, 17)]


@given(st.binary(max_size=400))
def test_any_text_record(text: bytes) -> None:
    parse(service(text), "home", loopback=False)


class Told:
    """What `KnownServices` tells."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.known = KnownServices(
            lambda found: self.events.append(f"found {found.node_id} {found.addresses[0].host}"),
            lambda node: self.events.append(f"lost {node}"),
        )

    def take(self) -> list[str]:
        taken, self.events[:] = list(self.events), []
        return taken

    def waiting(self) -> list[str]:
        """Takes the names that are to be resolved."""
        names = list(self.known.told._names)
        for name in names:
            self.known.told.discard(name)
        return names


@pytest.fixture
def told() -> Iterator[Told]:
    yield Told()


def found(name: str, node: str = "a", host: str = "10.0.0.1") -> Found:
    return Found(node, "home", 1, (Address(host, 4100),), name)


def test_found_changed_and_lost(told: Told) -> None:
    told.known.added("one")
    assert told.waiting() == ["one"]
    told.known.resolved("one", found("one"))
    told.known.added("one")  # told of again: nothing new
    assert told.waiting() == []
    told.known.updated("one")
    assert told.waiting() == ["one"]
    told.known.resolved("one", found("one"))
    assert told.take() == ["found a 10.0.0.1"]
    told.known.resolved("one", found("one", host="10.0.0.2"))
    told.known.removed("one")
    told.known.removed("one")
    assert told.take() == ["found a 10.0.0.2", "lost a"]


def test_one_removed_while_it_is_resolved(told: Told) -> None:
    told.known.added("one")
    told.known.removed("one")
    assert told.waiting() == []
    told.known.resolved("one", found("one"))
    told.known.updated("one")
    assert told.waiting() == []
    assert told.take() == []


def test_a_node_announced_twice_is_lost_with_the_second(told: Told) -> None:
    for name in ("one", "one-2"):
        told.known.added(name)
        told.known.resolved(name, found(name))
    told.known.removed("one")
    assert told.take() == ["found a 10.0.0.1"] * 2
    told.known.removed("one-2")
    assert told.take() == ["lost a"]


def test_a_name_that_is_another_node_now(told: Told) -> None:
    told.known.added("one")
    told.known.resolved("one", found("one"))
    told.known.resolved("one", found("one", "b"))
    assert told.take() == ["found a 10.0.0.1", "lost a", "found b 10.0.0.1"]
    told.known.resolved("one", None)
    assert told.take() == ["lost b"]


def test_one_that_was_not_resolved_is_tried_when_it_is_told_of_again(told: Told) -> None:
    told.known.added("one")
    assert told.waiting() == ["one"]
    told.known.added("one")
    assert told.waiting() == ["one"]


def test_one_of_which_too_little_was_heard_is_asked(told: Told) -> None:
    for name in ("one", "two"):
        told.known.added(name)
        told.known.ask(name)
    told.known.removed("one")
    told.known.ask("one")
    told.known.ask("never seen")
    assert list(told.known.asked._names) == ["two"]


def test_bounded_and_said_once(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for number in range(2 * SERVICES_MAX):
            told.known.added(f"{number}")
            told.known.updated(f"{number}")
            told.known.ask(f"{number}")
            told.known.resolved(f"{number}", found(f"{number}", f"{number}"))
    assert [r.getMessage() for r in caplog.records] == [
        "more than 256 nodes are announced on this network: no more are taken"
    ]
    assert len(told.take()) == len(told.waiting()) == len(told.known.asked) == SERVICES_MAX
    told.known.removed("7")
    told.known.added("new")
    assert told.waiting() == ["new"]


def test_other_swarms_and_made_up_names_take_nobodys_place(told: Told) -> None:
    told.known.added("mine")
    told.known.resolved("mine", found("mine"))
    for number in range(3 * SERVICES_MAX):
        told.known.added(f"{number}")
        told.known.resolved(f"{number}", None)
    assert len(told.waiting()) <= SERVICES_MAX
    told.known.added("late")
    told.known.resolved("late", found("late", "b"))
    assert told.take() == ["found a 10.0.0.1", "found b 10.0.0.1"]


def test_after_a_new_beginning_those_not_seen_again_are_lost(told: Told) -> None:
    for name in ("one", "two"):
        told.known.added(name)
        told.known.resolved(name, found(name, name))
    told.known.expect_again()
    told.known.added("two")
    told.known.added("three")
    assert told.take() == ["found one 10.0.0.1", "found two 10.0.0.1"]
    told.known.forget_unseen()
    told.known.forget_unseen()
    assert told.take() == ["lost one"]


def test_on_another_network_everything_is_looked_at_again(told: Told) -> None:
    told.known.added("one")
    told.known.resolved("one", found("one"))
    told.waiting()
    told.known.recheck()
    assert told.waiting() == ["one"]


async def test_many_wait_for_names(told: Told) -> None:
    tasks = [asyncio.create_task(told.known.told.next()) for _ in range(3)]
    await asyncio.sleep(0)
    told.known.added("one")
    told.known.added("two")
    async with asyncio.timeout(5):
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 2:
            more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            done |= more
    assert {task.result() for task in done} == {"one", "two"}
    (last,) = waiting
    assert not last.done()
    last.cancel()


def test_a_callback_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fails(argument: Any) -> None:
        raise RuntimeError(f"no {argument}")

    known = KnownServices(fails, fails)
    known.added("one")
    known.resolved("one", found("one"))
    known.removed("one")
    assert [r.exc_info is not None for r in caplog.records] == [True, True]


@pytest.mark.parametrize("label", [ID, f"{ID}-2", f"{ID}-0a1b2c3d", f"{ID}-0a1b2c3d-2"])
def test_names_of_nodes(label: str) -> None:
    assert is_name(f"{label}.{SERVICE_TYPE}")


@pytest.mark.parametrize(
    "name",
    [
        SERVICE_TYPE,
        f"pc.{SERVICE_TYPE}",
        f"{ID}\n.{SERVICE_TYPE}",
        f"{ID}.{SERVICE_TYPE}.",
        f"{ID}{'0' * 200}.{SERVICE_TYPE}",
        f"{ID}-{'0' * 9}.{SERVICE_TYPE}",
        f"{ID}-1-2-3.{SERVICE_TYPE}",
        f"{ID}._other._tcp.local.",
    ],
)
def test_other_names_are_not_even_looked_at(name: str) -> None:
    assert not is_name(name)
