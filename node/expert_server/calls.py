"""Answers expert calls: from a message to a message, whatever carried it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any, TextIO

import numpy as np

from node import environment
from node.bounded_msgpack import LARGE_BYTES, Body
from node.errors import CallRefused
from node.expert_server import wire
from node.expert_server.compute_queue import ComputeQueue
from node.expert_server.held_slices import SliceHolder
from node.expert_server.native_calls import NativeCalls

log = logging.getLogger(__name__)

_COUNTERS = ("calls", "pairs", "bytes_received", "bytes_sent", "queue_us", "compute_us")


class ExpertCalls:
    """Decodes a call, checks it against the slices held, has it computed, encodes the answer. On the loop's thread."""

    def __init__(
        self,
        kernels: ModuleType,
        slices: SliceHolder,
        compute: ComputeQueue,
        *,
        native: NativeCalls | None = None,
        recording: TextIO | None = None,
    ) -> None:
        """`native`: what answers other calls, is told the routers' terms and counts too. `recording` gets a line for
        each answered call: when it came, its layer, its number of rows and its experts."""
        self._kernels = kernels
        self._slices = slices
        self._compute = compute
        self._loop = asyncio.get_running_loop()
        self._debug_abort = os.environ.get(environment.DEBUG_ABORT) == "1"
        self._codec = ThreadPoolExecutor(1, thread_name_prefix="codec")
        # The highest term seen, by model.
        self._terms: dict[str, int] = {}
        self._native = native
        self._recording = recording
        self._counters: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()

    def counters(self) -> dict[str, Any]:
        """Numbers of calls since the start, native ones included, and under ``errors`` those refused, by kind."""
        others = {} if self._native is None else self._native.counters()
        counters = {name: self._counters[name] + others.get(name, 0) for name in _COUNTERS}
        return {**counters, "errors": dict(self._errors)}

    def terms(self) -> dict[str, int]:
        """The highest term seen of a router, by model."""
        return dict(self._terms)

    async def answer(self, body: Body, arrived_s: float) -> tuple[int, Body]:
        """The HTTP status and message that answer a call. Keeps at most two of body, result and reply at a time."""
        call_id, n_bytes = 0, len(body)
        try:
            decode = partial(wire.decode_request, body, self._layer_shape)
            del body
            request = decode() if n_bytes <= LARGE_BYTES else await self._off_loop(decode)
            del decode
            call_id, model_id, layer_number, dtype = request.id, request.model, request.layer, request.dtype
            try:
                work, n_pairs = self._prepare(request)
                if self._recording is not None:
                    line = {
                        "t": arrived_s,
                        "layer": layer_number,
                        "rows": request.n_rows,
                        "experts": request.expert.tolist(),
                    }
                    print(json.dumps(line), file=self._recording)
                deadline_s = arrived_s + request.deadline_ms / 1000
                del request
                computing = self._compute.call(work, arrived_s, deadline_s)
                del work
                computed = await computing
                del computing
                encode = partial(
                    wire.encode_reply,
                    wire.CallReply(call_id, dtype, computed.value, computed.compute_us, computed.queue_us),
                )
                n_values = computed.value.size
                self._count_call(n_pairs, n_bytes, computed.queue_us, computed.compute_us)
                del computed
                reply = encode() if 4 * n_values <= LARGE_BYTES else await self._off_loop(encode)
            except OverflowError as error:
                raise CallRefused(str(error), kind="failed", layer=layer_number) from None
            except CallRefused as error:
                error.layer = layer_number if error.layer is None else error.layer
                if isinstance(error, _NotFinite):
                    self._slices.suspect(model_id, layer_number, error.suspects)
                raise
            self._counters["bytes_sent"] += len(reply)
            return 200, reply
        except CallRefused as error:
            error.call_id = error.call_id or call_id
            return self.refuse(error)
        except Exception as error:  # a fault in one call must not cost the others
            log.exception("call %d failed", call_id)
            return self.refuse(CallRefused(f"{type(error).__name__}: {error}", kind="failed", call_id=call_id))

    def _layer_shape(self, model_id: str, layer: int, program: int) -> wire.LayerShape:
        if self._debug_abort and model_id == "abort":
            os.abort()
        return self._slices.find(model_id, layer, program)[2]

    def _prepare(self, request: wire.CallRequest) -> tuple[Callable[[], Any], int]:
        """What the worker thread has to do for a call, and its number of pairs. Raises CallRefused."""
        _, layer, _ = self._slices.find(request.model, request.layer, request.program)
        seen = self._terms.get(request.model, 0)
        if request.term < seen:
            raise CallRefused(
                f"the call is of term {request.term}, a router of term {seen} is known", kind="stale_term"
            )
        if request.model not in self._terms or request.term > seen:
            self._terms[request.model] = request.term
            if self._native is not None:
                self._native.set_term(request.model, request.term)
        self._slices.require(request.model, layer, request.expert)
        n_pairs = len(request.expert)
        shape = (n_pairs if request.reduce == "rows" else request.n_rows, layer.n_out)
        return partial(_compute, self._kernels, layer.store, request, shape), n_pairs

    def refuse(self, error: CallRefused) -> tuple[int, bytes]:
        """The HTTP status and message that say why; counted."""
        self._errors[error.kind] += 1
        described = wire.CallError.of(error)
        return described.http_status, wire.encode_error(described)

    def _off_loop(self, work: Callable[[], Any]) -> Awaitable[Any]:
        return self._loop.run_in_executor(self._codec, work)

    def _count_call(self, n_pairs: int, n_bytes: int, queue_us: int, compute_us: int) -> None:
        for name, value in zip(_COUNTERS, (1, n_pairs, n_bytes, 0, queue_us, compute_us), strict=True):
            self._counters[name] += value


class _NotFinite(CallRefused):
    """A result that holds Inf or NaN; `suspects` are all experts of the call."""

    def __init__(self, message: str, suspects: list[int]) -> None:
        super().__init__(message, kind="failed", retry=True, experts=suspects[: wire.MAX_ERROR_EXPERTS])
        self.suspects = suspects


def _compute(kernels: ModuleType, store: Any, request: wire.CallRequest, shape: tuple[int, int]) -> Any:
    """Runs in the worker thread. Raises CallRefused, whatever the kernels raise."""
    suspects = [int(e) for e in np.unique(request.expert)]
    experts = suspects[: wire.MAX_ERROR_EXPERTS]
    try:
        y = store.ffn(
            request.program,
            request.layer,
            request.h,
            request.row,
            request.expert,
            request.weight,
            request.n_rows,
            request.reduce,
        )
    except kernels.NotHeld as error:
        raise CallRefused(str(error), kind="not_held", experts=experts) from None
    except kernels.ProgramMismatch as error:
        raise CallRefused(str(error), kind="program_mismatch") from None
    except kernels.BadCall as error:
        raise CallRefused(str(error), kind="bad_request", experts=experts) from None
    except kernels.NotFinite as error:
        raise _NotFinite(str(error), suspects) from None
    except kernels.ComputeError as error:
        raise CallRefused(str(error), kind="failed", retry=True, experts=experts) from None
    if y.shape != shape:
        raise CallRefused(f"the result has shape {y.shape}, expected {shape}", kind="failed", experts=experts)
    if not np.isfinite(y).all():
        raise _NotFinite("the result holds a value that is not finite", suspects)
    return y
