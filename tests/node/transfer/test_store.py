"""The store of fetched models: what is present is right, whatever happens in between."""

from __future__ import annotations

import hashlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.errors import ModelError
from node.models.hashing import local_manifest
from node.models.index import read_model
from node.models.layout import FileHead, Layout, read_layout
from node.models.manifest import Manifest
from node.models.pieces import expert_numbers, trunk_numbers
from node.transfer.bitmap import PieceBitmap
from node.transfer.store import ModelStore
from node.transfer.stored import PieceWrong, StoredModel, StoreFull
from rigs import TESTS
from rigs.store_cases import LARGE, disk_bytes, new_store, piece_bytes, source, split


def _verify(stored: StoredModel) -> None:
    """Everything that is listed is what the manifest says."""
    for number in stored.present:
        assert hashlib.sha256(piece_bytes(stored.index, stored, number)).digest() == stored.manifest.sha256[number]


def test_a_whole_model_is_the_same_file(tmp_path: Path) -> None:
    index, manifest, layout = source()
    store = new_store(tmp_path)
    with store.create(manifest, layout, "small.gguf") as stored:
        assert len(stored.present) == 0
        for number in range(len(stored.pieces)):
            stored.write(number, [piece_bytes(index, stored, number)])
        assert len(stored.present) == 0  # not before it is on the disk
        stored.commit()
        assert stored.present.is_full
        assert local_manifest(stored.index, folder=tmp_path / "m") == manifest
    (info,) = store.models()
    assert (info.name, info.present_bytes, info.in_use) == ("small.gguf", info.total_bytes, False)


def test_another_split_has_the_same_pieces_and_identity(tmp_path: Path) -> None:
    index, manifest, _ = source()
    other = split(index, tmp_path, 3)
    assert local_manifest(other, folder=tmp_path / "m") == manifest
    layout = read_layout(other)
    assert Layout.from_bytes(layout.to_bytes()) == layout
    with new_store(tmp_path).create(manifest, layout, "x") as stored:
        assert len(stored.index.paths) == 3
        for number in range(len(stored.pieces)):
            stored.write(number, [piece_bytes(index, stored, number)])
        stored.commit()
        assert local_manifest(read_model(stored.index.paths[1]), folder=tmp_path / "m") == manifest


def test_a_part_of_a_model_takes_its_own_bytes_and_no_more(tmp_path: Path) -> None:
    index, manifest, layout = source(LARGE)
    with new_store(tmp_path).create(manifest, layout, "x") as stored:
        numbers = [n for (_, expert), n in expert_numbers(stored.pieces).items() if expert in (2, 3, 4)]
        for number in numbers:
            stored.write(number, [piece_bytes(index, stored, number)])
        stored.commit()
        claimed = sum(stored.pieces[n].bytes for n in numbers)
        header = sum(len(file.header) for file in layout.files)
        # Six small files: five of one block, and the lock of none.
        assert claimed <= disk_bytes(stored.folder) <= 1.01 * claimed + header + 6 * 4096


