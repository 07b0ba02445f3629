"""Discovery over real multicast DNS, between network namespaces whose links come, go, move and fail."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gossip.address import Address
from gossip.discovery import Discovery, Found, find
from gossip.discovery.interfaces import InterfaceRules
from gossip.discovery.multicast_dns import SERVICE_TYPE
from gossip.errors import GossipError
from rigs.links import Machine, Process, links, needs_namespaces

pytestmark = needs_namespaces

ONE, TWO, THREE = (f"{number:016x}" for number in (1, 2, 3))


@pytest.fixture
def machines(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Machine]]:
    with links(tmp_path, request.param) as made:
        yield made


def ended_well(*nodes: Process) -> None:
    """Ends nodes: at once, without an exception, a task left over, or anything on stderr."""
    for node in nodes:
        node.ask_to_end()
    for node in nodes:
        assert node.end() == 0
        # A second was promised; the rest is for a busy machine.
        assert node.said("closed_s")[0] < 2
        assert node.said("tasks_left") == [[]]
        assert node.errors() == ""


@pytest.mark.parametrize("machines", [4], indirect=True)
def test_two_nodes_find_each_other(machines: list[Machine]) -> None:
    a, b, other, watcher = machines
    for number, machine in enumerate(machines, 1):
        machine.up(f"10.78.0.{number}/24")
    sniffer = watcher.start("sniff")
    sniffer.wait("started")
    rules = {"exclude": ["nosuch*"]}
    first, second = a.node(1, rules=rules), b.node(2, rules=rules)
    stranger = other.node(3, swarm="x" * 100)
    looker = watcher.start("find", "x" * 100, "4")
    found = second.wait("found", lambda found: found["id"] == ONE)
    assert found["hosts"][0] == "10.78.0.1"
    assert (found["port"], found["version"], found["swarm"]) == (4101, 7, "default")
    # The label is the node's id, whatever the machine is called.
    assert found["name"] == ONE
    first.wait("found", lambda found: found["id"] == TWO)
    assert looker.wait("found")["id"] == THREE
    assert looker.end() == 0

    # A crash, and a start within a second: nobody is in the way, and nobody is lost.
    b_seen = len(first.said("found"))
    second.kill()
    heard = len(sniffer.said("sender"))
    second = b.node(2)
    second.wait("found", lambda found: found["id"] == ONE)
    deadline_s = time.monotonic() + 15
    while "10.78.0.2" not in sniffer.said("sender")[heard:]:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert {found["name"] for found in first.said("found")} == {TWO}
    assert first.said("lost") == []

    # A goodbye is told; so are new addresses, but not what did not change.
    ended_well(second)
    assert first.wait("lost", within_s=2) == TWO
    assert len(first.said("found")) <= b_seen + 2
    for node, others in ((first, {TWO}), (second, {ONE}), (stranger, set())):
        assert {found["id"] for found in node.said("found")} == others
    assert stranger.logged("WARNING") == first.logged("WARNING") == []
    # One packet that fits any link, whatever the swarm is called.
    assert max(sniffer.said("size_bytes")) < 500
    ended_well(first, stranger)
    assert (
        len([r for r in sniffer.said("response") if any(kind == "DNSPointer" and ttl == 0 for kind, _, ttl in r)]) >= 3
    )


@pytest.mark.parametrize("machines", [3], indirect=True)
def test_links_of_several_kinds(machines: list[Machine]) -> None:
    """One machine with a container bridge, a link with nothing but link-local IPv6, and a cable to a third machine."""
    a, b, c = machines
    a.ip("link", "add", "docker0", "type", "veth", "peer", "name", "veth0")
    for interface in ("veth0", "docker0"):
        a.ip("link", "set", interface, "up")
    a.ip("addr", "add", "172.17.0.1/16", "dev", "docker0")
    a.cable_to(c, "usb0")
    a.ip("addr", "add", "198.51.100.1/30", "dev", "usb0")
    c.ip("addr", "add", "198.51.100.2/30", "dev", "usb0")
    for machine in (a, b):
        machine.up()
    first, second, third = a.node(1), b.node(2), c.node(3)

    (host,) = first.wait("found", lambda found: found["id"] == TWO)["hosts"]
    assert host.startswith("fe80::") and host.endswith("%eth0")
    assert first.wait("found", lambda found: found["id"] == THREE)["hosts"][0] == "198.51.100.2"
    for node, interface in ((second, "eth0"), (third, "usb0")):
        # All of a machine's addresses are announced on each of its links; link-local ones get the link they came by.
        found = node.wait("found", lambda found: found["id"] == ONE and len(found["hosts"]) == 4)
        assert found["hosts"][:2] == ["172.17.0.1", "198.51.100.1"]
        assert all(host.startswith("fe80::") and host.endswith(f"%{interface}") for host in found["hosts"][2:])
    # These two have no link between them.
    assert {found["id"] for node in (second, third) for found in node.said("found")} == {ONE}
    own = first.wait("addresses", lambda addresses: len(addresses) == 4)
    assert own[0] == "198.51.100.1"
    assert own[3] == "172.17.0.1"
    ended_well(first, second, third)


@pytest.mark.parametrize("machines", [5], indirect=True)
def test_a_network_that_comes_later_and_changes(machines: list[Machine]) -> None:
    """In IPv4 and in IPv6, by moving the sockets and by opening them anew, as with zeroconf before 0.150."""
    still, *moving = machines
    for machine in machines:
        machine.ip("link", "set", "eth0", "addrgenmode", "none")  # no link-local IPv6
    still.up("10.78.0.1/24", "fd78::1/64")
    watcher = still.node(1)
    nodes = [machine.node(number, reopen=number > 3) for number, machine in enumerate(moving, 2)]
    for node in nodes:
        assert node.wait("addresses", lambda addresses: addresses == []) == []
    networks = ("10.78.0.", "/24"), ("fd78::", "/64")

    for number, machine in enumerate(moving, 2):
        net, length = networks[number % 2]
        machine.up(f"{net}{number}{length}")
    for number, node in enumerate(nodes, 2):
        watcher.wait_found(f"{networks[number % 2][0]}{number}", node_id=f"{number:016x}")
        node.wait_found("10.78.0.1", "fd78::1", node_id=ONE)

    # Other addresses: the new ones are announced, and the old ones are nobody's any more.
    for number, machine in enumerate(moving, 2):
        net, length = networks[number % 2]
        machine.ip("addr", "del", f"{net}{number}{length}", "dev", "eth0")
        machine.up(f"{net}{number + 10}{length}")
    for number in range(2, 6):
        watcher.wait_found(f"{networks[number % 2][0]}{number + 10}", node_id=f"{number:016x}")
    assert [text for node in (watcher, *nodes) for text in node.logged("WARNING")] == []
    ended_well(watcher, *nodes)


@pytest.mark.parametrize("machines", [2], indirect=True)
def test_a_flapping_link_is_announced_a_bounded_number_of_times(machines: list[Machine]) -> None:
    a, b = machines
    for number, machine in enumerate(machines, 1):
        machine.ip("link", "set", "eth0", "addrgenmode", "none")
        machine.up(f"10.78.0.{number}/24")
    sniffer = b.start("sniff")
    sniffer.wait("started")
    first, second = a.node(1), b.node(2)
    for node, host in ((first, "10.78.0.2"), (second, "10.78.0.1")):
        node.wait_found(host)
    began = len(sniffer.said("sender"))
    for _ in range(10):
        a.ip("link", "set", "eth0", "down")
        time.sleep(0.25)
        a.ip("link", "set", "eth0", "up")
        time.sleep(0.25)
    newcomer = b.start("find", "default", "4")
    assert newcomer.wait("found", lambda found: found["id"] == ONE)["hosts"] == ["10.78.0.1"]
    newcomer.end()  # what is damped is announced by now
    announced = [sender for sender in sniffer.said("sender")[began:] if sender == "10.78.0.1"]
    # In ten seconds there is place for two changes, each told six times at most, and for two repeats of three.
    assert len(announced) <= 2 * 6 + 2 * 3
    assert len(first.said("addresses")) <= 3
    assert first.said("addresses")[-1] == ["10.78.0.1"]
    assert first.said("lost") == second.said("lost") == []
    ended_well(first, second)


@pytest.mark.parametrize("machines", [5], indirect=True)
def test_two_nodes_of_one_id(machines: list[Machine]) -> None:
    """Copies of a disk: one starts later and takes another label; two meet when their networks do; one gives way."""
    for number, machine in enumerate(machines, 1):
        machine.ip("link", "set", "eth0", "addrgenmode", "none")
        machine.up(f"10.78.0.{number}/24")
    machines[4].unplug()
    apart = machines[4].start("sniff")
    apart.wait("started")
    watcher = machines[0].node(9)
    early = machines[1].node(1)
    meeting = [machine.node(2) for machine in machines[3:]]
    assert watcher.wait("found", lambda found: found["id"] == ONE)["name"] == ONE
    late = machines[2].node(1)
    assert watcher.wait("found", lambda found: found["hosts"] == ["10.78.0.3"])["name"] == f"{ONE}-2"
    assert watcher.wait("found", lambda found: found["hosts"] == ["10.78.0.4"])["name"] == TWO
    apart.wait("response")

    machines[4].plug_in()

    def names() -> dict[str, str]:
        """Where each node of the other id was found last, by name."""
        return {found["name"]: found["hosts"][0] for found in watcher.said("found") if found["id"] == TWO}

    deadline_s = time.monotonic() + 20
    while sorted(names().values()) != ["10.78.0.4", "10.78.0.5"]:
        assert time.monotonic() < deadline_s, watcher.said("found")
        time.sleep(0.1)
    (other,) = set(names()) - {TWO}
    assert re.fullmatch(rf"{TWO}-[0-9a-f]{{8}}", other)
    assert watcher.said("lost") == []
    # Each copy says so to its user, and tells nobody of itself.
    for node, node_id in ((early, ONE), (late, ONE), (meeting[0], TWO), (meeting[1], TWO)):
        assert node.wait("text", lambda text, node_id=node_id: f"this node's id {node_id}" in text)
        assert node_id not in {found["id"] for found in node.said("found")}
    ended_well(watcher, early, late, *meeting)


@pytest.mark.parametrize("machines", [4], indirect=True)
def test_multicast_that_does_not_work_is_a_warning(machines: list[Machine]) -> None:
    for number, machine in enumerate(machines, 1):
        machine.ip("link", "set", "eth0", "addrgenmode", "none")
        machine.up(f"10.78.0.{number}/24")
    holder = machines[0].start("hold")
    holder.wait("started")
    barred = machines[0].node(1)
    mute = machines[1].node(2, failing=10**6, error="ENETUNREACH")
    slow = machines[2].node(3, failing=12, error="EHOSTUNREACH")
    good = machines[3].node(4)
    # The first packets of all kinds failed, and it is found all the same.
    good.wait("found", lambda found: found["id"] == THREE)
    assert "Address already in use" in barred.wait("text")
    # Tried again, without saying it again; and when it works, that is said.
    holder.kill()
    assert "Network is unreachable" in mute.wait("text")
    good.wait("found", lambda found: found["id"] == ONE)
    assert "works again" in barred.wait("text", lambda text: "works" in text)
    # It still hears, and is not heard.
    mute.wait("found", lambda found: found["id"] == THREE)
    assert TWO not in {found["id"] for found in good.said("found")}
    for node, warnings in ((barred, 1), (mute, 1), (slow, 0), (good, 0)):
        texts = node.logged("WARNING")
        assert len(texts) == warnings, texts
        assert all(text.startswith("multicast DNS does not work here (") for text in texts)
    ended_well(barred, mute, slow, good)


@pytest.mark.parametrize("machines", [3], indirect=True)
def test_garbage_changes_nothing(machines: list[Machine]) -> None:
    for number, machine in enumerate(machines, 1):
        machine.up(f"10.78.0.{number}/24")
    a, b, hostile = machines
    first = a.node(1)
    for seed in (1, 2):
        assert hostile.start("garbage", str(seed)).end() == 0
    # 400 made-up names wait for an answer by now.
    second = b.node(2)
    first.wait("found", lambda found: found["id"] == TWO)
    second.wait("found", lambda found: found["id"] == ONE)
    assert {found["id"] for found in first.said("found")} == {TWO}
    assert first.logged("WARNING") == first.said("lost") == []
    ended_well(first, second)


async def test_on_loopback_alone_and_a_search_that_is_left() -> None:
    """Two nodes of one machine do so; nothing of it leaves the machine."""
    rules = InterfaceRules(loopback_only=True)
    swarm, node_id = f"test-{os.getpid()}", f"{os.getpid():016x}"
    node = Discovery(node_id=node_id, swarm=swarm, port=9, version=1, on_found=print, on_lost=print, interfaces=rules)
    before = asyncio.all_tasks()
    running = asyncio.create_task(node.run())
    async with asyncio.timeout(10), contextlib.aclosing(find(swarm, 9, interfaces=rules)) as search:
        async for found in search:
            assert found == Found(node_id, swarm, 1, found.addresses, f"{node_id}.{SERVICE_TYPE}")
            assert found.addresses[0] == Address("127.0.0.1", 9)
            assert set(found.addresses[1:]) <= {Address("::1", 9)}
            break
        else:
            raise AssertionError("nothing was found")
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert asyncio.all_tasks() == before


async def test_without_a_network_it_waits_and_ends_when_it_is_told() -> None:
    discovery = Discovery(node_id=ONE, swarm="home", port=1, version=1, on_found=lambda _: None, on_lost=lambda _: None)
    discovery.set_addresses([])
    running = asyncio.create_task(discovery.run())
    await asyncio.sleep(0.1)
    assert not running.done()
    running.cancel()
    await asyncio.wait([running], timeout=2)
    assert running.cancelled()


@pytest.mark.parametrize("node_id", ["", "pc", "0123456789ABCDEF", "0" * 80])
def test_a_label_is_a_node_id(node_id: str) -> None:
    with pytest.raises(GossipError, match="node id"):
        Discovery(node_id=node_id, swarm="", port=1, version=1, on_found=print, on_lost=print)
