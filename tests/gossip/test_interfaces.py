"""Which of a machine's addresses peers may reach, in which order, and why the others are left out."""

from __future__ import annotations

import ipaddress
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.discovery.interfaces import (
    InterfaceRules,
    Kind,
    LeftOut,
    LocalAddress,
    SeenAddress,
    kind_of,
    local_addresses,
    order,
    read_interfaces,
    usable_addresses,
)
from gossip.limits import ADDRESSES_MAX

ALL = InterfaceRules()
# A laptop with everything: what is usable, best first.
LAPTOP = [
    SeenAddress("192.0.2.10", "eth0"),
    SeenAddress("192.168.1.7", "wlan0"),
    SeenAddress("2001:db8::10", "eth0"),
    SeenAddress("fd00::7", "wlan0"),
    SeenAddress("fe80::10%eth0", "eth0"),
    SeenAddress("fe80::10%wlan0", "wlan0"),  # the same on another link is another address
    SeenAddress("169.254.3.4", "eth1"),
    SeenAddress("10.9.0.1", "rmnet0"),
    SeenAddress("10.8.0.2", "tun0"),
    SeenAddress("100.64.0.5", "wlan0"),
    SeenAddress("fd7a:115c:a1e0::5", "tailscale0"),
    SeenAddress("172.17.0.1", "docker0"),
    SeenAddress("192.168.122.1", "virbr0"),
]
NOT_USABLE = [
    SeenAddress("127.0.0.1", "lo"),
    SeenAddress("::1", "lo"),
    SeenAddress("02:42:ac:11:00:02", "eth0"),
    SeenAddress("fe80::1%veth1a2b", "veth1a2b"),
    SeenAddress("fe80::2%tun0", "tun0"),
    SeenAddress("fe80::3%awdl0", "awdl0"),
    SeenAddress("198.51.100.1", "enp3s0", up=False),
]


def texts(seen: list[SeenAddress], rules: InterfaceRules = ALL) -> list[str]:
    return [local.address for local in usable_addresses(seen, rules)[0]]


def reason(entry: SeenAddress, rules: InterfaceRules = ALL) -> str:
    usable, left_out = usable_addresses([entry], rules)
    assert not usable
    assert [(out.address, out.interface) for out in left_out] == [(entry.address, entry.interface)]
    return left_out[0].reason


@given(st.permutations(LAPTOP + NOT_USABLE))
def test_the_order_of_interfaces_changes_nothing(shuffled: list[SeenAddress]) -> None:
    usable, left_out = usable_addresses(shuffled, ALL)
    assert [(local.address, local.interface) for local in usable] == [(e.address, e.interface) for e in LAPTOP]
    assert usable == sorted(usable, key=order)
    assert [local.rank for local in usable] == sorted(local.rank for local in usable)
    assert {out.address for out in left_out} == {
        *("127.0.0.1", "::1", "fe80::1%veth1a2b", "fe80::2%tun0", "fe80::3%awdl0", "198.51.100.1")
    }


@given(st.permutations(["eth0", "docker0", "tun0", "usb0"]))
def test_the_machine_of_disc_2(interfaces: list[str]) -> None:
    addresses = {"eth0": "192.0.2.10", "docker0": "172.17.0.1", "tun0": "100.64.0.5", "usb0": "198.51.100.1"}
    seen = [SeenAddress(addresses[interface], interface) for interface in interfaces]
    assert texts(seen) == ["192.0.2.10", "198.51.100.1", "100.64.0.5", "172.17.0.1"]


def test_a_node_on_a_container_bridge_alone_uses_it() -> None:
    assert texts([SeenAddress("127.0.0.1", "lo"), SeenAddress("172.17.0.1", "docker0")]) == ["172.17.0.1"]


@pytest.mark.parametrize(
    ("kind", "interfaces"),
    [
        (Kind.LAN, "eth0 en0 eno1 enp0s31f6 enx00e04c wlan0 wlp2s0 usb0 br0 bridge0 bond0 em1 p4p1 ib0"),
        (Kind.OTHER, "rmnet_data0 wwan0 dummy0 ccmni1 tentacle"),
        (Kind.TUNNEL, "tun0 tap0 wg0 tailscale0 ztabcdef utun3 ppp0"),
        (Kind.CONTAINER, "docker0 br-0123456789ab veth12 virbr0 vmnet8 vboxnet0 podman1 cni0 lxcbr0 bridge100 vnet3"),
    ],
)
def test_kinds(kind: Kind, interfaces: str) -> None:
    assert {name: kind_of(name) for name in interfaces.split()} == dict.fromkeys(interfaces.split(), kind)


