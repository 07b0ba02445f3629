"""Which pieces of a model are present: a set of piece numbers with a checked form for disk and wire. Pure."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator

from node.errors import ModelError

_MAGIC = b"SWARMBIT1\n"
_COUNT = struct.Struct("<I")
_DIGEST_BYTES = 16


class PieceBitmap:
    """A set of piece numbers below ``count``."""

    def __init__(self, count: int, bits: bytes = b"") -> None:
        self.count = count
        self._bits = bytearray(bits or bytes(-(-count // 8)))

    def __contains__(self, number: int) -> bool:
        return 0 <= number < self.count and bool(self._bits[number >> 3] >> (number & 7) & 1)

    def __iter__(self) -> Iterator[int]:
        return (number for number in range(self.count) if number in self)

    def __len__(self) -> int:
        return int.from_bytes(self._bits, "little").bit_count()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PieceBitmap) and (self.count, self._bits) == (other.count, other._bits)

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_full(self) -> bool:
        """Whether every number is present."""
        return len(self) == self.count

    @classmethod
    def full(cls, count: int) -> PieceBitmap:
        """All numbers below ``count``."""
        return cls(count, ((1 << count) - 1).to_bytes(-(-count // 8), "little"))

    def copy(self) -> PieceBitmap:
        """A copy, which no change of this one reaches."""
        return PieceBitmap(self.count, bytes(self._bits))

    def add(self, numbers: Iterable[int]) -> None:
        """Adds numbers. Raises IndexError for one that is not below ``count``."""
        for number in numbers:
            if not 0 <= number < self.count:
                raise IndexError(f"piece {number} of {self.count}")
            self._bits[number >> 3] |= 1 << (number & 7)

    def remove(self, numbers: Iterable[int]) -> None:
        """Removes numbers; those that are not present do not matter."""
        for number in numbers:
            if number in self:
                self._bits[number >> 3] &= ~(1 << (number & 7))

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """The ones of ``numbers`` that are not present, in their order."""
        return [number for number in numbers if number not in self]

    def to_bytes(self) -> bytes:
        """The form on disk and wire, with a digest of its own, so that a damaged one is known as such."""
        body = _MAGIC + _COUNT.pack(self.count) + bytes(self._bits)
        return body + hashlib.sha256(body).digest()[:_DIGEST_BYTES]

    @classmethod
    def from_bytes(cls, data: bytes, count: int) -> PieceBitmap:
        """The bitmap of a model of ``count`` pieces. Raises ModelError when it is damaged or of another count."""
        start = len(_MAGIC) + _COUNT.size
        body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if len(body) != start + -(-count // 8) or hashlib.sha256(body).digest()[:_DIGEST_BYTES] != digest:
            raise ModelError("a damaged list of a model's pieces")
        if body[: len(_MAGIC)] != _MAGIC or _COUNT.unpack_from(body, len(_MAGIC)) != (count,):
            raise ModelError("a list of the pieces of another model")
        bits = body[start:]
        if int.from_bytes(bits, "little") >> count:
            raise ModelError("a list of pieces that the model does not have")
        return cls(count, bits)
