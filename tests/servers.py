"""Real expert servers for tests, on a thread of their own, and what llama.cpp's programs need to use them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import kernels
from node.expert_process import ExpertProcess, SliceOrder
from node.layer_programs import EXPERT_TENSOR_PATTERN, ModelPrograms, read_programs, swarm_backend_path
from node.model_index import ModelIndex, read_model
from node.routing import RoutingNode, RoutingSlice, RoutingTable, even_split

T = TypeVar("T")

OVERRIDE = (EXPERT_TENSOR_PATTERN, "Swarm")


class Servers:
    """N expert servers, used from synchronous tests. Each holds an even share of every layer of the models loaded."""

    def __init__(self, count: int, folder: Path, *, threads: int = 1, environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.processes = [
            ExpertProcess(
                f"node{number}", threads=threads, stderr=folder / f"node{number}.log", environment=environment or {}
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
        ranges = []
        for layer, program in programs.layers.items():
            shares = even_split(program.n_expert, len(self.processes))
            if uneven and len(shares) > 1:
                # One expert on the first server, the rest as it comes.
                shares = [(0, 0)] + [(first + 1, last + 1) for first, last in even_split(program.n_expert - 1, len(shares) - 1)]
            ranges += [(layer, first, last, number) for number, (first, last) in enumerate(shares)]
        for number, process in enumerate(self.processes):
            mine = [(layer, first, last) for layer, first, last, owner in ranges if owner == number]
            answers = self.run(
                process.load(
                    index.model_id,
                    {layer: program.text for layer, program in programs.layers.items()},
                    {layer: program.n_expert for layer, program in programs.layers.items()},
                    {layer: program.n_used for layer, program in programs.layers.items()},
                    [
                        SliceOrder(
                            layer,
                            first,
                            last,
                            {name: t.to_json() for name, t in index.slice_parts(layer, first, last).items()},
                        )
                        for layer, first, last in mine
                    ],
                )
            )
            assert [a.reason for a in answers if a.reason is not None] == []
        table = RoutingTable(
            model=index.model_id,
            nodes=tuple(RoutingNode(p.name, "127.0.0.1", p.port) for p in self.processes),
            slices=tuple(RoutingSlice(layer, first, last, (owner,)) for layer, first, last, owner in ranges),
            sequence=1,
            term=1,
            reduce=reduce,
            deadline_floor_ms=deadline_floor_ms,
            **table_fields,
        )
        try:
            yield HeldModel(self, index, programs, table)
        finally:
            for layer, first, last, owner in ranges:
                if self.processes[owner].running:
                    self.run(self.processes[owner].drop(index.model_id, layer, first, last))


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

    @property
    def _stats_path(self) -> Path:
        return self.servers.folder / f"{self.index.model_id}.stats.json"

    def statistics(self) -> dict[str, Any]:
        """What the last program with :meth:`environment` wrote when it ended."""
        return dict(json.loads(self._stats_path.read_text()))


def native(name: str) -> str:
    """Path of a native program of the build under test."""
    return str(kernels.native_path(name))
