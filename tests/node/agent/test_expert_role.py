"""Which slices a node drops and loads, and what it says of those that it cannot get."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from node.agent.expert_role import ExpertRole, next_slices
from node.errors import ModelError
from node.expert_server.process import SliceAnswer
from node.slices import Slice, gaps, surplus

slices = st.lists(
    st.builds(
        lambda layer, first, count: Slice(layer, first, first + count - 1),
        st.integers(0, 3),
        st.integers(0, 7),
        st.integers(1, 4),
    ),
    max_size=6,
)


def _bytes(one: Slice) -> int:
    return 10 * one.n_experts


@given(slices, slices, st.integers(0, 500))
def test_what_is_wanted_is_reached_with_as_few_drops_as_memory_allows(
    wanted: list[Slice], held: list[Slice], memory_bytes: int
) -> None:
    held_bytes = {one: _bytes(one) for one in held}
    to_drop, to_load = next_slices(wanted, held_bytes, memory_bytes, _bytes)
    after = [one for one in held_bytes if one not in to_drop] + to_load
    assert gaps(wanted, after) == []
    assert set(to_drop) <= set(surplus(wanted, list(held_bytes)))
    needed = sum(map(_bytes, after))
    # Not one too many, and none is kept for which there is no memory.
    assert not to_drop or needed + _bytes(to_drop[-1]) > memory_bytes
    assert needed <= memory_bytes or set(to_drop) == set(surplus(wanted, list(held_bytes)))


def test_what_is_held_and_not_wanted_stays_while_there_is_room() -> None:
    old, new = Slice(0, 0, 3), Slice(1, 0, 3)
    assert next_slices([new], {old: 40}, 80, _bytes) == ([], [new])
    assert next_slices([new], {old: 40}, 79, _bytes) == ([old], [new])


class Process:
    """An expert server that loads whatever it is told."""

    port, expert_bytes_per_s = 4101, 0.0

    def __init__(self) -> None:
        self.loaded: list[Slice] = []

    async def start(self) -> None:
        """It runs already."""

    stop = start

    async def supervise(self) -> None:
        await asyncio.Event().wait()

    async def load(self, model: str, programs: Any, n_expert: Any, n_used: Any, orders: Any) -> list[SliceAnswer]:
        self.loaded += [order.slice for order in orders]
        return [SliceAnswer(order.slice, 10, None) for order in orders]


async def test_slices_that_are_not_on_the_disk_are_fetched_before_they_are_loaded(tmp_path: Path) -> None:
    asked: list[Sequence[Slice]] = []
    changed = asyncio.Event()

    async def provide(index: Any, wanted: Sequence[Slice]) -> None:
        asked.append(wanted)
        if len(asked) == 1:
            raise ModelError("no node that answers has them")

    role = ExpertRole(
        "alpha",
        host="127.0.0.1",
        port=0,
        device="CPU",
        threads=1,
        max_rows=1,
        memory_bytes=1000,
        log_path=tmp_path / "log",
        environment={},
        on_change=changed.set,
        provide=provide,
    )
    process: Any = Process()
    role.process = process
    program = SimpleNamespace(text="", n_expert=8, n_used=2)
    index: Any = SimpleNamespace(
        model_id="m", n_expert=8, expert_bytes=lambda layer: 80, slice_parts=lambda *one: {}, paths=("m.gguf",)
    )
    programs: Any = SimpleNamespace(layers={0: program, 1: program})
    running = asyncio.create_task(role.run())
    async with asyncio.timeout(10):
        role.want(index, programs, [Slice(0, 0, 3)])
        while not role.problem:
            changed.clear()
            await changed.wait()
        assert role.problem == "no node that answers has them" and process.loaded == [] and role.ready == ()
        role.want(index, programs, [Slice(0, 0, 3), Slice(1, 0, 3)])
        while role.problem:
            changed.clear()
            await changed.wait()
    assert process.loaded == [Slice(0, 0, 3), Slice(1, 0, 3)] == list(role.ready)
    state = role.state()
    assert (state.port, state.model_id, state.ready, state.problem) == (4101, "m", role.ready, "")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
