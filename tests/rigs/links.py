"""Links between network namespaces that a test takes down, moves and cuts. Needs root and iproute2."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2"
)
_PROGRAM = str(Path(__file__).with_name("run_discovery.py"))
_numbers = itertools.count()


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


class Process:
    """run_discovery.py in a namespace; what it says is read from a file."""

    def __init__(self, namespace: str, log: Path, arguments: tuple[str, ...]) -> None:
        self._log = log
        with log.open("wb") as out, log.with_suffix(".stderr").open("wb") as errors:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", namespace, sys.executable, _PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
            )

    def said(self, key: str) -> list[Any]:
        """The values of all events that have this key, in order."""
        lines = self._log.read_text().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event[key] for event in events if key in event]

    def logged(self, level: str) -> list[str]:
        lines = [json.loads(line) for line in self._log.read_text().splitlines()]
        return [line["text"] for line in lines if line.get("log") == level]

    def errors(self) -> str:
        return self._log.with_suffix(".stderr").read_text()

    def wait(self, key: str, test: Callable[[Any], bool] = bool, within_s: float = 15) -> Any:
        """The first value of the key that passes the test."""
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            for value in self.said(key):
                if test(value):
                    return value
            assert self._process.poll() is None or key in self._log.read_text(), self.errors()
            time.sleep(0.05)
        raise AssertionError(f"no such {key} within {within_s} s:\n{self._log.read_text()[-4000:]}\n{self.errors()}")

    def wait_found(self, *hosts: str, node_id: str | None = None, within_s: float = 15) -> dict[str, Any]:
        """Waits until exactly these hosts are what was found last of the node."""

        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            found = [found for found in self.said("found") if node_id in (None, found["id"])]
            if found and found[-1]["hosts"] == list(hosts):
                return dict(found[-1])
            time.sleep(0.05)
        raise AssertionError(f"not {hosts} within {within_s} s:\n{self._log.read_text()[-4000:]}\n{self.errors()}")

    def kill(self) -> None:
        """Kills the process, as a crash would: without goodbye. Without effect on one that has ended."""
        self._process.kill()
        self._process.wait(5)

    def ask_to_end(self) -> None:
        """Ends the process by SIGTERM."""
        self._process.send_signal(signal.SIGTERM)

    def end(self, within_s: float = 15) -> int:
        """The exit status of the process, once it has ended."""
        return self._process.wait(within_s)


@dataclass
class Machine:
    """A namespace with an interface eth0 to the switch, down at first."""

    namespace: str
    port: str
    switch: str
    folder: Path
    processes: list[Process] = field(default_factory=list)

    def ip(self, *arguments: str) -> None:
        ip("-n", self.namespace, *arguments)

    def up(self, *addresses: str) -> None:
        """Gives eth0 addresses and takes it up; only link-local IPv6 if there are none."""
        self.ip("link", "set", "eth0", "up")
        for address in addresses:
            self.ip("addr", "add", address, "dev", "eth0", *(["nodad"] if ":" in address else []))

    def cable_to(self, other: Machine, interface: str) -> None:
        """Makes a link of two, up, with the interface's name on both sides."""
        side = ("name", interface, "netns")
        ip("link", "add", *side, self.namespace, "type", "veth", "peer", *side, other.namespace)
        for machine in (self, other):
            machine.ip("link", "set", interface, "up")

    def unplug(self) -> None:
        """Cuts the host off from the others; its link stays up."""
        ip("-n", self.switch, "link", "set", self.port, "nomaster")

    def plug_in(self) -> None:
        ip("-n", self.switch, "link", "set", self.port, "master", "br0")

    def start(self, *arguments: str) -> Process:
        log = self.folder / f"{self.namespace}-{len(self.processes)}"
        process = Process(self.namespace, log, arguments)
        self.processes.append(process)
        return process

    def node(self, number: int, **fields: Any) -> Process:
        """A node with the id 000…number, on port 4100 + number."""
        return self.start("node", json.dumps({"node_id": f"{number:016x}", "port": 4100 + number, **fields}))


@contextmanager
def links(folder: Path, count: int) -> Iterator[list[Machine]]:
    """Makes that many machines on one switch; all of it is gone on leaving."""
    label = f"swd{os.getpid() % 100000}x{next(_numbers)}"
    switch = f"{label}-switch"
    machines: list[Machine] = []
    ip("netns", "add", switch)
    try:
        ip("-n", switch, "link", "add", "br0", "type", "bridge", "mcast_snooping", "0")
        ip("-n", switch, "link", "set", "br0", "up")
        for number in range(count):
            namespace, port = f"{label}-{number}", f"port{number}"
            ip("netns", "add", namespace)
            machines.append(Machine(namespace, port, switch, folder))
            ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            ip("-n", switch, "link", "set", port, "master", "br0", "up")
            ip("-n", namespace, "link", "set", "lo", "up")
        yield machines
    finally:
        for machine in machines:
            for process in machine.processes:
                process.kill()
            ip("netns", "delete", machine.namespace)
        ip("netns", "delete", switch)
