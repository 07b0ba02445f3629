"""The planner of transfers as a state machine: sources come, go, stall, break off and lie; every piece comes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from node.transfer import schedule as schedule_module
from node.transfer.bitmap import PieceBitmap
from node.transfer.schedule import LIED_S, REQUESTS_MAX, Ask, RateLimit, Source, Transfer, describe_sources

N_PIECES = 12


@dataclass
class Request:
    """A request in flight, and how far it is: ``number`` is the next piece, of which ``have`` bytes are there."""

    ask: Ask
    number: int
    have: int
    lies: bool


@dataclass
class Received:
    """A whole piece before it was verified. ``givers``: who lied among those that gave it, and who did not."""

    request: Request
    number: int
    givers: set[str] = field(default_factory=set)


class Transfers(RuleBasedStateMachine):
    """What the fetcher does with a planner, and what it keeps meanwhile: beginnings of pieces, and unverified ones."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.sizes = [3 + (7 * number) % 5 for number in range(N_PIECES)]
        self.sources: dict[str, Source] = {}
        self.liars: set[str] = set()
        self.caught_s: dict[str, float] = {}
        self.transfer = Transfer(range(1, N_PIECES), self.sizes, self.sources)
        self.requests: list[Request] = []
        self.unverified: list[Received] = []
        self.kept: dict[int, tuple[int, set[str]]] = {}  # bytes of a beginning, and who gave it
        self.done: set[int] = set()
        self.refuse_s: dict[str, float] = {}

    @initialize(lies=st.tuples(st.booleans(), st.booleans()))
    def start(self, lies: tuple[bool, bool]) -> None:
        """Two that have everything: what one begins the other can end."""
        for name, lie in zip("ab", lies, strict=True):
            self.join(name, set(range(N_PIECES)), lie)

    @rule(name=st.sampled_from("abc"), numbers=st.sets(st.integers(0, N_PIECES - 1)), lies=st.booleans())
    def join(self, name: str, numbers: set[int], lies: bool) -> None:
        if name in self.sources:
            return
        self.sources[name] = Source(name, PieceBitmap(N_PIECES))
        self.sources[name].has.add(numbers)
        self.liars.discard(name)
        self.caught_s.pop(name, None)
        self.refuse_s.pop(name, None)
        if lies:
            self.liars.add(name)

    @rule(name=st.sampled_from("abc"))
    def leave(self, name: str) -> None:
        if name in self.sources and not self.sources[name].in_flight and not self._waits_for(name):
            del self.sources[name]

    def _waits_for(self, name: str) -> bool:
        return any(name in one.givers for one in self.unverified) or any(name in g for _, g in self.kept.values())

    @rule()
    def ask(self) -> None:
        ask = self.transfer.next(self.now_s)
        if ask is None:
            return
        source = self.sources[ask.source]
        numbers = set(range(ask.first, ask.last + 1))
        assert source.has is not None and all(number in source.has for number in numbers)
        assert self.now_s >= self.refuse_s.get(ask.source, 0.0)
        assert self.now_s - self.caught_s.get(ask.source, -1e9) >= LIED_S
        # Nothing that is there, wanted by nobody, on its way, or being verified.
        assert numbers <= set(range(1, N_PIECES)) - self.done - {one.number for one in self.unverified}
        for other in self.requests:
            assert other.ask.source != ask.source
            assert not numbers & set(range(other.ask.first, other.ask.last + 1))
        have, _ = self.kept.get(ask.first, (0, set()))
        assert ask.skip_bytes == have
        assert not numbers & (self.kept.keys() - {ask.first})
        self.requests.append(Request(ask, ask.first, have, ask.source in self.liars))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, 6))
    def receive(self, data: st.DataObject, count: int) -> None:
        request = data.draw(st.sampled_from(self.requests))
        while count and request.number <= request.ask.last:
            number = request.number
            _, givers = self.kept.pop(number, (0, set()))
            used = min(count, self.sizes[number] - request.have)
            count -= used
            request.have += used
            givers = givers | {request.ask.source}
            if request.have < self.sizes[number]:
                self.kept[number] = (request.have, givers)
                return
            self.transfer.received(number)
            self.unverified.append(Received(request, number, givers))
            request.number, request.have = number + 1, 0
        if request.number > request.ask.last:
            self.requests.remove(request)
            self.transfer.ended(request.ask)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), how=st.sampled_from(["failed", "busy"]))
    def break_off(self, data: st.DataObject, how: str) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        source, number = self.sources[request.ask.source], request.number
        if request.have and number in self.kept:
            if self.transfer.keeps_part(number):
                if number != request.ask.first or request.have > request.ask.skip_bytes:
                    self.transfer.received_part(request.ask, number, request.have)
            else:
                del self.kept[number]
        if how == "failed":
            source.failed("it stalled", self.now_s)
        else:
            source.busy(self.now_s)
        self.refuse_s[source.name] = source.not_before_s
        assert source.not_before_s > self.now_s
        self.transfer.ended(request.ask)

    @precondition(lambda self: self.unverified)
    @rule(data=st.data())
    def verify(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.unverified))
        self.unverified.remove(one)
        ask = one.request.ask
        if not one.givers & self.liars:
            self.transfer.verified(ask, one.number)
            self.done.add(one.number)
            return
        before = {name: source.not_before_s for name, source in self.sources.items()}
        self.transfer.wrong(ask, one.number, self.now_s)
        blamed = {name for name, source in self.sources.items() if source.not_before_s != before[name]}
        # Nobody is blamed for what another may have given.
        assert blamed <= self.liars
        if one.givers == {ask.source}:
            assert self.sources[ask.source].not_before_s == self.now_s + LIED_S
            self.caught_s[ask.source] = self.now_s

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        free = [n for n in self.kept if not any(r.ask.first <= n <= r.ask.last for r in self.requests)]
        if free:
            number = data.draw(st.sampled_from(free))
            del self.kept[number]
            self.transfer.forget_part(number)

    @rule(seconds=st.sampled_from([0.5, 5.0, 120.0, 4000.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def bounded_and_honest(self) -> None:
        assert len(self.requests) <= REQUESTS_MAX
        assert self.transfer.complete == (self.done == set(range(1, N_PIECES)))
        assert self.transfer.missing_bytes == sum(self.sizes[n] for n in set(range(1, N_PIECES)) - self.done)

    def teardown(self) -> None:
        """The transfer ends, with one good source from now on."""
        for request in list(self.requests):
            self.transfer.ended(request.ask)
        for one in self.unverified:
            if one.givers & self.liars:
                self.transfer.wrong(one.request.ask, one.number, self.now_s)
            else:
                self.transfer.verified(one.request.ask, one.number)
        for number in self.kept:
            self.transfer.forget_part(number)
        self.sources.clear()
        self.sources["good"] = Source("good", PieceBitmap.full(N_PIECES))
        for _ in range(N_PIECES):
            ask = self.transfer.next(self.now_s)
            if ask is None:
                break
            for number in range(ask.first, ask.last + 1):
                self.transfer.verified(ask, number)
            self.transfer.ended(ask)
        assert self.transfer.complete


Transfers.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestTransfers = Transfers.TestCase


def test_who_lied_is_found_out_even_if_two_gave_a_piece() -> None:
    sources = {name: Source(name, PieceBitmap.full(1)) for name in "ab"}
    transfer = Transfer([0], [10], sources)
    first = transfer.next(0.0)
    assert first == Ask("a", 0, 0)
    transfer.received_part(first, 0, 4)
    sources["a"].failed("it broke off", 0.0)
    transfer.ended(first)
    second = transfer.next(0.0)
    assert second == Ask("b", 0, 0, skip_bytes=4)
    transfer.received(0)
    transfer.wrong(second, 0, 0.0)
    transfer.ended(second)
    assert sources["b"].not_before_s == 0.0  # it may have been a
    assert not transfer.keeps_part(0)  # so that the next one answers for all of it
    third = transfer.next(0.0)
    assert third == Ask("b", 0, 0)
    transfer.received(0)
    transfer.wrong(third, 0, 0.0)
    assert sources["b"].not_before_s == LIED_S


def test_runs_are_long_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_module, "RUN_BYTES", 30)
    sources = {name: Source(name, PieceBitmap.full(10)) for name in "ab"}
    transfer = Transfer([0, 1, 2, 3, 5, 6, 9], [10] * 10, sources)
    first, second = transfer.next(0.0), transfer.next(0.0)
    assert first == Ask("a", 0, 2)
    assert second == Ask("b", 3, 3)
    assert transfer.next(0.0) is None
    transfer.ended(first)
    assert transfer.next(0.0) == Ask("a", 0, 2)  # it brought nothing


def test_a_piece_that_is_longer_than_a_run_comes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_module, "RUN_BYTES", 5)
    transfer = Transfer([0, 1], [10, 10], {"a": Source("a", PieceBitmap.full(2))})
    assert transfer.next(0.0) == Ask("a", 0, 0)


def test_a_source_that_fails_again_and_again_is_asked_ever_more_seldom() -> None:
    source = Source("a")
    waits = []
    for _ in range(10):
        source.failed("it stalled", 0.0)
        waits.append(source.not_before_s)
    assert waits == sorted(waits) and waits[0] == 1.0 and waits[-1] == 60.0
    assert "a: it stalled" in describe_sources([source])
    assert describe_sources([]) == "no node that offers the model answers"


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=200))
def test_a_rate_is_never_exceeded_for_long(counts: list[int]) -> None:
    limit, now_s, sent = RateLimit(1000.0), 5.0, 0
    for count in counts:
        now_s += limit.delay_s(count, now_s)
        # The burst, and the one that is being sent.
        assert sent <= 1000.0 * (now_s - 5.0 + 0.25) + 1e-6
        sent += count
    assert RateLimit(0).delay_s(1 << 40, 0.0) == 0.0
