"""`swarm-node doctor` on a machine that is all right, and on ones that are not."""

from __future__ import annotations

import argparse
import json
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

import kernels
from node import memory_limit
from node.commands import doctor_machine, doctor_network
from node.commands import main as cli
from node.commands.doctor import examine
from node.commands.doctor_check import Check
from node.commands.doctor_machine import ffn_errors
from node.commands.doctor_network import multicast_problem
from node.memory_limit import MemoryLimit
from node.models.random_blocks import BLOCK_TYPES
from rigs.lan import lan, needs_namespaces

NAMES = [
    "build",
    "devices",
    "test FFN",
    "CPU",
    "memory",
    "settings",
    "state folder",
    "agent port",
    "expert port",
    "addresses",
    "multicast",
    "firewall",
    "peers",
]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of a node on loopback, with ports that are free."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name, value in {
        "NODE_NAME": "here",
        "NODE_HOST": "loopback",
        "NODE_PORT": str(free_port()),
        "NODE_EXPERT_PORT": str(free_port()),
        "NODE_STATE_FOLDER": str(tmp_path / "state"),
        "EXPERTS_MEMORY_MIB": "100",
        "EXPERTS_THREADS": "1",
        "SWARM_NAME": "doctors",
    }.items():
        monkeypatch.setenv(f"SWARM_{name}", value)


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    status = cli.main(["doctor", "--json", *arguments])
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] == (status == 0)
    assert [check["name"] for check in document["checks"]] == NAMES
    for check in document["checks"]:
        assert set(check) == {"name", "state", "found", "advice"}
        assert check["state"] in ("ok", "warning", "failed")
        assert check["found"]
        assert "\n" not in check["found"] + check["advice"]
    return status, {check["name"]: check for check in document["checks"]}


async def one(name: str) -> Check:
    return next(check for check in await examine(argparse.Namespace()) if check.name == name)


