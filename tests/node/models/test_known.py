"""Models are told apart by their bytes, whatever their names and however they are split."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from node.errors import ModelError
from node.models import hashing as hashing_module
from node.models import known as known_module
from node.models.index import ModelIndex, read_model
from node.models.known import KnownModels
from node.models.local import LocalModels
from node.records import Model
from rigs import model_files


@pytest.fixture(scope="module")
def a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_files.tiny_model(tmp_path_factory.mktemp("a") / "model.gguf")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the node is started; it has no others."""
    for name in ("here", "home", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SWARM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "here"


def known(configured: str = "", on_change: Callable[[], None] = lambda: None) -> KnownModels:
    return KnownModels(LocalModels(configured), on_change)


def model_of(index: ModelIndex, file: str = "model.gguf") -> Model:
    return Model(index.model_id, file, "qwen3moe", 4, 8, 1, 1, index.header_digest[:32])


async def served(path: Path) -> Model:
    """What the record of a node says that serves `path`."""
    return model_of(await known(str(path)).identify(read_model(path)))


async def test_the_same_bytes_elsewhere_and_split_are_found(a: Path, here: Path) -> None:
    split = model_files.split_copy(a, here / "models", 4)
    model_files.with_other_byte(a, here / "c.gguf", 3, 5)  # looked at first, and not taken
    model = await served(a)
    found = await known().find(model)
    assert found.paths == read_model(split.resolve()).paths
    assert found.model_id == model.id != found.header_digest[:32]


async def test_one_other_byte_is_caught(a: Path, here: Path) -> None:
    c = model_files.with_other_byte(a, here / "model.gguf", 3, 5)
    model, its = await served(a), await served(c)
    assert model.header == its.header and model.id != its.id
    with pytest.raises(
        ModelError, match=f"{c} has the same header .* it is model {its.id}, the router's is {model.id}"
    ):
        await known().find(model)


async def test_another_quantisation_of_the_same_name(a: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    b = model_files.with_layer_in_q8_0(a, here / "model.gguf", 3)
    model = await served(a)
    # Its header is enough to know.
    monkeypatch.setattr(known_module, "local_manifest", None)
    own = read_model(b).header_digest[:32]
    with pytest.raises(ModelError, match=f"{b} has the name .*: its header is {own}, the router's {model.header}"):
        await known().find(model)


async def test_a_model_that_is_nowhere(a: Path, here: Path) -> None:
    with pytest.raises(ModelError, match=rf"the router serves other\.gguf, which is in none of .*{here}"):
        await known().find(model_of(read_model(a), "other.gguf"))


async def test_a_search_goes_on_beside(a: Path, here: Path) -> None:
    model = await served(a)
    changes = asyncio.Event()
    models = known(on_change=changes.set)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(models.run())

        async def until_told() -> ModelIndex | None:
            while True:
                changes.clear()
                index = models.look_up(model)
                if index is not None:
                    return index
                await changes.wait()

        with pytest.raises(ModelError, match="in none of this node's model folders"):
            await until_told()
        shutil.copyfile(a, here / "model.gguf")
        while True:
            try:
                found = await until_told()
                break
            except ModelError:
                changes.clear()
                await changes.wait()
        assert found is not None and found.paths == (str(here / "model.gguf"),)
        assert found.model_id == model.id
        # Another model is another search, with no word of the first.
        assert models.look_up(model_of(read_model(a), "other.gguf")) is None
        running.cancel()


async def test_hashing_is_told_in_steps(a: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing_module, "_READ_BYTES", 1000)
    told: list[str] = []
    models = known(on_change=lambda: told.append(models.activity))
    await models.identify(read_model(a))
    assert models.activity == "" == told[-1] and models.progress is None
    assert set(told[:-1]) <= {f"hashing model.gguf: {percent} %" for percent in range(0, 101, 5)}
    assert 3 < len(told) <= 25
    told.clear()
    await models.identify(read_model(a))
    assert not told


async def test_known_files_are_not_read_again(a: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = known()
    first = await models.identify(read_model(a))
    monkeypatch.setattr(known_module, "local_manifest", None)
    assert (await models.identify(read_model(a))).model_id == first.model_id


async def test_who_stops_waits_for_the_threads(a: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing_module, "_READ_BYTES", 100)
    begun = asyncio.Event()
    models = known(on_change=begun.set)
    work = asyncio.create_task(models.identify(read_model(a)))
    await begun.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hash")]
    assert models.progress is None and not list((here.parent / "cache").rglob("*.manifest"))


async def test_a_file_that_is_being_written_is_left_in_peace(
    a: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await served(a)
    path = here / "model.gguf"
    shutil.copyfile(a, path)
    read = 0

    def report(self: KnownModels, *_: object) -> None:
        nonlocal read
        read += 1
        os.utime(path)

    models = known()
    with monkeypatch.context() as patch:
        patch.setattr(KnownModels, "_report", report)
        for _ in range(3):
            with pytest.raises(ModelError, match=r"model\.gguf changed while it was read"):
                await models.find(model)
    # Once, and not to the end.
    assert 0 < read < 20
    with pytest.raises(ModelError, match="changed while"):
        await models.find(model)
    # Nothing is hashed until the pause is over.
    ((paths, (until_s, why)),) = models._paused.items()
    assert 0 < until_s - time.monotonic() <= known_module._PAUSE_S
    models._paused[paths] = (time.monotonic(), why)
    assert (await models.find(model)).model_id == model.id


async def test_a_file_that_is_replaced_is_not_loaded(a: Path, here: Path) -> None:
    path = here / "model.gguf"
    shutil.copyfile(a, path)
    models = known()
    index = await models.find(await served(path))
    models.check_unchanged(index)
    model_files.with_other_byte(a, here / "new", 0, 0).replace(path)
    with pytest.raises(ModelError, match=r"model\.gguf changed since this node hashed it"):
        models.check_unchanged(index)
    # Nor when the new file is known as what it is.
    assert (await models.identify(read_model(path))).model_id != index.model_id
    with pytest.raises(ModelError, match="changed since"):
        models.check_unchanged(index)
    # The same bytes again are found and taken.
    path.unlink()
    shutil.copyfile(a, path)
    os.utime(path, ns=(0, 0))
    again = await models.find(model_of(index))
    models.check_unchanged(again)
