"""Changes of a machine's addresses are noticed, and damped."""

from __future__ import annotations

import asyncio
import itertools
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.discovery import interface_watch
from gossip.discovery.interface_watch import SPACING_S, STABLE_S, Damping, watch_interfaces
from gossip.discovery.interfaces import InterfaceRules, LocalAddress, SeenAddress
from gossip.limits import ADDRESSES_MAX

ETH0 = LocalAddress("10.0.0.1", "eth0", 0)
WLAN0 = LocalAddress("10.0.1.1", "wlan0", 0)
VETH = LocalAddress("172.17.0.9", "veth0", 12)


def test_the_first_addresses_count_at_once() -> None:
    damping = Damping()
    assert damping.observe(0.0, [WLAN0, ETH0]) == [ETH0, WLAN0]
    assert damping.observe(2.0, [ETH0, WLAN0]) is None
    assert not damping.pending


def test_none_at_first_is_an_answer_too() -> None:
    damping = Damping()
    assert damping.observe(0.0, []) == []
    assert damping.observe(2.0, []) is None


def test_a_change_counts_once_it_is_stable() -> None:
    damping = Damping()
    damping.observe(0.0, [])
    assert damping.observe(10.0, [ETH0]) is None
    assert damping.pending
    assert damping.observe(10.9, [ETH0]) is None
    assert damping.observe(11.0, [ETH0]) == [ETH0]
    assert not damping.pending


def test_one_that_goes_back_never_counts() -> None:
    damping = Damping()
    damping.observe(0.0, [ETH0])
    assert damping.observe(1.0, []) is None
    assert damping.observe(1.9, [ETH0]) is None
    assert not damping.pending
    assert damping.observe(2.8, []) is None  # anew, not since 1.0
    assert damping.observe(3.7, []) is None
    assert damping.observe(3.9, []) == []


def test_changes_are_spaced() -> None:
    damping = Damping()
    damping.observe(0.0, [])
    damping.observe(1.0, [ETH0])
    assert damping.observe(2.0, [ETH0]) == [ETH0]
    damping.observe(2.5, [WLAN0])
    assert damping.observe(4.0, [WLAN0]) is None
    assert damping.pending
    assert damping.observe(6.9, [WLAN0]) is None
    assert damping.observe(7.0, [WLAN0]) == [WLAN0]


def test_ten_flaps_in_five_seconds() -> None:
    """However they fall between the looks: at most two changes, and the end is right."""
    for looks_per_s in (0.5, 1, 2, 10):
        damping = Damping()
        damping.observe(0.0, [])
        changes = []
        for look in range(1, int(20 * looks_per_s)):
            now_s = look / looks_per_s
            up = now_s >= 5.0 or int(now_s * 4) % 2 == 0
            changed = damping.observe(now_s, [ETH0] if up else [])
            if changed is not None:
                changes.append(changed)
        assert len(changes) <= 2
        assert changes[-1] == [ETH0]


def test_one_that_flaps_for_ever_keeps_nobody_waiting() -> None:
    damping = Damping()
    damping.observe(0.0, [])
    changed = None
    for look in range(1, 60):
        flapping = [VETH] if look % 2 else []
        changed = damping.observe(look / 10, [ETH0, *flapping]) or changed
    assert changed == [ETH0]


def test_no_more_than_peers_keep() -> None:
    many = [LocalAddress(f"10.0.0.{n}", "eth0", 0) for n in range(2 * ADDRESSES_MAX)]
    damping = Damping()
    damping.observe(0.0, many[:ADDRESSES_MAX])
    damping.observe(1.0, many[ADDRESSES_MAX:])
    damping.observe(1.5, [])
    damping.observe(1.6, many[ADDRESSES_MAX:])
    # All of the first are gone since 1.0, the others back since 1.6: for a moment, neither count.
    assert damping.observe(2.0, many[ADDRESSES_MAX:]) == []
    assert damping.observe(7.0, many[ADDRESSES_MAX:]) == many[ADDRESSES_MAX:]


@given(
    st.lists(
        st.tuples(st.floats(0.01, 3.0), st.sets(st.sampled_from([ETH0, WLAN0, VETH]))),
        max_size=100,
    )
)
def test_bounded_and_right_in_the_end(observations: list[tuple[float, set[LocalAddress]]]) -> None:
    damping = Damping()
    now_s, counted, times_s = 0.0, damping.observe(0.0, []), []
    seen: set[LocalAddress] = set()
    for after_s, seen in observations:
        now_s += after_s
        changed = damping.observe(now_s, list(seen))
        if changed is not None:
            assert changed != counted
            times_s.append(now_s)
            counted = changed
    assert all(later - earlier >= SPACING_S - 1e-9 for earlier, later in itertools.pairwise(times_s))
    for _ in range(3):
        now_s += max(STABLE_S, SPACING_S)
        changed = damping.observe(now_s, list(seen))
        counted = counted if changed is None else changed
    assert counted == sorted(seen, key=lambda a: (a.rank, a.interface))
    assert not damping.pending


async def test_the_watch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Told at once, and at the change; an error of the system is told once, and not the end."""
    monkeypatch.setattr(interface_watch, "POLL_S", 0.01)
    monkeypatch.setattr(interface_watch, "STABLE_S", 0.01)
    monkeypatch.setattr(interface_watch, "Damping", lambda: Damping(0.005, 0.0))
    state: list[SeenAddress] | OSError = [SeenAddress("127.0.0.1", "lo")]
    told: asyncio.Queue[list[LocalAddress]] = asyncio.Queue()
    failures = asyncio.Semaphore(0)

    def read() -> list[SeenAddress]:
        if isinstance(state, OSError):
            failures.release()
            raise state
        return state

    async with asyncio.timeout(10):
        watch = asyncio.create_task(watch_interfaces(InterfaceRules(), told.put_nowait, read=read))
        assert await told.get() == []
        state = PermissionError(13, "Permission denied")
        with caplog.at_level(logging.WARNING):
            for _ in range(5):
                await failures.acquire()
        assert [r.getMessage() for r in caplog.records] == [
            "the list of network interfaces cannot be read: [Errno 13] Permission denied. A change will not be noticed"
        ]
        state = [SeenAddress("127.0.0.1", "lo"), SeenAddress("10.0.0.1", "eth0")]
        assert await told.get() == [ETH0]
        state = [SeenAddress("10.0.0.1", "eth0", up=False)]
        assert await told.get() == []
        assert not watch.done()
        watch.cancel()
        await asyncio.wait([watch])
