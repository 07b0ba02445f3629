"""Errors in the forms that the clients of each API understand: as a response, and as the last event of a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from aiohttp import web

from node.errors import SwarmError
from node.router.failure import ExpertFailure

#: What llama-server says when a batch could not be computed, whatever the cause (tools/server/server-context.cpp).
COMPUTE_ERROR = "Compute error"

_NAME_LENGTH_MAX = 200


class Api(Enum):
    """The APIs, and how each one's whole event streams end: with an event that starts with one of these."""

    OPENAI = (b"data: [DONE]",)
    RESPONSES = (b"event: response.completed", b"event: response.incomplete", b"event: response.failed")
    ANTHROPIC = (b"event: message_stop",)


#: How the events begin with which llama-server, or a peer's front door, ends a stream that failed.
ERROR_EVENTS = (b'data: {"error"', b"event: error")

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 500: "server_error", 502: "server_error"}
_OPENAI_TYPES |= {503: "unavailable_error"}
_ANTHROPIC_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_ANTHROPIC_TYPES |= {413: "request_too_large", 500: "api_error", 502: "api_error", 503: "overloaded_error"}


class ApiError(SwarmError):
    """A request that this node answers with an error of its own.

    ``code`` is for programs, ``param`` the request's field at fault, ``about`` further fields of the error object.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str,
        param: str | None = None,
        retry_after_s: int | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.about = dict(about or {})

    def response(self, api: Api) -> web.Response:
        """The error as a response of ``api``."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return web.Response(
            status=self.status,
            body=_dump(self._document(api)),
            content_type="application/json",
            charset="utf-8",
            headers=headers,
        )

    def event(self, api: Api) -> bytes:
        """The error as the last event of a stream of ``api``."""
        return _event(api, self._document(api)["error"])

    def _document(self, api: Api) -> dict[str, Any]:
        if api is Api.ANTHROPIC:
            kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": self.message} | self.about}
        kind = _OPENAI_TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error | self.about}


def unknown_model(name: str, served: Sequence[str]) -> ApiError:
    """404: ``name`` is none of the model names and aliases that the swarm serves."""
    shown = name if len(name) <= _NAME_LENGTH_MAX else name[:_NAME_LENGTH_MAX] + "…"
    return ApiError(
        f"The model '{shown}' does not exist here. This swarm serves: {', '.join(served) or 'none yet'}",
        status=404,
        code="model_not_found",
        param="model",
        about={"models": list(served)},
    )


def expert_range(first: int, last: int) -> dict[str, int]:
    """A range of experts in an error object, both ends included."""
    return {"first": first, "last": last}


@dataclass(frozen=True)
class ComputeError:
    """llama-server's own "Compute error." as found in an answer of it, to be explained by what the experts reported."""

    api: Api
    error: Mapping[str, Any]

    @classmethod
    def in_body(cls, api: Api, body: bytes) -> ComputeError | None:
        """None when ``body`` is another error, or one that a peer has explained already."""
        return cls._found(api, _load(body))

    @classmethod
    def in_event(cls, api: Api, event: bytes) -> ComputeError | None:
        """None when ``event`` is another error, or one that a peer has explained already."""
        for line in event.splitlines():
            if line.startswith(b"data:"):
                return cls._found(api, _load(line.removeprefix(b"data:")))
        return None

    @classmethod
    def _found(cls, api: Api, document: Any) -> ComputeError | None:
        # llama-server's streams of the Anthropic API hold the error object itself.
        error = document.get("error", document) if isinstance(document, dict) else None
        if not isinstance(error, dict) or "layer" in error:
            return None
        return cls(api, error) if str(error.get("message", "")).startswith(COMPUTE_ERROR) else None

    def body(self, failure: ExpertFailure) -> bytes:
        """The explained error as a response's body."""
        explained = self._explained(failure)
        return _dump({"type": "error", "error": explained} if self.api is Api.ANTHROPIC else {"error": explained})

    def event(self, failure: ExpertFailure) -> bytes:
        """The explained error as a stream's last event."""
        return _event(self.api, self._explained(failure))

    def _explained(self, failure: ExpertFailure) -> dict[str, Any]:
        about: dict[str, Any] = {"node": failure.node or None, "layer": failure.layer}
        about["experts"] = expert_range(failure.first, failure.last) if failure.first >= 0 else None
        message = f"{COMPUTE_ERROR}: {failure}"
        if self.api is Api.ANTHROPIC:
            return {"type": "api_error", "message": message} | about
        return dict(self.error) | {"message": message} | about


def _event(api: Api, error: Mapping[str, Any]) -> bytes:
    if api is Api.OPENAI:
        return b"data: " + _dump({"error": error}) + b"\n\n"
    document: dict[str, Any] = {"type": "error", "error": error}
    if api is Api.RESPONSES:
        # The API's own error event has the fields on its top level; clients look for `error`, as llama-server sends it.
        document |= {"code": str(error["code"]), "message": error["message"], "param": None}
    return b"event: error\ndata: " + _dump(document) + b"\n\n"


def _dump(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _load(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
