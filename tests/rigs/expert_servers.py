"""Real expert servers for tests, on a thread of their own, and what llama.cpp's programs need to use them."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import urllib.request
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

import kernels
from node.expert_server import wire
from node.expert_server.process import ExpertProcess, SliceOrder
from node.models.index import ModelIndex, read_model
from node.router.programs import EXPERT_TENSOR_PATTERN, ModelPrograms, read_programs, swarm_backend_path
from node.router.table import RoutingNode, RoutingSlice, RoutingTable, even_split
from node.slices import Slice

T = TypeVar("T")

OVERRIDE = (EXPERT_TENSOR_PATTERN, "Swarm")


class Servers:
    """N expert servers, used from synchronous tests. Each holds an even share of every layer of the models loaded."""

    def __init__(
        self, count: int, folder: Path, *, threads: int = 1, environment: dict[str, str] | None = None, script: str = ""
    ) -> None:
        """`script`: a server program beside this file, instead of the real one."""
        self.folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        program = [str(Path(__file__).with_name(script))] if script else ["-m", "node.expert_server"]
        self.processes = [
            ExpertProcess(
                f"node{number}",
                threads=threads,
                command=(sys.executable, *program),
                stderr=folder / f"node{number}.log",
                environment=environment,
            )
            for number in range(count)
        ]
        for process in self.processes:
            self.run(process.start())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=300)

    def close(self) -> None:
        for process in self.processes:
            self.run(process.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def programs(self, index: ModelIndex) -> ModelPrograms:
        return self.run(read_programs(index))

    @contextmanager
    def holding(
        self,
        model: Path,
        *,
        reduce: str = "rows",
        deadline_floor_ms: int = 60_000,
        uneven: bool = False,
        **table_fields: Any,
    ) -> Iterator[HeldModel]:
        """Loads a model's experts, and drops them on leaving. Layers with fewer experts than servers use fewer."""
        index = read_model(model)
        programs = self.programs(index)
        owned = []
        for layer, program in programs.layers.items():
            shares = even_split(program.n_expert, len(self.processes))
            if uneven and len(shares) > 1:
                # One expert on the first server, the rest as it comes.
                shares = [(0, 0)] + [
                    (first + 1, last + 1) for first, last in even_split(program.n_expert - 1, len(shares) - 1)
                ]
            owned += [(Slice(layer, first, last), number) for number, (first, last) in enumerate(shares)]
        for number, process in enumerate(self.processes):
            mine = [one for one, owner in owned if owner == number]
            answers = self.run(
                process.load(
                    index.model_id,
                    {layer: program.text for layer, program in programs.layers.items()},
                    {layer: program.n_expert for layer, program in programs.layers.items()},
                    {layer: program.n_used for layer, program in programs.layers.items()},
                    [
                        SliceOrder(one, {name: t.to_json() for name, t in index.slice_parts(*one).items()})
                        for one in mine
                    ],
                )
            )
            assert [a.reason for a in answers if a.reason is not None] == []
        table = RoutingTable(
            model=index.model_id,
            nodes=tuple(RoutingNode(p.name, "127.0.0.1", p.port) for p in self.processes),
            slices=tuple(RoutingSlice(*one, (owner,)) for one, owner in owned),
            sequence=1,
            term=1,
            reduce=reduce,
            deadline_floor_ms=deadline_floor_ms,
            **table_fields,
        )
        try:
            yield HeldModel(self, index, programs, table)
        finally:
            for one, owner in owned:
                if self.processes[owner].running:
                    self.run(self.processes[owner].drop(index.model_id, one))


class HeldModel:
    """A model whose experts are ready on the servers."""

    def __init__(self, servers: Servers, index: ModelIndex, programs: ModelPrograms, table: RoutingTable) -> None:
        self.servers = servers
        self.index = index
        self.programs = programs
        self.table = table

    def environment(self, reduce: str | None = None) -> dict[str, str]:
        """Environment for a llama.cpp program that is to compute its experts here, with a fresh statistics file."""
        document = json.loads(self.table.to_json()) | ({"reduce": reduce} if reduce else {})
        path = self.servers.folder / f"{self.index.model_id}-{document['reduce']}.table.json"
        path.write_text(json.dumps(document))
        self._stats_path.unlink(missing_ok=True)
        return {
            "GGML_BACKEND_PATH": str(swarm_backend_path()),
            "SWARM_TABLE": str(path),
            "SWARM_STATS": str(self._stats_path),
        }

    def call(
        self,
        layer: int,
        h: NDArray[np.float32],
        ids: NDArray[np.int32],
        weight: NDArray[np.float32],
        reduce: str,
    ) -> NDArray[np.float32]:
        """One layer through the servers' real ports. h [n, n_in], ids and weight [n, n_used]; [n, n_out] back.

        Added as the router does: rows in slot order, sums in slice order."""
        program = self.programs.layers[layer]
        pairs = np.zeros((*ids.shape, program.n_out), np.float32)
        total = np.zeros((len(h), program.n_out), np.float32)
        for one in (s for s in self.table.slices if s.layer == layer):
            row, slot = np.nonzero((ids >= one.first) & (ids <= one.last))
            rows, row_number = np.unique(row, return_inverse=True)
            request = wire.CallRequest(
                id=1,
                model=self.index.model_id,
                program=program.digest,
                term=1,
                layer=layer,
                reduce=reduce,
                n_rows=len(rows),
                dtype="f32",
                h=h[rows],
                row=row_number.astype(np.int32),
                expert=ids[row, slot],
                weight=weight[row, slot] if "w" in program.text.split() else None,
                deadline_ms=60_000,
            )
            node = self.table.nodes[one.nodes[0]]
            with urllib.request.urlopen(
                urllib.request.Request(
                    f"http://{node.host}:{node.port}/v1/ffn",
                    wire.encode_request(request),
                    {"Content-Type": "application/msgpack"},
                )
            ) as response:
                n_rows = len(row) if reduce == "rows" else len(rows)
                reply = wire.decode_reply(response.read(), call_id=1, n_rows=n_rows, n_out=program.n_out, dtype="f32")
            assert isinstance(reply, wire.CallReply), reply
            if reduce == "rows":
                pairs[row, slot] = reply.y
            else:
                total[rows] += reply.y
        if reduce == "sum":
            return total
        result = pairs[:, 0].copy()
        for slot in range(1, ids.shape[1]):
            result += pairs[:, slot]
        return result

    @property
    def _stats_path(self) -> Path:
        return self.servers.folder / f"{self.index.model_id}.stats.json"

    def statistics(self) -> dict[str, Any]:
        """What the last program with :meth:`environment` wrote when it ended."""
        return dict(json.loads(self._stats_path.read_text()))


def native(name: str) -> str:
    """Path of a native program of the build under test."""
    return str(kernels.native_path(name))
