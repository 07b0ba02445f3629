"""Whole nodes with model files that are not the same: copies that differ in a byte never serve together."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node.models.hashing import local_manifest
from node.models.index import read_model
from rigs import model_files
from rigs.lan import Host, lan, needs_namespaces

pytestmark = needs_namespaces


def _wait(host: Host, done: Callable[[dict[str, Any]], bool], within_s: float = 40) -> dict[str, Any]:
    deadline_s = time.monotonic() + within_s
    status: dict[str, Any] = {}
    while time.monotonic() < deadline_s:
        try:
            status = host.status()
        except AssertionError:
            status = {}
        if status and done(status):
            return status
        time.sleep(0.2)
    raise AssertionError(f"{status}\n{host.log()[-3000:]}")


def _node(status: dict[str, Any], name: str) -> dict[str, Any]:
    return next((dict(node) for node in status["nodes"] if node["name"] == name), {})


def _last_column(screen: str) -> str:
    """The text of a table's last column, wherever its lines are broken."""
    return " ".join(line.split("│")[-2].strip() for line in screen.splitlines() if line.count("│") > 1)


def test_only_the_same_bytes_serve_together(tmp_path: Path) -> None:
    """a serves A. b has another quantisation of it, c one with another byte, d the same in four parts."""
    folders = {name: tmp_path / f"models of {name}" for name in "abcd"}
    for folder in folders.values():
        folder.mkdir()
    a = model_files.tiny_model(folders["a"] / "model.gguf")
    b = model_files.with_layer_in_q8_0(a, folders["b"] / "model.gguf", 3)
    c = model_files.with_other_byte(a, folders["c"] / "model.gguf", 3, 5)
    model_files.split_copy(a, folders["d"], 4)
    ids = {path: local_manifest(read_model(path), folder=tmp_path).model_id for path in (a, b, c)}
    with lan(tmp_path, list("abcd")) as hosts:
        # Each with a folder of its own for what it keeps, and no other models. And one thread: those of a pool wait for
        # each other, which on a busy machine has made a load of these few experts take 50 s.
        own = {
            host.name: {
                "HOME": str(host.folder),
                "SWARM_CACHE_DIR": str(host.folder / "cache"),
                "XDG_CACHE_HOME": "",
                "SWARM_EXPERTS_THREADS": "1",
            }
            for host in hosts
        }
        hosts[0].start("--model", str(a), cwd=folders["a"], env=own["a"])
        for host in hosts[1:]:
            host.start(cwd=folders[host.name], env=own[host.name])

        def told(status: dict[str, Any]) -> bool:
            return bool(_node(status, "d").get("ready") and all(_node(status, n).get("problem") for n in "bc"))

        status = _wait(hosts[0], told)
        assert status["model"]["id"] == ids[a]
        for name in "bc":
            assert _node(status, name)["ready"] == []
        problem = _node(status, "c")["problem"]
        assert ids[a] in problem and ids[c] in problem and "other bytes" in problem
        problem = _node(status, "b")["problem"]
        assert read_model(a).header_digest[:32] in problem and read_model(b).header_digest[:32] in problem
        shown = hosts[3].run("status").stdout
        assert ids[a] in shown and "other bytes" in _last_column(shown)

        # With a copy of A's file in its place, c takes its part, without being started again.
        shutil.copy(a, c.with_name("copy"))
        c.with_name("copy").replace(c)
        _wait(hosts[0], lambda status: bool(_node(status, "c")["ready"]))

        # A node that is told to serve B does not take part in A, and everybody sees which model it has.
        hosts[1].processes[0].terminate()
        hosts[1].processes[0].wait()
        hosts[1].start("--model", str(b), cwd=folders["b"], env=own["b"])
        status = _wait(hosts[0], lambda status: _node(status, "b").get("model") is not None)
        assert _node(status, "b")["model"] == {"id": ids[b], "file": "model.gguf"}
        assert _node(status, "b")["ready"] == []
        assert "has another model" in _last_column(hosts[2].run("status").stdout)
