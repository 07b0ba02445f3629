"""The query endpoint of every node: requests of the OpenAI and Anthropic APIs, relayed to the router's llama-server.

    client → this node's front door → (the router's front door, at /swarm/v1/relay →) llama-server

Bodies pass unchanged in both directions; of the headers only those that the other side needs. What this node answers
itself: the list of models, and errors, in the form of the API that was asked. When the client goes away, the connection
to the next server is closed at once, which is how llama-server learns that it may stop.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from node import request_id
from node.access import api_key_matches
from node.api.client_hold import ClientHolds
from node.api.client_watch import ClientGone, ClientWatch, Interrupted, watch_client
from node.api.errors import Api, ApiError, unknown_model
from node.api.reply import Exchange, Failures
from node.api.request_body import BodyReader, decoded, top_level
from node.api.swarm import RETRY_S, Here, PeerProof, ServedModel, Swarm, There, Unavailable, unavailable
from node.api.turns import Turns
from node.api.upstream import Relay, Upstream, UpstreamBroken, UpstreamUnreachable
from node.peers.http import RELAY_PREFIX
from node.router.failure import ExpertFailure

#: With the answers that its agent gives, which make no sense without the door.
__all__ = [
    "Door",
    "DoorOptions",
    "DoorStatistics",
    "Guard",
    "Here",
    "PeerProof",
    "ServedModel",
    "Swarm",
    "There",
    "Unavailable",
    "add_routes",
]

log = logging.getLogger(__name__)

_APIS: Mapping[str, Api] = {
    "/v1/chat/completions": Api.OPENAI,
    "/v1/completions": Api.OPENAI,
    "/v1/embeddings": Api.OPENAI,
    "/v1/responses": Api.RESPONSES,
    "/v1/messages": Api.ANTHROPIC,
    "/v1/messages/count_tokens": Api.ANTHROPIC,
}

# What llama-server answers with its tokenizer alone: such a request neither waits for a slot nor has decodes to hold.
_WITHOUT_SLOT = ("/v1/messages/count_tokens",)
# What the APIs call the texts that end an answer: OpenAI's, Anthropic's.
_STOPS = ("stop", "stop_sequences")


#: Why a request must not be answered (its Host or Origin, say), or None.
Guard = Callable[[web.Request], str | None]


@dataclass(frozen=True)
class DoorOptions:
    """``node``: its name, for errors that other nodes pass on.

    ``body_bytes_max`` of one request: a prompt of 1,000,000 tokens is some 4 MB, a large photograph 20 MB in base64.
    ``held_bytes_max`` of all requests at a time. ``stall_timeout_s``: how long a client may take, or say, nothing.
    """

    api_key: str = ""
    node: str = ""
    body_bytes_max: int = 32 << 20
    held_bytes_max: int = 256 << 20
    open_max: int = 512
    stall_timeout_s: float = 30.0


@dataclass
class DoorStatistics:
    """Counts since the start. ``relayed``: requests passed on; the others of them ended as they should."""

    relayed: int = 0
    refused: int = 0
    clients_gone: int = 0
    broken: int = 0


class Door:
    """The front door of one node. ``add_routes`` puts it into an application."""

    def __init__(self, swarm: Swarm, options: DoorOptions | None = None, guard: Guard | None = None) -> None:
        self._swarm = swarm
        self._options = options or DoorOptions()
        self._guard = guard
        self._relay = Relay(self._options.stall_timeout_s)
        self._bodies = BodyReader(self._options.body_bytes_max, self._options.held_bytes_max)
        self._failures = Failures()
        self._turns = Turns()
        self._holds = ClientHolds()
        self._open: set[ClientWatch] = set()
        self._stopping: str | None = None
        self.statistics = DoorStatistics()

    @property
    def open(self) -> int:
        """Requests that are being relayed, or wait for their turn."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Requests that wait until llama-server has a slot free."""
        return self._turns.waiting

    def report_failure(self, failure: ExpertFailure) -> None:
        """To be called with what the router engine reports: it explains llama-server's next "Compute error."."""
        self._failures.report(failure)

    async def run(self, _: web.Application) -> AsyncIterator[None]:
        """The door's part of an application's life: between startup and cleanup."""
        async with self._relay:
            yield

    async def stop(self, _: web.Application) -> None:
        """When the application ends: `end_requests`."""
        self.end_requests()

    def end_requests(self) -> None:
        """Ends every open request with an error, and takes no more."""
        name = self._options.node
        self._stopping = f"Node {name} is being stopped" if name else "This node is being stopped"
        self._holds.stop()
        for watch in list(self._open):
            watch.interrupt(self._stopping)

    async def list_models(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, Api.OPENAI, self._list_models)

    async def unknown_path(self, request: web.Request) -> web.StreamResponse:
        async def refuse(request: web.Request) -> web.StreamResponse:
            if request.path in _APIS:
                message = f"{request.path} wants the method POST, not {request.method}"
                raise ApiError(message, status=405, code="method_not_allowed")
            raise ApiError(f"There is no {request.path} here", status=404, code="not_found")

        return await self._answer(request, _APIS.get(request.path, Api.OPENAI), refuse)

    def handler(self, path: str, *, from_peer: bool) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """The handler for requests to ``path``, of clients or of peers."""
        api = _APIS[path]

        async def query(request: web.Request) -> web.StreamResponse:
            async with self._bodies.read(request, self._options.stall_timeout_s) as body:
                return await self._query(request, api, path, body, from_peer)

        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._answer(request, api, query, from_peer)

        return handle

    async def _answer(
        self,
        request: web.Request,
        api: Api,
        work: Callable[[web.Request], Awaitable[web.StreamResponse]],
        from_peer: bool = False,
    ) -> web.StreamResponse:
        request_id.begin(request.headers.get(request_id.HEADER))
        try:
            self._check(request, from_peer)
            return await work(request)
        except ApiError as error:
            self.statistics.refused += 1
            log.info("%s %s: %d %s", request.method, request.path, error.status, error)
            return error.response(api)
        except ConnectionError:  # while the body was read
            self.statistics.clients_gone += 1
            return web.Response(status=499)

    def _check(self, request: web.Request, from_peer: bool) -> None:
        if self._guard is not None and (reason := self._guard(request)) is not None:
            raise ApiError(reason, status=403, code="forbidden")
        headers = request.headers
        if not from_peer and not api_key_matches(
            self._options.api_key,
            authorization=headers.get("Authorization"),
            x_api_key=headers.get("x-api-key"),
        ):
            raise ApiError(
                "The API key is missing or wrong: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                status=401,
                code="invalid_api_key",
            )
        self._check_stopping()

    def _check_stopping(self) -> None:
        if self._stopping is not None:
            raise ApiError(self._stopping, status=503, code="stopping", retry_after_s=RETRY_S)

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        models = self._swarm.models()
        name = request.match_info.get("model")
        if name is None:
            return web.json_response({"object": "list", "data": [model.to_json() for model in models]})
        for model in models:
            if name in (model.name, *model.aliases):
                return web.json_response(model.to_json())
        raise unknown_model(name, _names(models))

    async def _check_body(self, body: bytes) -> None:
        members = await top_level(body, ("model", *_STOPS))
        names = _names(self._swarm.models())
        if (name := decoded(members.get("model"))) and names and name not in names:
            raise unknown_model(str(name), names)
        for param in _STOPS:
            stops = decoded(members.get(param))
            if "" in (stops if isinstance(stops, list) else [stops]):
                # llama-server would stop before the first token, and call that a whole answer.
                raise ApiError(
                    f"'{param}' holds an empty string, which every text contains: leave it out",
                    status=400,
                    code="empty_stop",
                    param=param,
                )

    async def _query(
        self, request: web.Request, api: Api, path: str, body: bytes, from_peer: bool
    ) -> web.StreamResponse:
        log.debug("%s: %d bytes from %s", path, len(body), "a node" if from_peer else "a client")
        await self._check_body(body)
        self._check_stopping()  # reading the body took its time
        if len(self._open) >= self._options.open_max:
            raise ApiError("Too many requests are open at this node", status=503, code="busy", retry_after_s=RETRY_S)
        exchange: Exchange | None = None
        headers = {name: request.headers[name] for name in ("Content-Type", "Accept") if name in request.headers}
        headers[request_id.HEADER] = request_id.current()
        try:
            async with watch_client(request, self._options.stall_timeout_s) as watch, self._turn(watch, path):
                upstream, hold = await self._upstream(path, body, from_peer)
                self.statistics.relayed += 1
                exchange = Exchange(request, api, self._failures if upstream.node is None else None)
                log.debug("%s: passed on to %s", path, upstream.title)
                with self._holds.request(hold) as passed:
                    async with self._relay.ask(upstream, body, headers) as passed.answer:
                        log.debug("%s: it answers with status %d", path, passed.answer.status)
                        response = await exchange.relay(passed.answer, watch)
                log.debug("%s: the whole answer was passed on", path)
                return response
        except ClientGone as gone:
            self.statistics.clients_gone += 1
            log.info("%s: %s", path, gone)
            return (exchange.response if exchange else None) or web.Response(status=499)
        except UpstreamUnreachable as error:
            about = {"node": error.node}
            raise ApiError(
                error.message, status=503, code="router_unreachable", retry_after_s=RETRY_S, about=about
            ) from error
        except UpstreamBroken as error:
            self.statistics.broken += 1
            log.warning("%s: %s", path, error)
            cause = ApiError(error.message, status=502, code="router_broke", about={"node": error.node})
        except Interrupted as error:
            cause = ApiError(error.message, status=503, code="stopping", retry_after_s=RETRY_S)
        if exchange is None:
            raise cause
        return await exchange.fail(cause)

    @asynccontextmanager
    async def _turn(self, watch: ClientWatch, path: str) -> AsyncIterator[None]:
        """Counts as open, and is let in when llama-server, if it is this node's, has a slot free.

        In llama-server's own queue a client that has left is not noticed while others are answered: it looks for that
        only when none of its requests had anything to report for a second (server_response::recv_with_timeout).
        """
        self._open.add(watch)
        try:
            router = self._swarm.router()
            if isinstance(router, Here) and path not in _WITHOUT_SLOT:
                async with self._turns.take(router.slots):
                    yield
            else:
                yield
        finally:
            self._open.discard(watch)

    async def _upstream(self, path: str, body: bytes, from_peer: bool) -> tuple[Upstream, Callable[[int], None] | None]:
        """Whom to ask, and how to have its decodes held; None where that is of no use."""
        router = self._swarm.router()
        if isinstance(router, Unavailable):
            raise unavailable(router)
        if isinstance(router, Here):
            authorization = {"Authorization": f"Bearer {router.api_key}"}
            hold = None if path in _WITHOUT_SLOT else router.hold
            return Upstream(f"{router.url}{path}", authorization, "this node's llama-server"), hold
        if from_peer:  # which has not heard yet that the router is another; passed on, a request could go in a circle
            raise unavailable(Unavailable("not_router", f"This node is not the router; {router.name} is"))
        path = RELAY_PREFIX + path
        proof = await self._swarm.peer_proof(router, path, body)
        title = f"the router, node {router.name},"
        return Upstream(f"{router.url}{path}", proof.headers, title, router.name, proof.check_reply), None


def add_routes(app: web.Application, door: Door) -> None:
    """Adds the query endpoint to ``app``, for clients and, below RELAY_PREFIX, for peers, which ``app`` authenticates.

    The application's server should be made with ``handler_cancellation``; a client that goes away is noticed 0.2 s
    later without.
    """
    for path in _APIS:
        app.router.add_post(path, door.handler(path, from_peer=False))
        app.router.add_post(RELAY_PREFIX + path, door.handler(path, from_peer=True))
    app.router.add_get("/v1/models", door.list_models)
    app.router.add_get("/v1/models/{model:.+}", door.list_models)
    app.router.add_route("*", "/v1/{path:.*}", door.unknown_path)
    app.on_response_prepare.append(_tell_request_id)
    app.cleanup_ctx.append(door.run)
    app.on_shutdown.append(door.stop)


async def _tell_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """A hook of ``Application.on_response_prepare``, so that streams and errors of whatever kind tell it as well."""
    if own := request_id.current():
        response.headers[request_id.HEADER] = own


def _names(models: Sequence[ServedModel]) -> list[str]:
    return [name for model in models for name in (model.name, *model.aliases)]
