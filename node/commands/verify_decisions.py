"""What differences in last bits do to decisions: which experts are chosen for a token, and which token is written.

Stock llama.cpp writes a greedy answer. Swarms of several expert servers on this machine then read that same answer, and
say after each token which they would have written next: one token that they would not does not make all later ones
others. The rows of servers of one build have the bits of one machine; sums and other builds do not.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from node import environment
from node.commands.local_swarm import LocalSwarmOptions, ServerBuild, local_swarm
from node.errors import SwarmError
from node.expert_server.process import SliceAnswer
from node.models.index import ModelIndex
from node.router.llama_server import EngineOptions, LlamaServer, llama_server
from node.router.programs import read_programs

PROMPT = "Write a long story about a cat who lives in Paris."
N_TOKENS = 256
_N_NODES = 3
_N_PROBABILITIES = 10
_START_TIMEOUT_S = 120.0
# A server of another processor's build starts under an emulator.
_EMULATED_WITHIN_S = 600.0

Selection = tuple[int, frozenset[int]]  # layer, experts of one token


@dataclass(frozen=True)
class Decoded:
    """The likeliest token after each beginning of an answer, and the logarithms of the likeliest tokens' probabilities,
    by id. `selections`: the experts of each layer for each token of the answer but the last, in order;
    empty where they are not known."""

    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    selections: tuple[Selection, ...] = ()


@dataclass(frozen=True)
class Difference:
    """What two choose along the same text.

    `n_other` of `n_tokens` are other tokens, `first_difference` is the number of the first from 0, None without any.
    `logprob_rms`, `logprob_max`: differences of the logarithms of probabilities that both name. `n_selections` were
    compared (a layer's for a token each), of which `n_changed` are other sets.
    """

    n_tokens: int
    n_other: int
    first_difference: int | None
    logprob_rms: float
    logprob_max: float
    n_selections: int
    n_changed: int


def difference(a: Decoded, b: Decoded) -> Difference:
    """Compares what two choose along one text. Raises ValueError when they are of other lengths."""
    others = [i for i, (one, other) in enumerate(zip(a.tokens, b.tokens, strict=True)) if one != other]
    errors = [
        one[token] - other[token]
        for one, other in zip(a.logprobs, b.logprobs, strict=True)
        for token in one.keys() & other.keys()
    ]
    pairs = list(zip(a.selections, b.selections, strict=True)) if a.selections and b.selections else []
    return Difference(
        n_tokens=len(a.tokens),
        n_other=len(others),
        first_difference=others[0] if others else None,
        logprob_rms=math.sqrt(math.fsum(e * e for e in errors) / len(errors)) if errors else 0.0,
        logprob_max=max(map(abs, errors), default=0.0),
        n_selections=len(pairs),
        n_changed=sum(one != other for one, other in pairs),
    )


def selections(records: Iterable[dict[str, Any]]) -> tuple[Selection, ...]:
    """The experts of each layer and token from the calls that several servers recorded (SWARM_DEBUG_CALLS).

    A router calls all servers for a layer, and then for the next one, so what lies between two changes of
    layer, in the order of arrival, is of one token. Calls of several rows, which are a prompt's, are left out,
    and so is the prompt's last layer, of which llama.cpp computes the last row only. A call that is made again,
    since a server ended in between, counts once.
    """
    found: list[tuple[int, set[int], int]] = []
    in_order = sorted(records, key=lambda record: float(record["t"]))
    has_one_layer = len({record["layer"] for record in in_order}) == 1
    for record in in_order:
        layer, experts, rows = int(record["layer"]), set(map(int, record["experts"])), int(record["rows"])
        if found and found[-1][0] == layer and not (has_one_layer and found[-1][1] & experts):
            found[-1] = (layer, found[-1][1] | experts, max(rows, found[-1][2]))
        else:
            found.append((layer, experts, rows))
    single = [(layer, frozenset(experts)) for layer, experts, rows in found if rows == 1]
    lowest = min((layer for layer, _ in single), default=0)
    return tuple(itertools.dropwhile(lambda one: one[0] != lowest, single))


async def decisions(
    index: ModelIndex,
    *,
    n_tokens: int = N_TOKENS,
    prompt: str = PROMPT,
    n_nodes: int = _N_NODES,
    builds: Sequence[ServerBuild] = (),
    on_progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Decoded]:
    """A greedy answer by `stock` llama.cpp, and what a swarm chooses along it, in `rows` and `sum`; with
    `builds` also by a swarm of a server of each, as `mixed rows` and `mixed sum`. `on_progress` is told what is
    done next. Raises SwarmError."""
    programs = await read_programs(index)
    # What stock llama.cpp repacks has other last bits: like is compared with like.
    engine = EngineOptions(context=n_tokens + 1024, extra=("--no-repack",))
    found: dict[str, Decoded] = {}
    with tempfile.TemporaryDirectory(prefix="swarm-node-decisions-") as name:
        folder = Path(name)
        on_progress("stock llama.cpp")
        async with _stock(index, engine, folder / "stock.log") as server:
            start = await _tokens(server.url, server.api_key, prompt)
            found["stock"] = await _answer(server.url, server.api_key, start, n_tokens)
        kinds: list[tuple[str, tuple[ServerBuild, ...]]] = [("", ())]
        if builds:
            kinds.append(("mixed ", tuple(builds)))
        for (kind, servers), reduce in itertools.product(kinds, ("rows", "sum")):
            on_progress(f"a swarm, {kind}{reduce}")
            calls = folder / f"{kind}{reduce}"
            calls.mkdir()
            options = LocalSwarmOptions(
                nodes=n_nodes,
                builds=servers,
                start_within_s=_EMULATED_WITHIN_S,
                reduce=reduce,
                deadline_floor_ms=60_000,
                engine=engine,
                environment={environment.DEBUG_CALLS: str(calls)},
            )
            async with local_swarm(index, programs, options, log_folder=calls, on_slice=_check_device) as swarm:
                assert swarm.engine is not None
                for file in calls.glob("*.jsonl"):  # of llama-server's own first decode
                    os.truncate(file, 0)
                answer = await _follow(swarm.engine.url, swarm.engine.api_key, start, found["stock"].tokens)
            lines = [line for file in calls.glob("*.jsonl") for line in file.read_text().splitlines()]
            found[calls.name] = replace(answer, selections=selections(map(json.loads, lines)))
    return found


def _check_device(name: str, answer: SliceAnswer) -> None:
    if answer.note:
        # A node goes on with its CPU, whose results would stand here under another name.
        raise SwarmError(f"{answer.slice} are {answer.note}", node=name)


def document(found: dict[str, Decoded]) -> list[dict[str, Any]]:
    """What differs from stock, and from `rows`, which has stock's bits and whose choices of
    experts are known; for scripts."""
    pairs = [(name, "stock") for name in found if name != "stock"]
    pairs += [(name, "rows") for name in found if name not in ("stock", "rows")]
    return [{"a": a, "b": b, **vars(difference(found[a], found[b]))} for a, b in pairs]


def describe(differences: Sequence[dict[str, Any]]) -> list[str]:
    """The same for people, a line each."""
    lines = []
    for one in differences:
        first, n_tokens = one["first_difference"], one["n_tokens"]
        tokens = (
            f"all {n_tokens} tokens are the same"
            if first is None
            else f"{one['n_other']} of {n_tokens} tokens are others, the first is number {first}"
        )
        line = (
            f"{one['a']}, {one['b']}: {tokens}; log-probabilities differ by {one['logprob_rms']:.1e} (root mean "
            f"square), {one['logprob_max']:.1e} at most"
        )
        if one["n_selections"]:
            line += f"; of {one['n_selections']} choices of experts, {one['n_changed']} are others"
        lines.append(line)
    return lines


async def _answer(url: str, api_key: str, start: Sequence[int], n_tokens: int) -> Decoded:
    """A greedy answer."""
    async with _session(api_key) as session:
        return _decoded(await _complete(session, url, start, n_tokens))


async def _follow(url: str, api_key: str, start: Sequence[int], tokens: Sequence[int]) -> Decoded:
    """The greedy choice after each beginning of ``tokens``. All but the last token of each beginning are in
    llama-server's cache, so every one is computed as in writing them."""
    async with _session(api_key) as session:
        steps = [
            step
            for i in range(len(tokens))
            for step in await _complete(session, url, [*start, *tokens[:i]], 1, cache_prompt=i > 0)
        ]
    return _decoded(steps)


def _session(api_key: str) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, connect=5)
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}, timeout=timeout)


