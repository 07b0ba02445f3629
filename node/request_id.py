"""The id of a client's request: 8 hex digits, made by the first door and passed on from node to node.

It stands in every log line that is written for the request, on every node, and in the answer's header. It is known to
what runs in the request's task and in the tasks started from there, since each task starts with a copy of its
starter's context.
"""

from __future__ import annotations

import logging
import re
import secrets
from contextvars import ContextVar
from typing import Final

#: The header of requests from node to node and to llama-server, which ignores it, and of answers.
HEADER: Final = "X-Request-Id"
#: The field of log lines.
FIELD: Final = "request"

_VALID: Final = re.compile(r"[0-9a-f]{8}", re.ASCII)
_current: ContextVar[str] = ContextVar("request_id", default="")


def begin(received: str | None) -> str:
    """The id of the request that the current task begins to work on.

    ``received`` is what came with it, from a client or a node, and is taken if it is an id: it is for finding log
    lines and grants nothing, and a client may want to find its request in its own log. Anything else would let
    strangers write into the log, and is replaced by a new id.
    """
    own = received if received is not None and _VALID.fullmatch(received) else secrets.token_hex(4)
    _current.set(own)
    return own


def current() -> str:
    """The id of the request that is worked on; empty outside of requests."""
    return _current.get()


class RequestIdFilter(logging.Filter):
    """Adds the id to records as an extra field. To be added to handlers, which see every logger's records."""

    def filter(self, record: logging.LogRecord) -> bool:
        own = current()
        if own and not hasattr(record, FIELD):
            setattr(record, FIELD, own)
        return True
