"""The addresses at which one member may be reached, and which of them is used.

An address is used once the member itself has answered there, and as long as it does: a machine announces all of its
addresses, and which of them can be reached depends on where the asker is.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossip.address import Address
from gossip.limits import PATHS_MAX


@dataclass(slots=True)
class Path:
    """One address. ``answered_s``, ``failed_s``: when it last did; None: never. ``rtt_s`` is the last answer's."""

    address: Address
    source: str
    answered_s: float | None = None
    failed_s: float | None = None
    rtt_s: float | None = None
    failures: int = 0  # since the last answer
    tcp_only: bool = False  # it answers, but not by UDP

    def describe(self) -> str:
        """How it stands with this address, for people."""
        if self.tcp_only:
            return "answers over TCP only: something drops UDP"
        if self.failures:
            return "did not answer" if self.answered_s is None else "no longer answers"
        if self.answered_s is None:
            return "not tried"
        return "answers" if self.rtt_s is None else f"answers in {1000 * self.rtt_s:.1f} ms"


class Paths:
    """The addresses of one member, in the order in which they are tried."""

    def __init__(self) -> None:
        self._paths: dict[Address, Path] = {}
        self._listed: tuple[Address, ...] = ()
        self.current: Address | None = None

    def all(self) -> list[Path]:
        """Every address, the member's own order first."""
        first = [self._paths[address] for address in self._listed if address in self._paths]
        return first + [path for path in self._paths.values() if path.address not in self._listed]

    def add(self, address: Address, source: str) -> bool:
        """Adds an address where the member may be. False: it is known already, or there are too many."""
        if address in self._paths or len(self._paths) >= PATHS_MAX:
            return False
        self._paths[address] = Path(address, source)
        if self.current is None:
            self.current = address
        return True

    def list_own(self, addresses: tuple[Address, ...]) -> None:
        """Takes the addresses of the member's record; others go, unless it has answered there since they failed."""
        self._listed = addresses
        for address in list(self._paths):
            path = self._paths[address]
            if address not in addresses and (path.source == "its record" or path.failures):
                del self._paths[address]
        self._make_room(addresses)
        for address in addresses:
            self.add(address, "its record")
        usable = [address for address in addresses if not self._paths[address].failures and not _is_link_local(address)]
        if self.current not in self._paths or (_is_link_local(self.current) and usable):
            self.current = usable[0] if usable else self._best()

    def answered(self, address: Address, now_s: float, rtt_s: float | None) -> None:
        """Takes that the member itself answered at an address."""
        self.add(address, "it called")
        path = self._paths.get(address)
        if path is None:
            return
        path.answered_s, path.failures, path.tcp_only = now_s, 0, False
        if rtt_s is not None:
            path.rtt_s = rtt_s
        current = self._paths.get(self.current) if self.current is not None else None
        if current is None or current.answered_s is None or current.failures or _is_worse(current.address, address):
            self.current = address
        if address in self._listed and len(self._paths) > len(self._listed):
            self._drop_former()

    def answered_tcp(self, address: Address) -> None:
        """Takes that the member answered at an address, but not by UDP."""
        if (path := self._paths.get(address)) is not None:
            path.tcp_only = True

    def failed(self, address: Address, now_s: float) -> None:
        """Takes that the member should have answered at an address, and did not."""
        path = self._paths.get(address)
        if path is not None:
            path.failed_s = now_s
            path.failures += 1
            if address == self.current and path.failures > 1:
                self.current = self._best()

    def alternatives(self, count: int) -> list[Address]:
        """Up to ``count`` other addresses to try now: those that fail least."""
        others = [path for path in self.all() if path.address != self.current]
        others.sort(key=lambda path: (path.failures, path.failed_s or 0.0))
        return [path.address for path in others[:count]]

    def _make_room(self, addresses: tuple[Address, ...]) -> None:
        # Anybody can repeat a member's packets from any number of ports: those must not keep its own addresses out.
        others = [path for path in self._paths.values() if path.address not in addresses]
        others.sort(key=lambda path: float("-inf") if path.answered_s is None else path.answered_s)
        for path in others[: max(0, len(others) + len(addresses) - PATHS_MAX)]:
            del self._paths[path.address]

    def _drop_former(self) -> None:
        # It answers at an address of its record, so these are where it was before it moved. Link-local addresses are in
        # no record.
        for path in list(self._paths.values()):
            silent = path.failures or (path.answered_s is None and not _is_link_local(path.address))
            if silent and path.address not in self._listed:
                del self._paths[path.address]

    def _best(self) -> Address | None:
        paths = self.all()
        return min(paths, key=lambda path: (path.failures, path.answered_s is None)).address if paths else None


def _is_link_local(address: Address | None) -> bool:
    return address is not None and address.host.lower().startswith("fe80:")


def _is_worse(address: Address, than: Address) -> bool:
    # A link-local address is good on one link only, and not every program takes its scope.
    return _is_link_local(address) and not _is_link_local(than)
