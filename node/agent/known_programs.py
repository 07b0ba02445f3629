"""The layer programs of models: read with llama.cpp where this build has it, else asked of the router.

They are given to other nodes that ask.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from node.errors import SwarmError
from node.models.index import ModelIndex
from node.peers.http import read_body
from node.router.programs import LayerProgram, ModelPrograms, read_programs

PROGRAMS_PATH = "/swarm/v1/programs"

#: Posts a body to a path of another agent, whose URL comes first; gives status and body.
Post = Callable[[str, str, bytes], Awaitable[tuple[int, bytes]]]


class KnownPrograms:
    """``by_model``: the programs that this node has, by the model's id."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self.by_model: dict[str, ModelPrograms] = {}

    async def of(self, index: ModelIndex, router_url: str) -> ModelPrograms:
        """The programs of a model. Raises SwarmError, aiohttp.ClientError, TimeoutError."""
        known = self.by_model.get(index.model_id)
        if known is None:
            try:
                known = await read_programs(index)
            except FileNotFoundError:  # an expert-only build
                known = await self._fetch(index, router_url)
            self.by_model[index.model_id] = known
        return known

    def routes(self) -> list[web.RouteDef]:
        """The route for peers: docs/protocol.md, "Between agents"."""
        return [web.post(PROGRAMS_PATH, self._give)]

    async def _fetch(self, index: ModelIndex, url: str) -> ModelPrograms:
        status, body = await self._post(url, PROGRAMS_PATH, index.model_id.encode())
        if status != 200:
            raise SwarmError(
                f"the router at {url} does not give the layer programs of {index.model_id}: status {status}"
            )
        try:
            programs = msgspec.json.decode(body, type=list[LayerProgram])
        except msgspec.MsgspecError as error:
            raise SwarmError(f"the router at {url} gives layer programs that cannot be read: {error}") from None
        return ModelPrograms(index.model_id, "", {program.layer: program for program in programs})

    async def _give(self, request: web.Request) -> web.Response:
        programs = self.by_model.get((await read_body(request, 64)).decode(errors="replace"))
        if programs is None:
            return web.Response(status=404)
        return web.Response(body=msgspec.json.encode(list(programs.layers.values())), content_type="application/json")
