"""Reads one msgpack map from an untrusted peer: bounded memory, no recursion, large binary values not copied.

Both readers below accept the same messages: a map with distinct str keys and nothing behind it; no ext types; at most
`MAX_CONTAINERS` maps and arrays of `MAX_ITEMS` items each, whatever fields they stand in. msgpack's own reader is the
fastest for the small message of a generated token, but it copies binary values while it holds the GIL, which for a
prompt's tens of megabytes stops the event loop; so a large body is walked here and its binary values are views of it.
"""

from __future__ import annotations

from typing import Any, NoReturn

import msgpack

Body = bytes | bytearray | memoryview

MAX_ITEMS = 64
MAX_CONTAINERS = 64
MAX_STR_BYTES = 4096
# Above this, copying a message under the GIL is felt by the event loop.
LARGE_BYTES = 256 * 1024

# What MAX_CONTAINERS containers of MAX_ITEMS pairs can hold: a longer walk is not of a message we read.
_MAX_OBJECTS = 2 * MAX_CONTAINERS * MAX_ITEMS

# First byte -> (bytes of the length field, objects per unit of it, bytes per unit); and -> fixed bytes after the first.
_LENGTH_PREFIXED = {
    0xC4: (1, 0, 1),
    0xC5: (2, 0, 1),
    0xC6: (4, 0, 1),
    0xD9: (1, 0, 1),
    0xDA: (2, 0, 1),
    0xDB: (4, 0, 1),
    0xDC: (2, 1, 0),
    0xDD: (4, 1, 0),
    0xDE: (2, 2, 0),
    0xDF: (4, 2, 0),
}
_FIXED_BYTES = {
    0xC0: 0,
    0xC2: 0,
    0xC3: 0,
    0xCA: 4,
    0xCB: 8,
    0xCC: 1,
    0xCD: 2,
    0xCE: 4,
    0xCF: 8,
    0xD0: 1,
    0xD1: 2,
    0xD2: 4,
    0xD3: 8,
}


class _Guard:
    """Hooks for msgpack that count what it builds, since a body full of one-byte containers costs 64 times its size."""

    def __init__(self) -> None:
        self.containers = 0

    def array(self, items: list[Any]) -> list[Any]:
        self._count()
        return items

    def pairs(self, pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        self._count()
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key stands twice in a map")
        for key in result:
            if type(key) is not str:
                raise ValueError("a map key is not a string")
        return result

    def ext(self, code: int, data: bytes) -> NoReturn:
        raise ValueError("ext types are not used")

    def _count(self) -> None:
        self.containers += 1
        if self.containers > MAX_CONTAINERS:
            raise ValueError(f"more than {MAX_CONTAINERS} maps and arrays")


def unpack_map(body: Body) -> dict[str, Any]:
    """The one map in `body`; binary values are bytes or, of a large body, views of it. Raises ValueError."""
    if len(body) > LARGE_BYTES:
        return unpack_views(memoryview(body))
    result = _unpack(body, _Guard())
    if type(result) is not dict:
        raise ValueError("the message is not a map")
    return result


def unpack_views(view: memoryview) -> dict[str, Any]:
    """As `unpack_map`, for any size, with the binary values of the outer map as views of `view`. Raises ValueError."""
    if not len(view):
        raise ValueError("incomplete message")
    first = view[0]
    if 0x80 <= first <= 0x8F:
        n_pairs, position = first & 0x0F, 1
    elif first in (0xDE, 0xDF):
        n_length = 2 if first == 0xDE else 4
        n_pairs, position = int.from_bytes(view[1 : 1 + n_length], "big"), 1 + n_length
        if position > len(view):
            raise ValueError("incomplete message")
    else:
        raise ValueError("the message is not a map")
    if n_pairs > MAX_ITEMS:
        raise ValueError(f"a map of {n_pairs} items exceeds {MAX_ITEMS}")
    guard = _Guard()
    pairs = []
    for _ in range(n_pairs):
        end = _end_of_object(view, position)
        key = _unpack(view[position:end], guard)
        if type(key) is not str:
            raise ValueError("a map key is not a string")
        position, end = end, _end_of_object(view, end)
        kind = view[position]
        if 0xC4 <= kind <= 0xC6:
            value = view[position + 1 + _LENGTH_PREFIXED[kind][0] : end]
        else:
            value = _unpack(view[position:end], guard)
        pairs.append((key, value))
        position = end
    if position != len(view):
        raise ValueError("bytes behind the message")
    return guard.pairs(pairs)


def _unpack(body: Body, guard: _Guard) -> Any:
    return msgpack.unpackb(
        body,
        raw=False,
        strict_map_key=True,
        object_pairs_hook=guard.pairs,
        list_hook=guard.array,
        ext_hook=guard.ext,
        max_str_len=MAX_STR_BYTES,
        max_bin_len=len(body),
        max_array_len=MAX_ITEMS,
        max_map_len=MAX_ITEMS,
        max_ext_len=0,
    )


def _end_of_object(view: memoryview, position: int) -> int:
    """Where the object that starts at `position` ends; its contents are not judged. Raises ValueError."""
    n_left = 1
    n_seen = 0
    while n_left:
        n_left -= 1
        n_seen += 1
        if position >= len(view):
            raise ValueError("incomplete message")
        if n_seen > _MAX_OBJECTS:
            raise ValueError("too many objects in a field")
        kind = view[position]
        position += 1
        if kind <= 0x7F or kind >= 0xE0:
            continue
        if kind <= 0x8F:
            n_left += 2 * (kind & 0x0F)
        elif kind <= 0x9F:
            n_left += kind & 0x0F
        elif kind <= 0xBF:
            position += kind & 0x1F
        elif kind in _FIXED_BYTES:
            position += _FIXED_BYTES[kind]
        elif kind in _LENGTH_PREFIXED:
            n_length, n_objects, n_bytes = _LENGTH_PREFIXED[kind]
            length = int.from_bytes(view[position : position + n_length], "big")
            position += n_length + n_bytes * length
            n_left += n_objects * length
        else:
            raise ValueError("ext types are not used")
    if position > len(view):
        raise ValueError("incomplete message")
    return position
