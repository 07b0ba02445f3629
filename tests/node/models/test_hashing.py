"""Manifests of files on this machine: computed once, and again when a file changed."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from node.errors import ModelError
from node.models import hashing as hashing_module
from node.models.hashing import HashingStopped, cached_manifest, file_stamp, local_manifest
from node.models.index import read_model
from node.models.manifest import Manifest
from node.models.pieces import pieces
from node.models.synthetic import SHAPES
from rigs import model_files


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_files.tiny_model(tmp_path_factory.mktemp("source") / "source.gguf")


@pytest.fixture
def model(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(source, tmp_path / "model.gguf"))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(hashing_module, "_compute", fail)


def test_computed_once(model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = read_model(model)
    assert cached_manifest(index, kept) is None
    reports: list[tuple[int, int]] = []
    manifest = local_manifest(index, lambda done, total: reports.append((done, total)), folder=kept)
    total = sum(piece.bytes for piece in pieces(index))
    assert reports[-1] == (total, total) and {total for _, total in reports} == {total}
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})
    no_reading(monkeypatch)
    assert local_manifest(read_model(model), folder=kept) == manifest
    assert cached_manifest(index, kept) == manifest
    assert len(list(kept.iterdir())) == 1


def test_by_default_in_the_cache_folder(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_CACHE_DIR", str(tmp_path / "cache"))
    manifest = local_manifest(read_model(model))
    assert cached_manifest(read_model(model)) == manifest
    assert len(list((tmp_path / "cache" / "manifests").glob("*.manifest"))) == 1


@pytest.mark.parametrize("change", ["one byte", "replaced", "touched", "moved"])
def test_a_file_that_changed_is_hashed_again(change: str, model: Path, kept: Path) -> None:
    index = read_model(model)
    before = local_manifest(index, folder=kept)
    (part,) = index.slice_parts(1, 2, 2)["ffn_up_exps.weight"].parts
    if change == "one byte":  # at once: the step of the file system's clock has passed
        with model.open("r+b") as file:
            file.seek(part.offset)
            byte = file.read(1)
            file.seek(part.offset)
            file.write(bytes([byte[0] ^ 1]))
    elif change == "replaced":
        other = model_files.with_other_byte(model, model.with_name("other"), 1, 2)
        status = model.stat()
        other.replace(model)
        os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif change == "touched":
        os.utime(model, ns=(0, 123_456_789))
    else:
        model = model.rename(model.with_name("moved.gguf"))
    now = read_model(model)
    assert cached_manifest(now, kept) is None
    after = local_manifest(now, folder=kept)
    assert (after == before) == (change in ("touched", "moved"))
    assert cached_manifest(now, kept) == after


@pytest.mark.parametrize("spoil", ["a digest", "cut", "empty", "of another file"])
def test_what_is_kept_is_checked(spoil: str, model: Path, kept: Path) -> None:
    index = read_model(model)
    manifest = local_manifest(index, folder=kept)
    (file,) = kept.iterdir()
    data = file.read_bytes()
    if spoil == "a digest":
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif spoil == "cut":
        file.write_bytes(data[:-32])
    elif spoil == "empty":
        file.write_bytes(b"")
    else:
        other = read_model(model_files.tiny_model(model.with_name("other.gguf"), seed=1))
        local_manifest(other, folder=kept)
        (others,) = set(kept.iterdir()) - {file}
        others.replace(file)
    assert cached_manifest(index, kept) is None
    assert local_manifest(index, folder=kept) == manifest


def test_the_same_whatever_the_number_of_workers(model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = read_model(model)
    results = []
    for threads in (1, 2, 16):
        monkeypatch.setattr(hashing_module, "default_threads", lambda: threads)  # noqa: B023
        results.append(local_manifest(index, folder=kept / str(threads)))
    assert results[0] == results[1] == results[2]


def test_stopped(model: Path, kept: Path) -> None:
    stop = threading.Event()
    with pytest.raises(HashingStopped):
        local_manifest(read_model(model), lambda done, total: stop.set(), stop, kept)
    assert not kept.exists()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hash")]


def test_a_file_that_changes_meanwhile(model: Path, kept: Path) -> None:
    index = read_model(model)

    def change(done: int, total: int) -> None:
        os.utime(model)

    with pytest.raises(ModelError, match="changed while it was read"):
        local_manifest(index, change, folder=kept)
    model_files.tiny_model(model, layers=3)
    with pytest.raises(ModelError, match="changed while it was read"):
        local_manifest(index, folder=kept)
    assert not kept.exists()


def test_a_file_that_is_cut_or_gone(model: Path, kept: Path) -> None:
    index = read_model(model)
    with pytest.raises(ModelError, match=r"model\.gguf (became shorter|changed) "):
        local_manifest(index, lambda done, total: os.truncate(model, index.tensors[0].offset), folder=kept)
    model.unlink()
    with pytest.raises(ModelError, match=r"model\.gguf cannot be read: No such file"):
        local_manifest(index, folder=kept)
    assert not kept.exists()


def test_a_disk_that_fails(model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ModelError, match=r"model\.gguf cannot be read at byte \d+: Input/output error"):
        local_manifest(read_model(model), folder=kept)


def test_a_folder_that_cannot_be_written_costs_only_the_next_time(model: Path, kept: Path) -> None:
    kept.write_text("not a folder")
    index = read_model(model)
    assert local_manifest(index, folder=kept) == local_manifest(index, folder=kept)


def test_few_are_kept(model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing_module, "_KEPT_MAX", 2)
    for number in range(4):
        model = model.rename(model.with_name(f"{number}.gguf"))
        local_manifest(read_model(model), folder=kept)
        os.utime(next(file for file in kept.iterdir() if file.stat().st_mtime > 1000), (number, number))
    assert len(list(kept.iterdir())) == 2
    assert cached_manifest(read_model(model), kept) is not None


def test_a_large_split_model_is_recognised_without_being_read(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """75 GB in four files of holes, with the reference model's 12,288 experts."""
    first = model_files.split_of_holes(SHAPES["qwen3.5-122b"], tmp_path, 4)
    index = read_model(first)
    assert sum(tensor.bytes for tensor in index.tensors) > 70e9
    manifest = Manifest(index.header_digest, (bytes(32),) * len(pieces(index)))
    stamp = file_stamp(index)
    hashing_module._keep(hashing_module._cache_path(stamp, kept), stamp, manifest)
    no_reading(monkeypatch)
    started_s = time.process_time()  # of this process alone, on whatever machine
    again = read_model(first)
    assert local_manifest(again, folder=kept).model_id == manifest.model_id
    assert time.process_time() - started_s < 1.0  # what a user was promised
