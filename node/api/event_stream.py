"""Server-sent events passing by: whole ones at once and unchanged, so that what follows a break is no part of one."""

from __future__ import annotations

from node.api.errors import ERROR_EVENTS, Api

# An event of the responses API holds the whole answer once more: 1,000,000 tokens are some 4 MB.
_HELD_BYTES_MAX = 4 << 20
_END = b"\n\n"


class EventStream:
    """Cuts what llama-server sends into events. A longer event than 4 MiB passes in parts."""

    def __init__(self, api: Api) -> None:
        self._endings = api.value
        self._held = bytearray()
        self._searched = 0
        self._inside = False
        #: Whether the stream came to its end: the API's last event has passed, or an error.
        self.ended = False

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Takes received bytes; returns the whole events to pass on, and after them an error event (or b"")."""
        self._held += data
        end = self._held.rfind(_END, max(0, self._searched - 1))
        if end < 0:
            self._searched = len(self._held)
            if self._searched <= _HELD_BYTES_MAX:
                return b"", b""
            self.ended = self.ended or (not self._inside and self._held.startswith(self._endings))
            self._inside = True
            return self.rest(), b""
        whole = bytes(self._held[: end + 2])
        del self._held[: end + 2]
        self._searched = len(self._held)
        return self._without_error(whole)

    def rest(self) -> bytes:
        """What came of an event that did not end."""
        held = bytes(self._held)
        self._held.clear()
        self._searched = 0
        return held

    @property
    def closing(self) -> bytes:
        """What must precede an event of our own after a break: an event may have passed in part."""
        return _END if self._inside else b""

    def _without_error(self, whole: bytes) -> tuple[bytes, bytes]:
        start = 0
        while start < len(whole):
            if not self._inside:
                if whole.startswith(ERROR_EVENTS, start):
                    # llama-server sends nothing after it.
                    self.ended = True
                    return whole[:start], whole[start:]
                self.ended = self.ended or whole.startswith(self._endings, start)
            self._inside = False
            end = whole.find(_END, start)
            start = len(whole) if end < 0 else end + 2  # a blank line too many is no event
        return whole, b""
