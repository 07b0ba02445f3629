"""What a front door asks its agent with each request: who answers queries now, and what is served."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from node.api.errors import ApiError, expert_range
from node.slices import Slice

# What is missing now is there again in seconds (a restarted engine) to a minute (a dead node): asking once in 5 s costs
# nothing and finds it soon.
RETRY_S = 5
# How many missing slices an error names: a large model without a node lacks hundreds, and nobody reads them all.
_MISSING_MAX = 16


@dataclass(frozen=True)
class ServedModel:
    """A model of the swarm. ``created_s``: Unix time."""

    name: str
    aliases: tuple[str, ...] = ()
    created_s: int = 0

    def to_json(self) -> dict[str, Any]:
        """The model as an object of the OpenAI API."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created_s,
            "owned_by": "swarm",
            "aliases": list(self.aliases),
        }


@dataclass(frozen=True)
class Here:
    """The router is this node. ``url``, ``api_key`` and ``slots`` (``--parallel``): of its llama-server.

    ``hold`` has it begin no decode for so many milliseconds; None: it has no Swarm backend that could be asked for
    that.
    """

    url: str
    api_key: str
    slots: int
    hold: Callable[[int], None] | None = None


@dataclass(frozen=True)
class There:
    """The router is the node ``name``. ``url``: the root of its agent's HTTP server."""

    name: str
    url: str


@dataclass(frozen=True)
class Unavailable:
    """Nobody can answer now. ``code`` is for programs, such as ``no_router``, ``missing_slices``, ``model_loading``.

    ``experts``: first and last, both included.
    """

    code: str
    message: str
    node: str | None = None
    layer: int | None = None
    experts: tuple[int, int] | None = None
    missing: Sequence[Slice] = ()
    retry_after_s: int = RETRY_S


@dataclass(frozen=True)
class PeerProof:
    """``headers`` for a request to a peer; ``check_reply`` for its answer, as in `node.api.upstream.Upstream`."""

    headers: Mapping[str, str]
    check_reply: Callable[[int, str | None], None] | None = None


class Swarm(Protocol):
    """What the front door asks its agent, with each request anew."""

    def router(self) -> Here | There | Unavailable:
        """Who answers queries now."""

    def models(self) -> Sequence[ServedModel]:
        """What the swarm serves; empty while that is not known."""

    async def peer_proof(self, peer: There, path: str, body: bytes) -> PeerProof:
        """How this node and ``peer`` know each other as of one swarm. May raise SwarmError."""


def unavailable(state: Unavailable) -> ApiError:
    """The error for a client that asks meanwhile."""
    about: dict[str, Any] = {"node": state.node, "layer": state.layer}
    about["experts"] = None if state.experts is None else expert_range(*state.experts)
    if state.missing:
        about["missing"] = [
            {"layer": layer, "experts": expert_range(first, last)}
            for layer, first, last in state.missing[:_MISSING_MAX]
        ]
        about["missing_slices"] = len(state.missing)
    return ApiError(state.message, status=503, code=state.code, retry_after_s=state.retry_after_s, about=about)
