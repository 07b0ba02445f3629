"""Which pieces to ask of which source next. Pure: no sockets, and times are monotonic seconds that the caller gives.

Consecutive pieces are asked for together. A source that fails is left alone for a while, one that lied for long; what
it did not deliver is asked of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from node.transfer.bitmap import PieceBitmap

#: So much is asked for together: some seconds on a home network, so that sources serve several nodes in turn.
RUN_BYTES = 64 << 20
#: So many requests are in flight, one to a source.
REQUESTS_MAX = 3

# A source that gave wrong bytes has a broken disk, or means harm: neither is gone in a minute.
LIED_S = 3600.0
# A source that refuses, stalls or errs is left alone for so long, doubled with each failure in a row.
FAILED_FIRST_S, FAILED_MOST_S = 1.0, 60.0
# A source that serves as many as it wants to is asked again after this.
BUSY_S = 1.0


@dataclass
class Source:
    """What is known of a source of one model. ``has`` is None until it was asked."""

    name: str
    has: PieceBitmap | None = None
    not_before_s: float = 0.0
    failures: int = 0
    reason: str = ""
    in_flight: bool = False
    delivered_bytes: int = 0

    def failed(self, reason: str, now_s: float) -> None:
        """Leaves a source that failed alone for a while."""
        self.failures += 1
        self._leave_until(now_s + min(FAILED_FIRST_S * 2.0 ** (self.failures - 1), FAILED_MOST_S), reason)

    def lied(self, reason: str, now_s: float) -> None:
        """Leaves a source that lied alone for long."""
        self._leave_until(now_s + LIED_S, reason)

    def busy(self, now_s: float) -> None:
        """Leaves a source alone that asked to come again."""
        self._leave_until(now_s + BUSY_S, "it is busy")

    def _leave_until(self, until_s: float, reason: str) -> None:
        # It may have lied before its request broke off.
        if until_s > self.not_before_s:
            self.not_before_s, self.reason = until_s, reason


@dataclass(frozen=True)
class Ask:
    """A request for pieces ``first`` to ``last``, both included, without ``skip_bytes``, which are there already."""

    source: str
    first: int
    last: int
    skip_bytes: int = 0


@dataclass
class Transfer:
    """The fetching of some pieces of one model.

    ``sizes``: the bytes of each piece of the model. ``sources`` by id belong to the caller, so that what is known of
    them outlives one transfer.
    """

    wanted: Sequence[int]
    sizes: Sequence[int]
    sources: Mapping[str, Source]
    _missing: set[int] = field(init=False)
    #: The bytes of the pieces that are not there yet.
    missing_bytes: int = field(init=False)
    _asked: set[int] = field(init=False, default_factory=set)
    # Pieces that came and are being verified: the request that brought them may have ended.
    _verifying: set[int] = field(init=False, default_factory=set)
    # How many bytes of a piece are there, and who gave them.
    _partial: dict[int, tuple[int, tuple[str, ...]]] = field(init=False, default_factory=dict)
    # Pieces to be fetched from one source as a whole: they came wrong in parts from several, and nobody knows whose
    # fault it was.
    _whole: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.wanted = sorted(set(self.wanted))
        self._missing = set(self.wanted)
        self.missing_bytes = sum(self.sizes[number] for number in self._missing)

    @property
    def complete(self) -> bool:
        """Whether every wanted piece is there."""
        return not self._missing

    def next(self, now_s: float) -> Ask | None:
        """What to ask now; None while there is nothing to ask of anybody. It counts as asked until ``ended``."""
        if sum(source.in_flight for source in self.sources.values()) >= REQUESTS_MAX:
            return None
        # The best deliverer first, and among equals always the same.
        for source_id, source in sorted(self.sources.items(), key=lambda item: (-item[1].delivered_bytes, item[0])):
            if source.in_flight or source.has is None or now_s < source.not_before_s:
                continue
            run = self._run(source.has)
            if run:
                skip, _ = self._partial.get(run[0], (0, ()))
                source.in_flight = True
                self._asked.update(run)
                return Ask(source_id, run[0], run[-1], skip)
        return None

    def next_s(self, now_s: float) -> float | None:
        """When a source may be asked that may not be asked now; None if none has anything of use."""
        times = [
            source.not_before_s
            for source in self.sources.values()
            if source.not_before_s > now_s and (source.has is None or self._missing_of(source.has))
        ]
        return min(times, default=None)

    def received_part(self, ask: Ask, number: int, count: int) -> None:
        """Takes that a request ended within a piece, of which the caller keeps ``count`` bytes now."""
        _, givers = self._partial.get(number, (0, ()))
        self._partial[number] = (count, tuple(dict.fromkeys((*givers, ask.source))))

    def forget_part(self, number: int) -> None:
        """Takes that the caller no longer has the beginning of a piece."""
        self._partial.pop(number, None)

    def received(self, number: int) -> None:
        """Takes that a piece came as a whole; ``verified`` or ``wrong`` is to follow."""
        self._verifying.add(number)

    def verified(self, ask: Ask, number: int) -> None:
        """Takes that a piece was right, and is kept."""
        if number in self._missing:
            self._missing.remove(number)
            self.missing_bytes -= self.sizes[number]
        self._verifying.discard(number)
        self._partial.pop(number, None)
        self._whole.discard(number)
        source = self.sources.get(ask.source)
        if source is not None:
            source.delivered_bytes += self.sizes[number]
            source.failures = 0

    def wrong(self, ask: Ask, number: int, now_s: float) -> None:
        """Takes that a piece's hash is wrong. Who gave all of it has lied."""
        self._verifying.discard(number)
        _, givers = self._partial.pop(number, (0, ()))
        source = self.sources.get(ask.source)
        if set(givers) <= {ask.source}:
            if source is not None:
                source.lied(f"it gave wrong bytes (piece {number})", now_s)
        else:
            self._whole.add(number)

    def ended(self, ask: Ask) -> None:
        """Takes that a request is over; what it did not bring may be asked again."""
        self._asked.difference_update(range(ask.first, ask.last + 1))
        source = self.sources.get(ask.source)
        if source is not None:
            source.in_flight = False

    def keeps_part(self, number: int) -> bool:
        """Whether the beginning of a piece is of use when a request ends within it."""
        return number in self._missing and number not in self._whole

    def _run(self, has: PieceBitmap) -> list[int]:
        taken = self._asked | self._verifying
        free = [n for n in self.wanted if n in self._missing and n not in taken and n in has]
        if not free:
            return []
        begun = [number for number in free if number in self._partial]
        start = begun[0] if begun else free[0]
        run, size = [start], self.sizes[start]
        for number in free[free.index(start) + 1 :]:
            size += self.sizes[number]
            # Only its first piece can be one whose beginning is there.
            if number != run[-1] + 1 or size > RUN_BYTES or number in self._partial:
                break
            run.append(number)
        return run

    def _missing_of(self, has: PieceBitmap) -> bool:
        return any(number in has for number in self._missing)


def describe_sources(sources: Iterable[Source]) -> str:
    """Why none of the sources gives what is missing: for an error's message."""
    texts = [f"{source.name}: {source.reason or 'it does not have what is missing'}" for source in sources]
    return "; ".join(texts[:4]) or "no node that offers the model answers"


@dataclass
class RateLimit:
    """Lets ``bytes_per_s`` pass at most, in bursts of a quarter of a second; 0: no limit."""

    bytes_per_s: float
    _free_s: float = 0.0

    def delay_s(self, count: int, now_s: float) -> float:
        """How long to wait before the next ``count`` bytes, which count as sent."""
        if self.bytes_per_s <= 0:
            return 0.0
        start_s = max(self._free_s, now_s - 0.25)
        self._free_s = start_s + count / self.bytes_per_s
        return max(0.0, start_s - now_s)
