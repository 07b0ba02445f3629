"""Identity: the same id for ever, a counter that only rises, one agent per state folder, damage survived."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.errors import IdentityError
from node.peers.identity import Identity, hold_identity, state_root
from rigs import ROOT

FILES = ("identity.json", "identity.backup.json")


def start(root: Path, name: str = "alpha") -> Identity:
    """Starts a node and ends it."""
    with hold_identity(root, name) as identity:
        return identity


def test_one_id_and_a_rising_counter(tmp_path: Path) -> None:
    starts = [start(tmp_path / "a/b") for _ in range(4)]
    assert [one.boot for one in starts] == [1, 2, 3, 4]
    assert len({one.node_id for one in starts}) == 1 and len(starts[0].node_id) == 16
    assert all(one.warnings == () and one.term == 0 for one in starts)
    assert starts[0].folder == tmp_path / "a/b/alpha"
    assert sorted(path.name for path in starts[0].folder.iterdir()) == sorted([*FILES, "lock"])
    other = start(tmp_path / "a/b", "beta")
    assert other.node_id != starts[0].node_id and other.boot == 1


def test_others_may_not_read_it(tmp_path: Path) -> None:
    folder = start(tmp_path).folder
    assert [path.stat().st_mode & 0o077 for path in (folder, *folder.iterdir())] == [0] * 4


def test_the_term_is_kept_and_only_rises(tmp_path: Path) -> None:
    with hold_identity(tmp_path, "alpha") as identity:
        identity.save_term(7)
        identity.save_term(7)
        with pytest.raises(ValueError, match="term 6 after 7"):
            identity.save_term(6)
        assert identity.term == 7
    again = start(tmp_path)
    assert (again.term, again.boot, again.node_id) == (7, 2, identity.node_id)


def test_a_second_agent_is_told_what_to_do(tmp_path: Path) -> None:
    with hold_identity(tmp_path, "alpha") as identity:
        with pytest.raises(IdentityError) as caught, hold_identity(tmp_path, "alpha"):
            pass
        assert str(caught.value) == (
            f"a node named alpha runs on this machine already (process {os.getpid()}), with the state folder "
            f"{identity.folder}. A second node needs a name of its own: --name alpha-2"
        )
        assert start(tmp_path, "alpha-2").boot == 1
    # The refused start was none.
    assert start(tmp_path).boot == 2


def test_the_lock_ends_with_its_process_and_not_with_its_children(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\nfrom pathlib import Path\nfrom node.peers.identity import hold_identity\n"
        "with hold_identity(Path(sys.argv[1]), 'alpha'):\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], close_fds=False)\n"
        "    print(child.pid, flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        with pytest.raises(IdentityError, match=f"process {process.pid}"):
            start(tmp_path)
        process.kill()
        process.wait()
        assert start(tmp_path).boot == 2
    finally:
        os.kill(child, signal.SIGKILL)
        process.kill()
        process.wait()
        process.stdout.close()


DAMAGE = st.one_of(
    st.binary(max_size=64),
    st.integers(0, 110).map(lambda length: length),
    st.tuples(st.integers(0, 110), st.integers(0, 7)),
    st.just(None),
)


def damage(path: Path, how: object) -> None:
    data = path.read_bytes()
    if how is None:
        path.unlink()
    elif isinstance(how, bytes):
        path.write_bytes(how)
    elif isinstance(how, int):
        path.write_bytes(data[:how])
    elif isinstance(how, tuple):
        place, bit = how
        place %= len(data)
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(which=st.integers(0, 1), how=DAMAGE)
def test_one_damaged_file_costs_nothing(tmp_path: Path, which: int, how: object) -> None:
    before = start(tmp_path)
    damage(before.folder / FILES[which], how)
    try:
        after = start(tmp_path)
    except IdentityError as error:  # the flipped bit made the version a higher one
        assert "a newer swarm-node" in str(error)
        (before.folder / FILES[which]).unlink()
        return
    assert (after.node_id, after.boot) == (before.node_id, before.boot + 1)
    assert start(tmp_path).warnings == ()


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"[" * 4000, b"\xff" * 5000, b'{"version": 1}', b'{"version": 9e9}']
)
def test_both_damaged_make_a_new_id_and_a_warning(data: bytes, tmp_path: Path) -> None:
    with hold_identity(tmp_path, "alpha") as before:
        before.save_term(5)
    for file in FILES:
        (before.folder / file).write_bytes(data)
    earliest = int(time.time())
    after = start(tmp_path)
    assert after.node_id != before.node_id
    assert earliest <= after.boot == after.term <= time.time()
    (warning,) = after.warnings
    assert after.node_id in warning and all(str(after.folder / file) in warning for file in FILES)
    again = start(tmp_path)
    assert (again.node_id, again.boot, again.warnings) == (after.node_id, after.boot + 1, ())


def test_one_damaged_and_one_gone_is_no_first_start(tmp_path: Path) -> None:
    before = start(tmp_path)
    (before.folder / FILES[0]).unlink()
    (before.folder / FILES[1]).write_bytes(b"")
    after = start(tmp_path)
    assert after.boot > 1_000_000 and len(after.warnings) == 1


def test_a_crash_between_the_two_files(tmp_path: Path) -> None:
    folder = start(tmp_path).folder
    older = (folder / FILES[1]).read_bytes()
    start(tmp_path)
    (folder / FILES[1]).write_bytes(older)
    (folder / "identity.json.new").write_bytes(b"half")
    after = start(tmp_path)
    assert (after.boot, after.warnings) == (3, ())
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "lock"])


@pytest.mark.parametrize("change", [{"node_id": "0123456789abcdef"}, {"boot": 9}, {"term": 9}, {"boot": 1 << 63}])
def test_edited_by_hand(change: dict[str, object], tmp_path: Path) -> None:
    before = start(tmp_path)
    path = before.folder / FILES[0]
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    after = start(tmp_path)
    assert (after.node_id, after.boot) == (before.node_id, 2)
    assert after.warnings == (f"{path} was damaged and is repaired from its copy",)


def test_a_newer_programs_identity_is_left_alone(tmp_path: Path) -> None:
    path = start(tmp_path).folder / FILES[0]
    newer = json.dumps({"version": 2, "uuid": "…"})
    path.write_text(newer)
    with pytest.raises(IdentityError, match=r"identity\.json: a newer swarm-node wrote it"):
        start(tmp_path)
    assert path.read_text() == newer


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(IdentityError, match=r"cannot be used: .*--node-state-folder"):
        start(tmp_path / "file")
    folder = start(tmp_path).folder
    (folder / FILES[0]).unlink()
    (folder / FILES[0]).mkdir()
    with pytest.raises(IdentityError, match=r"cannot be read: .*--node-state-folder"):
        start(tmp_path)
    (folder / FILES[0]).rmdir()
    (folder / "identity.json.new").mkdir()
    with pytest.raises(IdentityError, match="cannot be written"):
        start(tmp_path)


def test_state_root() -> None:
    home = {"HOME": "/home/u"}
    assert state_root("", home, system="linux") == Path("/home/u/.local/state/swarm-node")
    assert state_root("", home, system="darwin") == Path("/home/u/Library/Application Support/swarm-node")
    for system in ("linux", "darwin"):
        assert state_root("", {**home, "XDG_STATE_HOME": "/s"}, system=system) == Path("/s/swarm-node")
        assert state_root("/x", {**home, "XDG_STATE_HOME": "/s"}, system=system) == Path("/x")
    assert state_root("", {}).is_absolute()