def test_all_right(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, checks = doctor(capsys)
    assert status == 0, checks
    assert kernels.build_id() in checks["build"]["found"]
    assert "libswarm-ggml-base" in checks["build"]["found"]
    assert f"auto is {kernels.choose_device()}" in checks["devices"]["found"]
    assert f"{len(BLOCK_TYPES)} types of weights" in checks["test FFN"]["found"]
    assert "(F32)" in checks["test FFN"]["found"]
    assert "experts 1" in checks["CPU"]["found"]
    assert "0.1 GiB" in checks["memory"]["found"]
    assert "'here' of swarm 'doctors'" in checks["settings"]["found"]
    # It looked, and made nothing.
    assert not (tmp_path / "state").exists()
    assert list(tmp_path.iterdir()) == []


def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--experts-device", "[/red]7"]) == 1
    shown = capsys.readouterr().out
    assert "[/red]7" in "".join(shown.split("│")).replace(" ", "").replace("\n", "")
    assert "3 failed" in shown


def test_settings_of_run_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    _, checks = doctor(capsys, "--name", "other", "--port", "0")
    assert "'other'" in checks["settings"]["found"]
    assert "any free one" in checks["agent port"]["found"]


def test_wrong_settings_do_not_keep_the_others_from_running(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_network, "FIND_S", 0.1)
    (tmp_path / "swarm.toml").write_text("[node]\nprot = 4100\n")
    status, checks = doctor(capsys)
    assert status == 1
    assert checks["settings"]["state"] == "failed"
    assert "prot" in checks["settings"]["found"]
    assert checks["test FFN"]["state"] == "ok"


def test_a_check_that_raises_is_a_finding(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[kernels.Device]:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(kernels, "devices", broken)
    status, checks = doctor(capsys)
    assert status == 1
    assert checks["devices"]["state"] == "failed"
    assert "RuntimeError: the driver is gone" in checks["devices"]["found"]
    assert checks["test FFN"]["state"] == checks["agent port"]["state"] == "ok"


def test_compiled_backends_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """What was asked for at the build, to be seen without a GPU."""
    backends = doctor_machine.compiled_backends()
    assert "cpu" in backends
    assert not {"base", "rpc", ""} & set(backends)
    assert f"backends {', '.join(backends)}" in doctor(capsys)[1]["build"]["found"]


def test_a_backend_without_a_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Built for a GPU, and the CPU would compute in its place without a word."""
    cpus = [device for device in kernels.devices() if device.type == "cpu"]
    monkeypatch.setattr(kernels, "devices", lambda: cpus)
    monkeypatch.setattr(doctor_machine, "compiled_backends", lambda: ["cpu", "cuda"])
    devices = doctor(capsys)[1]["devices"]
    assert devices["state"] == "warning"
    assert "This build has cuda, which found no device" in devices["found"]
    monkeypatch.setattr(doctor_machine, "compiled_backends", lambda: ["blas", "cpu"])
    assert doctor(capsys)[1]["devices"]["state"] == "ok"


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    status, checks = doctor(capsys, "--device", "CUDA7")
    assert status == 1
    for name in ("devices", "test FFN"):
        assert checks[name]["state"] == "failed"
        assert "CUDA7" in checks[name]["found"]


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("kill -ABRT $$", "status -6"),
        ("echo oh dear >&2; exit 3", "status 3: oh dear"),
        ("kill -ILL $$", "ended by SIGILL"),
        (
            """echo '{"device": "X", "errors": {"f32": 0.5}, "wrong": {"f32": "a row differs"}, "unable": ["q8_0"]}'""",
            "wrong numbers on X, 1 types of weights off the reference by 5.0e-01 (F32) to 5.0e-01 (F32); "
            "it cannot compute Q8_0. F32: a row differs",
        ),
        (
            """echo '{"device": "X", "errors": {}, "wrong": {}, "unable": ["f32"]}'""",
            "on X, 0 types of weights; it cannot compute F32",
        ),
        ("exec sleep 30", "no result"),
    ],
)
async def test_a_device_that_fails(script: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(doctor_machine, "PYTHON_MODULE", (str(python), "-m"))
    monkeypatch.setattr(doctor_machine, "_FFN_TIMEOUT_S", 1.0)
    check = await one("test FFN")
    assert check.state == "failed"
    assert found in check.found
    assert check.advice


def test_wrong_tensors_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every type: gate and up in each other's place."""
    right = ffn_errors("auto")
    assert set(right["errors"]) == set(BLOCK_TYPES) and right["wrong"] == {} and right["unable"] == []
    swapped = doctor_machine.SWIGLU_PROGRAM.replace("%1 %0", "%0 %1")
    program = kernels.Program
    monkeypatch.setattr(kernels, "Program", lambda text: program(swapped))
    assert set(ffn_errors("auto")["wrong"]) == set(BLOCK_TYPES)


def test_a_type_that_is_computed_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store(kernels.ExpertStore):
        def load(self, layer: int, program: Any, first: int, last: int, n: int, tensors: Any) -> Any:
            if self.kind == "q3_K":
                raise kernels.LoadError("device CPU cannot compute MUL_MAT_ID on q3_K")
            return super().load(layer, program, first, last, n, tensors)

        def ffn(self, *arguments: Any) -> Any:
            return super().ffn(*arguments) * np.float32(1.1 if self.kind == "iq4_nl" else 1)

    kinds: list[str] = []
    parts = kernels.TensorParts

    def noted(kind: str, ne: Any, places: Any) -> Any:
        kinds.append(kind)
        return parts(kind, ne, places)

    monkeypatch.setattr(Store, "kind", property(lambda self: kinds[-1]), raising=False)
    monkeypatch.setattr(kernels, "TensorParts", noted)
    monkeypatch.setattr(kernels, "ExpertStore", Store)
    found = ffn_errors("auto")
    assert found["unable"] == ["q3_K"] and list(found["wrong"]) == ["iq4_nl"]
    check = doctor_machine.ffn_check(found, "do something")
    assert (
        check.state == "failed" and "it cannot compute Q3_K. IQ4_NL: " in check.found and check.advice == "do something"
    )


def test_a_state_folder_that_cannot_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file in its place")
    status, checks = doctor(capsys)
    assert status == 1
    assert checks["state folder"]["state"] == "failed"
    assert "state" in checks["state folder"]["advice"]


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("SWARM_NODE_PORT", str(server.getsockname()[1]))
        yield server


async def test_a_port_of_another_program(listening: socket.socket) -> None:
    check = await one("agent port")  # which never answers
    assert check.state == "failed"
    assert "another program" in check.found
    assert "--port" in check.advice


@pytest.mark.parametrize(
    ("document", "state", "found"),
    [
        ({"name": "here"}, "ok", "this machine's node"),
        ({"name": "there"}, "failed", "another node, 'there'"),
        ({}, "failed", "another program"),
        (["name"], "failed", "another program"),
    ],
)
async def test_a_port_that_answers(listening: socket.socket, document: Any, state: str, found: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(document if request.path == "/status" else {"status": "ok"})

    app = web.Application()
    app.add_routes([web.get("/health", answer), web.get("/status", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.SockSite(runner, listening).start()
        check = await one("agent port")
    finally:
        await runner.cleanup()
    assert check.state == state
    assert found in check.found


async def test_an_address_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_NODE_HOST", "203.0.113.7")
    monkeypatch.setattr(doctor_network, "FIND_S", 0.1)
    check = await one("expert port")
    assert check.state == "failed"
    assert "203.0.113.7" in check.found
    assert "address of this machine" in check.advice


async def test_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_NODE_HOST", "lan")
    monkeypatch.setenv("SWARM_SWARM_INTERFACES", "nothing7")
    monkeypatch.setattr(doctor_network, "FIND_S", 0.1)
    check = await one("addresses")
    assert check.state == "failed"
    assert "announced: none" in check.found
    assert "127.0.0.1" in check.found.partition("left out: ")[2]


async def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_EXPERTS_THREADS", "500")
    check = await one("CPU")
    assert check.state == "warning"
    assert "experts 500" in check.found


@pytest.mark.parametrize(("free_mib", "state"), [(700, "ok"), (50, "warning")])
async def test_the_memory_of_a_container(free_mib: int, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_EXPERTS_DEVICE", "CPU")
    limit = MemoryLimit(Path("/sys/fs/cgroup/memory.max"), 1 << 30, free_mib << 20)
    monkeypatch.setattr(memory_limit, "memory_limit", lambda root: limit)
    monkeypatch.setattr(doctor_machine, "memory_limit", lambda: limit)
    check = await one("memory")
    assert check.state == state
    assert "the control group's limit of 1.0 GiB (/sys/fs/cgroup/memory.max)" in check.found
    assert ("memory_mib to at most 45" in check.advice) == (state == "warning")
    # By default no more is offered than the limit leaves.
    monkeypatch.setenv("SWARM_EXPERTS_MEMORY_MIB", "0")
    check = await one("memory")
    assert f"{0.9 * free_mib / 1024:.1f} GiB of CPU are offered" in check.found


async def test_a_limit_above_what_the_machine_has_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_EXPERTS_DEVICE", "CPU")
    limit = MemoryLimit(Path("/sys/fs/cgroup/memory.max"), 1 << 50, 1 << 50)
    monkeypatch.setattr(doctor_machine, "memory_limit", lambda: limit)
    check = await one("memory")
    assert check.state == "ok"
    assert "limit" not in check.found


async def test_a_firewall_that_is_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for tool in ("ufw", "nft"):
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SWARM_NODE_HOST", "127.0.0.1")
    monkeypatch.setenv("SWARM_NODE_PORT", "4100")
    monkeypatch.setenv("SWARM_NODE_EXPERT_PORT", "4101")
    monkeypatch.setattr(doctor_network, "FIND_S", 0.1)
    check = await one("firewall")
    assert "ufw" in check.found
    assert "nft" in check.found
    assert "TCP 4100 and 4101, UDP 5353" in check.advice
    conf = tmp_path / "ufw.conf"
    for text, enabled in (("# ufw\nENABLED=yes\n", True), ("ENABLED=no\n", False)):
        conf.write_text(text)
        assert doctor_network._ufw_enabled(conf) == enabled
    monkeypatch.setattr(doctor_network, "_ufw_enabled", lambda: True)
    check = await one("firewall")
    assert check.state == "warning"
    assert "sudo ufw allow 4100/tcp; sudo ufw allow 4101/tcp; sudo ufw allow 5353/udp" in check.advice


async def test_a_seed_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("SWARM_SWARM_SEEDS", seed)
    check = await one("peers")
    assert check.state == "warning"
    assert f"without answer: http://{seed}" in check.found


def test_multicast_on_an_address_that_is_not_here() -> None:
    assert (multicast_problem("203.0.113.7") or "").startswith("multicast fails")


@pytest.mark.slow
@needs_namespaces
def test_on_a_lan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NODE_HOST", "NODE_PORT", "NODE_EXPERT_PORT"):
        monkeypatch.delenv(f"SWARM_{name}")
    with lan(tmp_path, ["one", "two"]) as (one_, two):
        one_.start(cwd=one_.folder)
        deadline_s = time.monotonic() + 20
        while "answers at" not in one_.log():
            assert time.monotonic() < deadline_s, one_.log()
            time.sleep(0.1)
        for host, port in ((one_, "used by this machine's node"), (two, "4100 is free")):
            done = host.run("doctor", "--json")
            checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
            assert done.returncode == 0, done.stdout
            assert port in checks["agent port"]["found"]
            assert f"announced: {host.address} (eth0)" in checks["addresses"]["found"]
            assert checks["multicast"]["state"] == "ok", checks
            assert ("http://10.77.0.1:4100" in checks["peers"]["found"]) == (host is two)
        # The other commands find a node as the doctor does.
        done = two.run("status", "--json")
        assert done.returncode == 3, done.stderr
        assert json.loads(done.stdout)["name"] == "one"
