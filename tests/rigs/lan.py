"""A LAN on one machine: network namespaces on a bridge, and agents in them. Needs root and iproute2."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

NODE_COMMAND = [str(Path(sys.executable).with_name("swarm-node"))]

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("curl") is None,
    reason="a LAN of network namespaces needs root, iproute2 and curl",
)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


@dataclass
class Host:
    """A machine of the LAN."""

    name: str
    namespace: str
    address: str
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def command(self, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def environment(self, extra: dict[str, str] | None = None) -> dict[str, str]:
        return {
            **os.environ,
            "SWARM_NODE_STATE_FOLDER": str(self.folder / "state"),
            "SWARM_NODE_NAME": self.name,
            "SWARM_EXPERTS_MEMORY_MIB": "500",
            # Three routers and servers on two cores: each with one thread.
            "SWARM_EXPERTS_THREADS": "1",
            **(extra or {}),
        }

    def start(
        self, *arguments: str, cwd: Path, env: dict[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Starts an agent, by what ``prefix`` runs; its output goes to the host's log."""
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                self.command(*prefix, *NODE_COMMAND, *arguments),
                cwd=cwd,
                env=self.environment(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    def run(self, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Runs `swarm-node` with arguments on this host and waits for its end."""
        return subprocess.run(
            self.command(*NODE_COMMAND, *arguments),
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def curl(self, path: str, *arguments: str, port: int = 4100, host: str = "127.0.0.1") -> tuple[int, str]:
        """Status and body of an HTTP request from this host."""
        done = subprocess.run(
            self.command("curl", "-sS", "-m", "20", "-w", "\n%{http_code}", *arguments, f"http://{host}:{port}{path}"),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        body, _, status = done.stdout.rpartition("\n")
        return int(status), body

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.curl("/status")[1]))

    def wait_ready(self, nodes: int, within_s: float = 30) -> dict[str, Any]:
        """Waits until the swarm of that many live nodes is ready; its status."""
        deadline_s = time.monotonic() + within_s
        status: dict[str, Any] = {}
        while time.monotonic() < deadline_s:
            try:
                status = self.status()
            except AssertionError:  # the agent does not listen yet
                time.sleep(0.2)
                continue
            if status["ready"] and sum(node["alive"] for node in status["nodes"]) == nodes:
                return status
            time.sleep(0.2)
        raise AssertionError(f"not ready within {within_s} s: {status}\n{self.log()[-3000:]}")

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def pids(self) -> list[int]:
        """All processes of this host's namespace."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]


class Lan:
    """Hosts 10.77.0.1, 10.77.0.2, … on one bridge, without any other network."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._id = f"swt{os.getpid() % 10000}"
        self._switch = f"{self._id}-switch"
        self.hosts: list[Host] = []
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge", "mcast_snooping", "0")
        _ip("-n", self._switch, "link", "set", "br0", "up")

    def add(self, name: str) -> Host:
        number = len(self.hosts) + 1
        namespace, port = f"{self._id}-{name}", f"port{number}"
        _ip("netns", "add", namespace)
        _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", namespace, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        _ip("-n", namespace, "route", "add", "default", "dev", "eth0")
        folder = self._folder / name
        folder.mkdir()
        host = Host(name, namespace, f"10.77.0.{number}", folder)
        self.hosts.append(host)
        return host

    def close(self) -> None:
        for host in self.hosts:
            for process in host.processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
            for process in host.processes:
                try:
                    process.wait(8)
                except subprocess.TimeoutExpired:
                    process.kill()
            _ip("netns", "delete", host.namespace)
        _ip("netns", "delete", self._switch)


@contextmanager
def lan(folder: Path, names: Sequence[str]) -> Iterator[list[Host]]:
    """Hosts of a new LAN; everything ends on leaving."""
    network = Lan(folder)
    try:
        yield [network.add(name) for name in names]
    finally:
        network.close()


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU time that processes have used."""
    total = 0.0
    for pid in pids:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total
