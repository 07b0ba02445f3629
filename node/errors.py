"""The root of the errors that this package raises on purpose, and those that several modules raise.

Others are declared where they are raised: they derive from SwarmError too.

SwarmError                  message, and what it is about: node, layer, experts
├── CallRefused             an expert call was refused or failed: kind, retry, call_id
│   ├── MalformedMessage    kind bad_request: not what docs/protocol.md says
│   └── UnsupportedVersion  kind unsupported_version
├── ConfigError             settings that are unknown or wrong: problems, one text each
├── ExpertProcessError      the expert server process cannot be used
│   ├── ExpertProcessExited it ended: returncode
│   └── ExpertProcessGaveUp it crashed too often to be started again
├── IdentityError           the node's state folder cannot be used
├── ModelError              a model file that is damaged, or that this program cannot use
├── NotAuthenticated        a request or reply between nodes does not prove the swarm key: fresh_nonce_helps
├── RoutingError            slices that cannot be a routing table
└── SwarmKeyError           a text that is no swarm key
"""

from __future__ import annotations

from collections.abc import Sequence


class SwarmError(Exception):
    """Root of the package's errors. `experts` are global ids; `str()` is the message and what it is about."""

    def __init__(
        self, message: str, *, node: str | None = None, layer: int | None = None, experts: Sequence[int] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.node = node
        self.layer = layer
        self.experts = tuple(experts)

    def __str__(self) -> str:
        about = []
        if self.node is not None:
            about.append(f"node {self.node}")
        if self.layer is not None:
            about.append(f"layer {self.layer}")
        if self.experts:
            about.append("experts " + ", ".join(map(str, self.experts)))
        return f"{self.message} ({'; '.join(about)})" if about else self.message


class CallRefused(SwarmError):
    """An expert call was refused or failed. `kind` as in `node.expert_server.wire.HTTP_STATUS`; `retry`: another
    try may help."""

    def __init__(
        self,
        message: str,
        *,
        kind: str,
        retry: bool = False,
        call_id: int = 0,
        node: str | None = None,
        layer: int | None = None,
        experts: Sequence[int] = (),
    ) -> None:
        super().__init__(message, node=node, layer=layer, experts=experts)
        self.kind = kind
        self.retry = retry
        self.call_id = call_id


class MalformedMessage(CallRefused):
    """A message is not what the protocol says."""

    def __init__(
        self, message: str, *, call_id: int = 0, layer: int | None = None, experts: Sequence[int] = ()
    ) -> None:
        super().__init__(message, kind="bad_request", call_id=call_id, layer=layer, experts=experts)


class UnsupportedVersion(CallRefused):
    """A message has another protocol version than this program."""

    def __init__(self, message: str, *, call_id: int = 0) -> None:
        super().__init__(message, kind="unsupported_version", call_id=call_id)


class ConfigError(SwarmError):
    """Settings that are unknown or wrong. `problems` holds all of them, one line each; the message is these lines."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class ExpertProcessError(SwarmError):
    """The expert server process cannot be started or used."""


class ExpertProcessExited(ExpertProcessError):
    """The expert server process has ended. `returncode` is as in `subprocess`; None while it is not known."""

    def __init__(self, message: str, *, node: str | None = None, returncode: int | None = None) -> None:
        super().__init__(message, node=node)
        self.returncode = returncode


class ExpertProcessGaveUp(ExpertProcessError):
    """The expert server process crashed too often to be started again."""


class IdentityError(SwarmError):
    """The node's state folder is in use by another agent, or cannot be read or written."""


class ModelError(SwarmError):
    """A model file that is missing, damaged, or that this program cannot use."""


class NotAuthenticated(SwarmError):
    """A request or reply between nodes does not prove the swarm key. `fresh_nonce_helps`: try again with one."""

    def __init__(self, message: str, *, node: str | None = None, fresh_nonce_helps: bool = False) -> None:
        super().__init__(message, node=node)
        self.fresh_nonce_helps = fresh_nonce_helps


class RoutingError(SwarmError):
    """Slices or nodes that cannot be a routing table."""


class SwarmKeyError(SwarmError):
    """A text that is no swarm key. The message does not repeat it."""
