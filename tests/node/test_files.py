"""Files that are there whole or not at all, whatever happens to who writes them."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from node import files
from node.files import locked, new_file, punch_hole, replace_file, sync
from rigs import ROOT

#: Names as they come from a file system that does not care for UTF-8: Latin-1, control characters, much too long.
NAMES = [os.fsdecode(b"m\xf6del.gguf"), "mödel.gguf", "a\nb.gguf", ".hidden", "ä" * 120 + ".gguf"]


def write_new(path: Path, data: bytes) -> None:
    with new_file(path) as file:
        file.write(data)


WRITERS = [write_new, replace_file]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_file_takes_the_place_of_the_one_before(write, name: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for data in (b"first", b"second, longer"):
        write(tmp_path / name, data)
        assert (tmp_path / name).read_bytes() == data
        assert names(tmp_path) == [name]


def test_nothing_is_left_of_a_file_whose_body_raises(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"old")
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), new_file(path) as file:
            file.write(b"half of it")
            file.flush()
            assert len(names(tmp_path)) == 2
            raise error
        assert path.read_bytes() == b"old" and names(tmp_path) == ["model.gguf"]


@pytest.mark.parametrize("write", WRITERS)
def test_nothing_is_left_where_the_disk_refuses(
    write,  # type: ignore[no-untyped-def]
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    (tmp_path / "list").write_bytes(b"old")
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "list", b"new")
    assert (tmp_path / "list").read_bytes() == b"old" and names(tmp_path) == ["list"]


@pytest.mark.parametrize("write", WRITERS)
def test_a_folder_that_is_not_there_is_an_error(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "none" / "list", b"new")


@pytest.mark.parametrize("write", WRITERS)
def test_the_bytes_are_on_the_disk_before_the_name_and_the_name_before_it_returns(
    write,  # type: ignore[no-untyped-def]
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        done.append("folder" if is_folder else f"{os.fstat(descriptor).st_size} bytes")
        fsync(descriptor)

    def replaced(self: Path, target: Path) -> Path:
        done.append("name")
        return replace(self, target)

    monkeypatch.setattr(files.os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    write(tmp_path / "list", b"12345")
    assert done == ["5 bytes", "name", "folder"]


@pytest.mark.parametrize("writer", ["new_file", "replace_file"])
def test_a_process_that_is_killed_leaves_the_old_file_or_the_new_one(writer: str, tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from node import files
path, old, new = Path(sys.argv[1]), b"old" * 100_000, b"new" * 100_000
while True:
    for data in (old, new):
        if {writer!r} == "replace_file":
            files.replace_file(path, data)
        else:
            with files.new_file(path) as file:
                file.write(data)
        print("written", flush=True)
"""
    path = tmp_path / "list"
    for round_ in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", code, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for _ in range(1 + round_):
                assert process.stdout.readline() == "written\n"
            process.send_signal(signal.SIGKILL)
        assert path.read_bytes() in (b"old" * 100_000, b"new" * 100_000)
    replace_file(path, b"after all that")
    assert path.read_bytes() == b"after all that" and not (tmp_path / "list.new").exists()


def test_permissions(tmp_path: Path) -> None:
    write_new(tmp_path / "model", b"for everybody")
    replace_file(tmp_path / "identity", b"for the user", mode=0o600)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("model", "identity")] == [0o644, 0o600]


def test_writers_at_once_each_put_a_whole_file_in_place(tmp_path: Path) -> None:
    path = tmp_path / "model"
    data = [bytes([number]) * 200_000 for number in range(4)]
    threads = [threading.Thread(target=lambda one=one: [write_new(path, one) for _ in range(5)]) for one in data]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in data and names(tmp_path) == ["model"]


def test_a_lock_keeps_others_waiting(tmp_path: Path) -> None:
    inside: list[int] = []

    def work() -> None:
        for _ in range(50):
            with locked(tmp_path / "lock"):
                inside.append(1)
                assert len(inside) == 1
                inside.pop()

    failed: list[object] = []

    def try_work() -> None:
        try:
            work()
        except AssertionError as error:
            failed.append(error)

    threads = [threading.Thread(target=try_work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == [] and stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o600


def test_a_hole_takes_no_room_and_reads_as_zeros(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"x" * (1 << 20))
    sync(path)
    descriptor = os.open(path, os.O_RDWR)
    before = path.stat().st_blocks
    try:
        punch_hole(descriptor, 0, 1 << 19)
    except OSError as error:
        pytest.skip(f"no holes here: {error}")
    finally:
        os.close(descriptor)
    assert path.stat().st_blocks <= before // 2 and path.stat().st_size == 1 << 20
    assert path.read_bytes() == bytes(1 << 19) + b"x" * (1 << 19)
