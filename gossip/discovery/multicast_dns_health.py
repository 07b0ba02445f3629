"""Says once when multicast DNS does not work here, and once when it works again."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from gossip.discovery.announced_services import Found

log = logging.getLogger(__name__)


class MulticastDnsHealth(logging.Filter):
    """Whether multicast DNS works here, said once each time that it changes.

    While `listening`, zeroconf's warnings go to the debug log: it reports every packet that an interface does not
    take, with a traceback. What matters of them is in the one warning.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last_error = ""
        self._warned = False
        self._warned_of_copy = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes zeroconf's warnings while the body runs."""
        logger = logging.getLogger("zeroconf")
        logger.addFilter(self)
        try:
            yield
        finally:
            logger.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, OSError):
            self._last_error = str(error.strerror or error)
        log.debug("zeroconf: %s", record.getMessage())
        return False

    def failed(self, error: Exception) -> None:
        """Says that multicast DNS could not be set up, or ended."""
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        self._warn(f"{type(error).__name__}: {error}")

    def not_heard(self) -> None:
        """Says that packets are sent, and do not come back as they should."""
        self._warn(self._last_error or "this node's own announcement does not come back")

    def works(self) -> None:
        """Says that multicast DNS does what it should, if it did not before."""
        if self._warned:
            log.info("multicast DNS works again")
        self._warned = False

    def copy_found(self, copy: Found) -> None:
        """Says that another node has this node's id."""
        if not self._warned_of_copy:
            where = ", ".join(map(str, copy.addresses))
            log.warning("another node, at %s, has this node's id %s: each needs one of its own", where, copy.node_id)
        self._warned_of_copy = True

    def _warn(self, reason: str) -> None:
        log.log(
            logging.DEBUG if self._warned else logging.WARNING,
            "multicast DNS does not work here (%s): nodes may not find each other by themselves, so give this one the "
            "address of another. It is tried again",
            reason,
        )
        self._warned = True