def test_wrong_bytes_are_never_written(tmp_path: Path) -> None:
    index, manifest, layout = source()
    with new_store(tmp_path).create(manifest, layout, "x") as stored:
        for number in (0, len(stored.pieces) - 1):
            data = bytearray(piece_bytes(index, stored, number))
            data[len(data) // 2] ^= 1
            for wrong in (data, b"", data[:-1], bytes(data) + b"\0"):
                with pytest.raises(PieceWrong):
                    stored.write(number, [wrong])
            assert not any(piece_bytes(stored.index, stored, number))
        stored.commit()
        assert len(stored.present) == 0


def test_a_layout_of_another_model_is_refused(tmp_path: Path) -> None:
    _, manifest, layout = source()
    store = new_store(tmp_path)
    _, _, other = source(LARGE)
    header = layout.files[0].header
    for wrong in (
        other,
        Layout((FileHead(layout.files[0].size_bytes - 100_000, header),)),
        Layout((FileHead(layout.files[0].size_bytes, header[:100]),)),
        Layout((FileHead(layout.files[0].size_bytes, b""),)),
        Layout(layout.files * 2),
    ):
        with pytest.raises(ModelError):
            store.create(manifest, wrong, "x")
    short = Manifest(manifest.header_digest, manifest.sha256[:-1])
    with pytest.raises(ModelError):
        store.create(short, layout, "x")
    assert store.models() == []
    assert [path for path in store.folder.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("name", ["..", "../x", "/etc", "", "a" * 31, "A" * 32, "a" * 32, "a" * 32 + "\n"])
def test_ids_name_no_paths(name: str, tmp_path: Path) -> None:
    store = new_store(tmp_path)
    assert store.open(name) is None
    store.folder.mkdir()
    assert store.open(name) is None


def test_two_users_fetch_into_one_model(tmp_path: Path) -> None:
    index, manifest, layout = source()
    one, two = (new_store(tmp_path).create(manifest, layout, "x") for _ in range(2))
    with one, two:
        one.write(0, [piece_bytes(index, one, 0)])
        two.write(1, [piece_bytes(index, two, 1)])
        one.commit()
        two.commit()
        assert set(two.present) == {0, 1}
    with new_store(tmp_path).open(manifest.model_id) or pytest.fail() as again:
        assert set(again.present) == {0, 1}
        _verify(again)


def test_a_damaged_list_of_pieces_lists_nothing(tmp_path: Path) -> None:
    index, manifest, layout = source()
    store = new_store(tmp_path)
    with store.create(manifest, layout, "x") as stored:
        stored.write(0, [piece_bytes(index, stored, 0)])
        stored.commit()
        path = stored.folder / "present"
    data = path.read_bytes()
    for wrong in (b"", data[:-1], data + b"\0", bytes([data[0] ^ 1]) + data[1:], data[:20] + b"\xff" + data[21:]):
        path.write_bytes(wrong)
        with store.open(manifest.model_id) or pytest.fail() as again:
            assert len(again.present) == 0
    path.write_bytes(data)
    (store.folder / manifest.model_id / "manifest").write_bytes(b"x")
    with pytest.raises(ModelError):
        store.open(manifest.model_id)
    assert store.models() == []


def test_the_least_recently_used_goes_first_and_never_what_is_in_use(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    ids = []
    for shape in (LARGE, store_shape(1), store_shape(2)):
        index, manifest, layout = source(shape)
        ids.append(manifest.model_id)
        with store.create(manifest, layout, "x") as stored:
            for number in trunk_numbers(stored.pieces):
                stored.write(number, [piece_bytes(index, stored, number)])
            stored.commit()
    for age, model_id in enumerate(ids):
        os.utime(store.folder / model_id / "lock", (1000 - age, 1000 - age))  # the last one is the oldest
    with store.open(ids[2]) or pytest.fail():  # which makes it the newest, and in use
        removed = store.prune(0)
        assert [info.model_id for info in removed] == [ids[1], ids[0]]
        assert [info.model_id for info in store.models()] == [ids[2]]
        with pytest.raises(StoreFull, match=str(store.folder)):
            ModelStore(store.folder, 1 << 20).make_room(1 << 20)
    assert [info.model_id for info in store.prune(0)] == [ids[2]]
    assert sorted(path.name for path in store.folder.iterdir()) == ["lock"]


def test_pieces_are_dropped_only_by_the_only_user(tmp_path: Path) -> None:
    index, manifest, layout = source(LARGE)
    store = new_store(tmp_path)
    with store.create(manifest, layout, "x") as stored:
        numbers = sorted(expert_numbers(stored.pieces).values())
        for number in numbers:
            stored.write(number, [piece_bytes(index, stored, number)])
        stored.commit()
        before = disk_bytes(stored.folder)
        with store.open(manifest.model_id) or pytest.fail():
            assert stored.drop(numbers[:8]) == 0
            assert stored.present.missing(numbers) == []
        gone = stored.drop(numbers[:8] + numbers[:2])
        assert gone == 8 * stored.pieces[numbers[0]].bytes
        assert stored.missing(numbers) == numbers[:8]
        assert before - disk_bytes(stored.folder) > 0.99 * gone
        _verify(stored)  # what is beside the holes
        assert not any(piece_bytes(stored.index, stored, numbers[0]))
        stored.write(numbers[0], [piece_bytes(index, stored, numbers[0])])
        stored.commit()
    with store.open(manifest.model_id) or pytest.fail() as again:
        assert again.missing(numbers) == numbers[1:8]
        _verify(again)
        # A user that was killed does not count.
        (again.folder / "user-0123").touch()
        assert again.drop([numbers[-1]]) == again.pieces[numbers[-1]].bytes


def store_shape(seed: int):
    import dataclasses

    from rigs.store_cases import SMALL

    return dataclasses.replace(SMALL, seed=seed)


def test_another_process_keeps_its_model(tmp_path: Path) -> None:
    _, manifest, layout = source()
    store = new_store(tmp_path)
    store.create(manifest, layout, "x").close()
    program = (
        "import sys, pathlib; from node.transfer.store import ModelStore\n"
        f"stored = ModelStore(pathlib.Path({str(store.folder)!r})).open({manifest.model_id!r})\n"
        "print('open', flush=True); sys.stdin.read()"
    )
    user = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert user.stdin and user.stdout
    try:
        assert user.stdout.readline() == b"open\n"
        assert [info.in_use for info in store.models()] == [True]
        assert store.prune(0) == []
    finally:
        user.kill()
        user.wait()
    assert len(store.prune(0)) == 1


_WRITER = """
import pathlib, sys
sys.path.insert(0, {tests!r})
from rigs.store_cases import LARGE, new_store, piece_bytes, source
index, manifest, layout = source(LARGE)
with new_store(pathlib.Path({folder!r})).create(manifest, layout, "x") as stored:
    print("go", flush=True)
    for number in range(len(stored.pieces)):
        if stored.missing([number]):
            stored.write(number, [piece_bytes(index, stored, number)])
            stored.commit()
print("done", flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_what_is_right(tmp_path: Path) -> None:
    _, manifest, _ = source(LARGE)
    store = new_store(tmp_path)
    program = _WRITER.format(tests=str(TESTS), folder=str(tmp_path))
    counts = [0]
    randomness = random.Random(6)
    for _ in range(6):
        writer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert writer.stdout
        assert writer.stdout.readline() == b"go\n"
        time.sleep(randomness.random() * 0.05)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        with store.open(manifest.model_id) or pytest.fail() as stored:
            _verify(stored)
            counts.append(len(stored.present))
        assert counts[-1] >= counts[-2]  # it goes on where it was
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).stdout.endswith(b"done\n")
    with store.open(manifest.model_id) or pytest.fail() as stored:
        assert stored.present.is_full
        _verify(stored)


@pytest.mark.parametrize("where", ["quota", "tmpfs"])
def test_a_full_disk_is_named_and_lists_nothing_wrong(where: str, tmp_path: Path) -> None:
    index, manifest, layout = source(LARGE)
    total = sum(len(file.header) for file in layout.files) + (8 << 20)
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={total}", "x", folder]
    if where == "tmpfs" and (os.geteuid() != 0 or subprocess.run(mount).returncode):
        pytest.skip("mounting needs root")
    store = new_store(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with store.create(manifest, layout, "x") as stored:
            if where == "quota":
                numbers = [n for (layer, _), n in expert_numbers(stored.pieces).items() if layer == 0]
                ends = [p.offset + p.bytes for n in numbers for p in stored.pieces[n].parts(stored.index)]
                resource.setrlimit(resource.RLIMIT_FSIZE, (max(ends), hard))
            with pytest.raises(StoreFull, match=str(stored.folder)) as caught:
                for number in sorted(expert_numbers(stored.pieces).values()):
                    stored.write(number, [piece_bytes(index, stored, number)])
                    stored.commit()
            assert str(stored.pieces[-1].bytes) in str(caught.value)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert 0 < len(stored.present) < len(stored.pieces)
            _verify(stored)
        with store.open(manifest.model_id) or pytest.fail() as again:
            _verify(again)
            if where == "tmpfs":
                assert len(store.prune(0)) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
        if where == "tmpfs":
            subprocess.run(["umount", folder], check=True)


@given(st.sets(st.integers(0, 99)), st.integers(0, 99))
def test_bitmaps_come_back_as_they_were(numbers: set[int], probe: int) -> None:
    bitmap = PieceBitmap(100)
    bitmap.add(numbers)
    again = PieceBitmap.from_bytes(bitmap.to_bytes(), 100)
    assert again == bitmap
    assert set(again) == numbers and len(again) == len(numbers)
    assert (probe in again) == (probe in numbers)
    assert again.missing(range(100)) == sorted(set(range(100)) - numbers)
    assert PieceBitmap.full(100).is_full
    with pytest.raises(ModelError):
        PieceBitmap.from_bytes(bitmap.to_bytes(), 101)


@given(st.binary(max_size=200))
def test_nothing_from_the_network_is_a_layout_by_accident(data: bytes) -> None:
    for prefix in (b"", b"SWARMLAY1\n", b"SWARMLAY1\n\1\0\0\0"):
        try:
            layout = Layout.from_bytes(prefix + data)
        except ModelError:
            continue
        assert layout.to_bytes() == prefix + data
    for prefix in (b"", b"SWARMMAN1\n"):
        try:
            manifest = Manifest.from_bytes(prefix + data)
        except ModelError:
            continue
        assert manifest.to_bytes() == prefix + data
