"""Machines with several interfaces, links that come, go and move, and light agents on them. Needs root and iproute2."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rigs.lan import Host

T = TypeVar("T")

PACKETS_PROGRAM = str(Path(__file__).with_name("run_packets.py"))
# The host name is of the process alone: the machine that runs the tests keeps its own.
_WITH_HOST_NAME = "import os, socket, sys; socket.sethostname(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"
# A process that was started again has its boot in the upper bits of its incarnation.
_INCARNATIONS_PER_BOOT = 1 << 20
_numbers = itertools.count()


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


def eventually(what: str, look: Callable[[], T], within_s: float) -> T:
    """The first true value that ``look`` gives. A failed assertion, as of an agent that is not up yet, is none."""
    deadline_s = time.monotonic() + within_s
    last: object = None
    while time.monotonic() < deadline_s:
        try:
            value = look()
            if value:
                return value
            last = value
        except AssertionError as error:
            last = error
        time.sleep(0.1)
    raise AssertionError(f"not within {within_s} s: {what}; last: {last}")


@dataclass
class Machine(Host):
    """A host whose interfaces a test changes. ``agent_port`` is its agent's; several may be in one namespace."""

    switch: str = ""
    switch_port: str = ""
    agent_port: int = 4100

    def ip(self, *arguments: str) -> None:
        ip("-n", self.namespace, *arguments)

    def dummy(self, interface: str, address: str) -> None:
        """Makes an interface that is up, and has nobody at its other end."""
        end = f"end{next(_numbers)}"
        ip("-n", self.switch, "link", "add", end, "type", "veth", "peer", "name", interface, "netns", self.namespace)
        ip("-n", self.switch, "link", "set", end, "up")
        self.ip("addr", "add", address, "dev", interface)
        self.ip("link", "set", interface, "up")

    def cable_to(self, other: Machine, interface: str, own_address: str, other_address: str) -> None:
        """Makes a link of two, up, with the interface's name on both sides."""
        side = ("name", interface, "netns")
        ip("link", "add", *side, self.namespace, "type", "veth", "peer", *side, other.namespace)
        for machine, address in ((self, own_address), (other, other_address)):
            machine.ip("addr", "add", address, "dev", interface)
            machine.ip("link", "set", interface, "up")

    def start_light(
        self, *arguments: str, env: dict[str, str] | None = None, host_name: str | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts an agent without experts in an empty folder, logging everything. ``host_name`` stands for a name."""
        empty = self.folder / "empty"
        empty.mkdir(exist_ok=True)
        named = {} if host_name is None else {"SWARM_NODE_NAME": ""}
        prefix = [] if host_name is None else ["unshare", "--uts", sys.executable, "-c", _WITH_HOST_NAME, host_name]
        light = {
            "SWARM_EXPERTS_ENABLED": "false",
            "SWARM_NODE_PORT": str(self.agent_port),
            "SWARM_LOG_LEVEL": "debug",
        }
        return self.start(*arguments, cwd=empty, env={**light, **named, **(env or {})}, prefix=prefix)

    def peers(self) -> dict[str, Any]:
        """What the agent says of the others."""
        status, body = self.curl("/peers", port=self.agent_port)
        assert status == 200, body
        return dict(json.loads(body))

    def peer(self, name: str) -> dict[str, Any]:
        """What the agent says of one other; an AssertionError if that is not exactly one."""
        found = [peer for peer in self.peers()["peers"] if peer["name"] == name]
        assert len(found) == 1, (name, found)
        return dict(found[0])

    def used_host(self, name: str) -> str:
        """The address at which the agent speaks to another, "" while it thinks it is not alive."""
        peer = self.peer(name)
        return str(peer["address"] or "").rpartition(":")[0] if peer["status"] == "alive" else ""


def suspected(log: str) -> set[str]:
    """The names of those whom an agent suspected, by its log: of everything, or there is nothing of this in it."""
    lines = [line.split() for line in log.splitlines()]
    return {line[2].rstrip(":") for line in lines if len(line) > 3 and line[3] == "suspected"}


def thought_dead(log: str) -> set[str]:
    """The names of those whom an agent thought dead, by its log."""
    lines = [line.split() for line in log.splitlines()]
    return {line[2] for line in lines if line[3:7] == ["does", "not", "answer", "any"]}


def accused(log: str) -> set[str]:
    """The names of those whom an agent suspected or thought dead, by its log."""
    return suspected(log) | thought_dead(log)


def boot(peer: dict[str, Any]) -> int:
    """The boot in which a peer is, as another sees it."""
    return int(peer["incarnation"]) // _INCARNATIONS_PER_BOOT


def is_up(machine: Machine) -> bool:
    """Whether its agent answers."""
    return machine.curl("/health", port=machine.agent_port)[0] == 200


def thinks_dead(machine: Machine, name: str) -> bool:
    """Whether an agent thinks that another is dead."""
    return bool(machine.peer(name)["status"] == "dead")


def sees(machine: Machine, names: Sequence[str]) -> bool:
    """Whether these are the others that an agent knows, each once, all alive, with records and addresses."""
    peers = machine.peers()["peers"]
    alive = all(peer["status"] == "alive" and peer["address"] for peer in peers)
    return alive and sorted(peer["name"] for peer in peers) == sorted(names)


def all_see_all(machines: Sequence[Machine]) -> bool:
    """Whether each of these agents knows the others, and nobody else."""
    return all(sees(one, [other.name for other in machines if other is not one]) for one in machines)


class Network:
    """Machines on one switch, without any other network. One that is not given an address has eth0 down."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._label = f"swg{os.getpid() % 100000}x{next(_numbers)}"
        self._switch = f"{self._label}-switch"
        self._n_namespaces = 0
        self.machines: list[Machine] = []
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "br0", "type", "bridge", "mcast_snooping", "0")
        ip("-n", self._switch, "link", "set", "br0", "up")

    def add(self, name: str, address: str = "", *, link_local: bool = True) -> Machine:
        """A machine; ``address``: of eth0, in 10.77.0.0/24 the next one if it is "auto".

        ``link_local``: whether it gives itself an IPv6 address as well, which it may use some seconds later.
        """
        self._n_namespaces += 1
        number = self._n_namespaces
        namespace, port = f"{self._label}-{number}", f"port{number}"
        ip("netns", "add", namespace)
        ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
        ip("-n", namespace, "link", "set", "lo", "up")
        if address == "auto":
            address = f"10.77.0.{number}/24"
        if not link_local:
            ip("-n", namespace, "link", "set", "eth0", "addrgenmode", "none")
        if address:
            ip("-n", namespace, "addr", "add", address, "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")
        folder = self._folder / f"{name}-{number}"
        folder.mkdir()
        machine = Machine(name, namespace, address.partition("/")[0], folder, switch=self._switch, switch_port=port)
        self.machines.append(machine)
        return machine

    def beside(self, machine: Machine, name: str, port: int) -> Machine:
        """Makes a second agent on the same machine."""
        folder = self._folder / f"{name}-{port}"
        folder.mkdir()
        other = Machine(name, machine.namespace, machine.address, folder, agent_port=port)
        self.machines.append(other)
        return other

    def close(self) -> None:
        processes = [process for machine in self.machines for process in machine.processes]
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(8)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for namespace in dict.fromkeys(machine.namespace for machine in self.machines):
            ip("netns", "delete", namespace)
        ip("netns", "delete", self._switch)


@contextmanager
def network(folder: Path) -> Iterator[Network]:
    """Makes a new network; everything on it ends on leaving."""
    made = Network(folder)
    try:
        yield made
    finally:
        made.close()