async def _tokens(url: str, api_key: str, text: str) -> list[int]:
    async with _session(api_key) as session:
        return list((await _post(session, f"{url}/tokenize", {"content": text, "add_special": True}))["tokens"])


async def _complete(
    session: aiohttp.ClientSession, url: str, start: Sequence[int], n_tokens: int, *, cache_prompt: bool = False
) -> list[dict[str, Any]]:
    body = {
        "prompt": list(start),
        "n_predict": n_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "n_probs": _N_PROBABILITIES,
        "return_tokens": True,
        "cache_prompt": cache_prompt,
    }
    return list((await _post(session, f"{url}/completion", body))["completion_probabilities"])


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(url, json=body) as response:
        answer = await response.json()
        if response.status != 200:
            raise SwarmError(f"llama-server answers with status {response.status}: {str(answer)[:300]}")
        return dict(answer)


def _decoded(steps: Sequence[dict[str, Any]]) -> Decoded:
    return Decoded(
        tuple(int(step["id"]) for step in steps),
        tuple({int(top["id"]): float(top["logprob"]) for top in step["top_logprobs"]} for step in steps),
    )


@contextlib.asynccontextmanager
async def _stock(index: ModelIndex, options: EngineOptions, log_path: Path) -> AsyncIterator[LlamaServer]:
    """llama-server without the Swarm backend. Raises SwarmError."""
    async with llama_server(index.paths[0], options, log_path=log_path, arguments=("--device", "none")) as server:
        await server.until_healthy(_START_TIMEOUT_S)
        yield server