def test_interfaces_are_counted_as_people_count() -> None:
    seen = [SeenAddress("10.0.0.10", "eth10"), SeenAddress("10.0.0.9", "eth9")]
    assert texts(seen) == ["10.0.0.9", "10.0.0.10"]


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ((), ("tun0",), {"eth0", "eth1", "docker0"}),
        (("tun0",), (), {"tun0"}),
        (("eth*", "tun?"), (), {"eth0", "eth1", "tun0"}),
        (("eth*",), ("eth1",), {"eth0"}),
        (("lo",), (), set()),
        (("nosuch",), (), set()),
        ((), ("*",), set()),
    ],
)
def test_interfaces_named_by_the_user(include: tuple[str, ...], exclude: tuple[str, ...], expected: set[str]) -> None:
    names = ("eth0", "eth1", "tun0", "docker0")
    seen = [SeenAddress(f"10.0.0.{number}", name) for number, name in enumerate(names)]
    rules = InterfaceRules(include, exclude)
    usable, left_out = usable_addresses([*seen, SeenAddress("127.0.0.1", "lo")], rules)
    assert {local.interface for local in usable} == expected
    assert {out.interface for out in left_out} == {*names, "lo"} - expected


def test_every_reason() -> None:
    eth0 = SeenAddress("10.0.0.1", "eth0")
    assert reason(SeenAddress("127.0.0.1", "lo")) == "loopback reaches only this machine"
    assert reason(SeenAddress("0.0.0.0", "eth0")) == "not the address of a machine"
    assert reason(SeenAddress("10.0.0.1", "eth0", up=False)) == "the interface is down"
    assert reason(eth0, InterfaceRules(exclude=("eth*",))) == "among the interfaces not to use"
    assert reason(eth0, InterfaceRules(include=("wlan0",))) == "not among the interfaces to use"
    assert reason(eth0, InterfaceRules(loopback_only=True)) == "only loopback is used"
    assert reason(SeenAddress("fe80::1%br-00", "br-00")) == "link-local, and the interface is not one of a LAN"
    assert reason(SeenAddress("fe80::1%awdl0", "awdl0")) == "a link between devices of Apple's"
    usable, left_out = usable_addresses([eth0, SeenAddress("10.0.0.1", "eth1")], ALL)
    assert [local.interface for local in usable] == ["eth0"]
    assert left_out == [LeftOut("10.0.0.1", "eth1", "eth0 has the same address")]


def test_loopback_only() -> None:
    rules = InterfaceRules(include=("eth0",), loopback_only=True)
    seen = [SeenAddress("10.0.0.1", "eth0"), SeenAddress("::1", "lo"), SeenAddress("127.0.0.1", "lo")]
    assert texts(seen, rules) == ["127.0.0.1", "::1"]


def test_link_local_carries_its_interface() -> None:
    assert texts([SeenAddress("fe80::1", "eth0")]) == ["fe80::1%eth0"]
    assert texts([SeenAddress("FE80:0::1%en5", "en5")]) == ["fe80::1%en5"]


def test_no_more_than_peers_keep() -> None:
    seen = [SeenAddress(f"172.18.{n}.1", f"veth{n}") for n in range(ADDRESSES_MAX)]
    usable, left_out = usable_addresses([*seen, SeenAddress("10.0.0.1", "eth0"), SeenAddress("10.0.0.1", "eth0")], ALL)
    assert usable[0] == LocalAddress("10.0.0.1", "eth0", 0)
    assert len(usable) == ADDRESSES_MAX
    assert left_out == [LeftOut("172.18.15.1", "veth15", "only the 16 best are used")]


_ANY_ADDRESS = st.one_of(
    st.ip_addresses().map(str), st.sampled_from(["127.0.0.1", "fe80::1", "169.254.0.1", "100.100.0.1", "", "x"])
)
_NAMES = st.sampled_from(["lo", "eth0", "eth1", "wlan0", "docker0", "tun0", "", "é", "\u0661"])


@given(st.lists(st.builds(SeenAddress, _ANY_ADDRESS, _NAMES, st.booleans())), st.booleans(), st.randoms())
def test_each_address_is_used_or_has_a_reason(seen: list[SeenAddress], loopback_only: bool, random: Any) -> None:
    rules = InterfaceRules(loopback_only=loopback_only)
    usable, left_out = usable_addresses(seen, rules)
    shuffled = random.sample(seen, len(seen))
    assert usable_addresses(shuffled, rules)[0] == usable
    named = {(a.address.partition("%")[0], a.interface) for a in (*usable, *left_out)}
    for entry in seen:
        try:
            plain = str(ipaddress.ip_address(entry.address))
        except ValueError:
            continue
        assert {(plain, entry.interface), (entry.address, entry.interface)} & named
    assert len({local.address for local in usable}) == len(usable) <= ADDRESSES_MAX
    assert all(ipaddress.ip_address(a.address.partition("%")[0]).is_loopback == loopback_only for a in usable)


def test_this_machine() -> None:
    seen = read_interfaces()
    assert {entry.interface for entry in seen} <= set(psutil.net_if_addrs())
    assert [(e.address, e.up) for e in seen if e.address == "127.0.0.1"] == [("127.0.0.1", True)]
    assert local_addresses(InterfaceRules(loopback_only=True))[0][0].address == "127.0.0.1"


def test_a_system_that_does_not_tell_which_are_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(psutil, "net_if_stats", refused)
    assert all(entry.up for entry in read_interfaces())
