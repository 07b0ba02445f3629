"""Whole agents that find each other and keep track, on links that come, go, move and lie.

What was promised to users is printed as measured; the limits asserted are generous, for machines that are busy.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.models.demo import demo_model
from node.swarm_key import SwarmKey
from rigs.lan import needs_namespaces
from rigs.network import (
    PACKETS_PROGRAM,
    Machine,
    Network,
    accused,
    all_see_all,
    boot,
    eventually,
    is_up,
    network,
    sees,
    suspected,
    thinks_dead,
    thought_dead,
)

pytestmark = needs_namespaces

# How long an agent may take from its start until others know it: 5 s were promised, the rest is for a machine that
# needs most of this for starting them.
_FOUND_S = 60.0
_MULTICAST = "multicast DNS"
_JSON = ("-H", "Content-Type: application/json")


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Network]:
    with network(tmp_path) as made:
        yield made
        for machine in made.machines:
            log = machine.log() if (machine.folder / "log").exists() else ""
            # Tracebacks within a record are indented.
            assert not re.search(r"^(Traceback|\S+ (error|critical) )", log, re.MULTILINE), log[-4000:]


def _addresses(peer: dict[str, Any]) -> list[str]:
    """The addresses known of a peer, in the order in which they are tried, without link-local ones."""
    hosts = [path["address"].rpartition(":")[0] for path in peer["paths"]]
    return [host for host in hosts if not host.startswith("[fe80")]


def _run_packets(machine: Machine, *arguments: str) -> None:
    done = subprocess.run(
        machine.command(sys.executable, PACKETS_PROGRAM, *arguments), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


# --- finding


def test_five_nodes_without_configuration_find_each_other(net: Network) -> None:
    machines = [net.add(name, "auto") for name in ("one", "two", "three", "four", "five")]
    for machine in machines:
        machine.start_light()
    started_s = time.monotonic()
    for machine in machines:
        eventually("it is up", partial(is_up, machine), _FOUND_S)
    up_s = time.monotonic()
    eventually("five nodes see each other", lambda: all_see_all(machines), _FOUND_S)
    seen_s = time.monotonic()
    print(
        f"five nodes: all see all {seen_s - started_s:.1f} s after the last start, {seen_s - up_s:.1f} s after all up"
    )
    found = {peer["found"] for machine in machines for peer in machine.peers()["peers"]}
    assert _MULTICAST in found
    for machine in machines:
        nodes = json.loads(machine.curl("/status")[1])["nodes"]
        assert sorted(node["name"] for node in nodes) == sorted(other.name for other in machines)
        assert all(node["alive"] for node in nodes)


# --- addresses


@pytest.mark.parametrize("first", ["eth0", "docker0"])
def test_of_many_addresses_the_one_that_works_is_used(
    first: str, net: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    many, plain = net.add("many"), net.add("plain", "10.77.0.2/24")
    interfaces = [("docker0", "172.17.0.1/16"), ("tun0", "100.64.0.5/32")]
    # The order in which the system lists them must not matter.
    for interface, address in interfaces if first == "docker0" else []:
        many.dummy(interface, address)
    many.ip("addr", "add", "10.77.0.1/24", "dev", "eth0")
    many.ip("link", "set", "eth0", "up")
    for interface, address in interfaces if first == "eth0" else []:
        many.dummy(interface, address)
    # As on most machines with Docker: this address leads to the machine itself.
    plain.dummy("docker0", "172.17.0.1/16")
    many.start_light()
    plain.start_light()
    eventually("they see each other", lambda: all_see_all([many, plain]), _FOUND_S)
    eventually("at eth0", lambda: plain.used_host("many") == "10.77.0.1", 30)
    eventually("at eth0", lambda: many.used_host("plain") == "10.77.0.2", 30)
    own = [entry["address"] for entry in many.peers()["addresses"] if "%" not in entry["address"]]
    assert own == ["10.77.0.1", "100.64.0.5", "172.17.0.1"]
    assert _addresses(plain.peer("many")) == ["10.77.0.1", "100.64.0.5", "172.17.0.1"]
    # Announced, tried, and found to be this node itself; and the one behind the tunnel never answers.
    eventually("the id check", lambda: _problems(plain).get("172.17.0.1") == "this node itself", 30)
    text = plain.run("peers").stdout
    assert re.search(r"→ 10\.77\.0\.1:4100 .*answers", text), text
    assert re.search(r"172\.17\.0\.1:4100 .*this node itself", text), text
    assert re.search(r"100\.64\.0\.5:4100 .*(not tried|no answer)", text), text
    assert all_see_all([many, plain])


def _problems(machine: Machine) -> dict[str, str]:
    """What is wrong with the candidates that are nobody, by host."""
    return {entry["address"].rpartition(":")[0]: entry["problem"] for entry in machine.peers()["candidates"]}


def test_a_second_link_is_used_when_the_first_leads_nowhere(net: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    many, cabled = net.add("many", "10.77.0.1/24"), net.add("cabled")
    many.dummy("docker0", "172.17.0.1/16")
    many.dummy("tun0", "100.64.0.5/32")
    many.cable_to(cabled, "usb0", "198.51.100.1/30", "198.51.100.2/30")
    # These addresses are not private: a swarm with a key is open to them.
    key = {"SWARM_SWARM_KEY": SwarmKey.generate().text()}
    many.start_light(env=key)
    cabled.start_light(env=key)
    eventually("they see each other", lambda: all_see_all([many, cabled]), _FOUND_S)
    eventually("at usb0", lambda: cabled.used_host("many") == "198.51.100.1", 30)
    eventually("at usb0", lambda: many.used_host("cabled") == "198.51.100.2", 30)
    assert _addresses(cabled.peer("many")) == ["10.77.0.1", "198.51.100.1", "100.64.0.5", "172.17.0.1"]
    text = cabled.run("peers").stdout
    assert re.search(r"→ 198\.51\.100\.1:4100 .*answers", text), text
    assert re.search(r"10\.77\.0\.1:4100 .*no answer yet, tried [0-9]+ times", text), text


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--swarm-exclude-interfaces", "tun*,docker0"), "among the interfaces not to use"),
        (("--swarm-interfaces", "eth*"), "not among the interfaces to use"),
    ],
)
def test_interfaces_that_are_excluded_are_not_announced(
    flags: tuple[str, str], reason: str, net: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    many, plain = net.add("many", "10.77.0.1/24"), net.add("plain", "10.77.0.2/24")
    many.dummy("docker0", "172.17.0.1/16")
    many.dummy("tun0", "100.64.0.5/32")
    many.start_light(*flags)
    plain.start_light()
    eventually("they see each other", lambda: all_see_all([many, plain]), _FOUND_S)
    assert _addresses(plain.peer("many")) == ["10.77.0.1"]
    assert set(_problems(plain)).isdisjoint({"172.17.0.1", "100.64.0.5"})
    out = {entry["address"]: entry["reason"] for entry in many.peers()["addresses_left_out"]}
    assert out["172.17.0.1"] == out["100.64.0.5"] == reason
    assert f"not 100.64.0.5 (tun0): {reason}" in many.run("peers").stdout


def test_a_node_that_has_only_a_container_bridge_is_found_there(net: Network) -> None:
    inside, outside = net.add("inside"), net.add("outside", "10.77.0.2/24")
    inside.cable_to(outside, "docker0", "172.17.0.2/16", "172.17.0.1/16")
    inside.start_light()
    outside.start_light()
    eventually("they see each other", lambda: all_see_all([inside, outside]), _FOUND_S)
    eventually("at docker0", lambda: inside.used_host("outside") == "172.17.0.1", 30)
    eventually("at docker0", lambda: outside.used_host("inside") == "172.17.0.2", 30)


# --- links that come, go and move


def test_a_link_that_comes_late_moves_and_goes_away_for_a_while(net: Network) -> None:
    one, two, late = net.add("one", "10.77.0.1/24"), net.add("two", "10.77.0.2/24"), net.add("late")
    for machine in (one, two, late):
        machine.start_light()
    eventually("two see each other", lambda: all_see_all([one, two]), _FOUND_S)
    time.sleep(8)
    assert late.peers()["peers"] == []
    assert late.peers()["addresses"] == []

    late.ip("addr", "add", "10.77.0.3/24", "dev", "eth0")
    late.ip("link", "set", "eth0", "up")
    up_s = time.monotonic()
    eventually("the late one is found", lambda: all_see_all([one, two, late]), 40)
    print(f"found {time.monotonic() - up_s:.1f} s after the link came up")
    eventually("at its address", lambda: one.used_host("late") == two.used_host("late") == "10.77.0.3", 30)
    first_boot = boot(one.peer("late"))

    late.ip("addr", "del", "10.77.0.3/24", "dev", "eth0")
    late.ip("addr", "add", "10.77.0.33/24", "dev", "eth0")
    moved_s = time.monotonic()
    eventually("it has moved", lambda: one.used_host("late") == two.used_host("late") == "10.77.0.33", 40)
    print(f"found at its new address {time.monotonic() - moved_s:.1f} s after it moved")
    eventually("the old address is gone", lambda: _addresses(one.peer("late")) == ["10.77.0.33"], 40)
    eventually("all see all", lambda: all_see_all([one, two, late]), 40)

    late.ip("link", "set", "eth0", "down")
    down_s = time.monotonic()
    for watcher, name in ((one, "late"), (two, "late"), (late, "one"), (late, "two")):
        eventually(f"{name} is dead for {watcher.name}", partial(thinks_dead, watcher, name), 40)
    print(f"dead {time.monotonic() - down_s:.1f} s after the link went down")
    time.sleep(max(0.0, down_s + 20 - time.monotonic()))
    late.ip("link", "set", "eth0", "up")
    up_s = time.monotonic()
    eventually("it is alive again", lambda: all_see_all([one, two, late]), 60)
    print(f"alive {time.monotonic() - up_s:.1f} s after the link came up again")
    assert boot(one.peer("late")) == first_boot
    # What the other side of a cut thought is refuted as soon as it is heard.
    assert thought_dead(one.log()) == thought_dead(two.log()) == {"late"}


# --- a machine that sleeps


def test_a_node_that_slept_comes_back_and_accuses_nobody(net: Network) -> None:
    machines = [net.add(name, "auto") for name in ("one", "two", "three", "sleeper")]
    sleeper, others = machines[-1], machines[:-1]
    for machine in machines:
        machine.start_light()
    eventually("all see all", lambda: all_see_all(machines), _FOUND_S)
    boots = {other.name: boot(sleeper.peer(other.name)) for other in others}
    boots["sleeper"] = boot(others[0].peer("sleeper"))

    sleeper.processes[0].send_signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    for other in others:
        eventually("it is thought dead", partial(thinks_dead, other, "sleeper"), 40)
    print(f"thought dead by all {time.monotonic() - stopped_s:.1f} s after it was stopped")
    time.sleep(max(0.0, stopped_s + 25 - time.monotonic()))
    sleeper.processes[0].send_signal(signal.SIGCONT)
    woken_s = time.monotonic()
    eventually("it is alive everywhere", lambda: all_see_all(machines), 45)
    print(f"alive everywhere {time.monotonic() - woken_s:.1f} s after it woke")

    for machine in machines:
        assert machine.processes[0].poll() is None
        assert accused(machine.log()) <= {"sleeper"}, machine.log()
    assert all("sleeper" in thought_dead(other.log()) for other in others)
    assert any("sleeper" in suspected(other.log()) for other in others)
    assert {other.name: boot(sleeper.peer(other.name)) for other in others} | {
        "sleeper": boot(others[0].peer("sleeper"))
    } == boots


# --- without multicast


def test_seeds_that_are_started_after_those_who_name_them(net: Network) -> None:
    machine = net.add("machine")
    nodes = [net.beside(machine, name, 4100 + number) for number, name in enumerate(("s1", "s2", "j1", "j2"))]
    seeds, joiners = nodes[:2], nodes[2:]
    flags = ("--node-host", "loopback", "--seed", "localhost:4100", "--seed", "127.0.0.1:4101")
    for node in joiners:
        node.start_light(*flags)
    for node in joiners:
        # Nobody is there, and it answers at once.
        eventually("it is up", partial(is_up, node), _FOUND_S)
    time.sleep(7)
    for node in joiners:
        document = node.peers()
        assert document["peers"] == []
        assert {entry["address"] for entry in document["candidates"]} == {"127.0.0.1:4100", "127.0.0.1:4101"}
        assert all(entry["tries"] > 2 for entry in document["candidates"])
    for node in seeds:
        node.start_light(*flags)
    for node in seeds:
        eventually("the seed is up", partial(is_up, node), _FOUND_S)
    up_s = time.monotonic()
    eventually("one membership of four", lambda: all_see_all(nodes), _FOUND_S)
    print(f"one membership of four {time.monotonic() - up_s:.1f} s after the seeds were up")
    assert {peer["found"] for peer in nodes[2].peers()["peers"]} & {"seed"}
    assert _problems(seeds[0]) == {"127.0.0.1": "this node itself"}


def test_a_node_alone_answers_at_once(net: Network) -> None:
    alone = net.add("alone", "auto")
    started_s = time.monotonic()
    alone.start_light("--seed", "nobody.invalid", "--seed", "10.77.0.200")
    eventually("it answers", partial(is_up, alone), _FOUND_S)
    print(f"a node alone answers {time.monotonic() - started_s:.1f} s after its start")
    for path in ("/health", "/v1/models"):
        asked_s = time.monotonic()
        status, body = alone.curl(path)
        assert (status, time.monotonic() - asked_s < 5) == (200, True), body
    assert json.loads(alone.curl("/v1/models")[1])["data"] == []
    eventually("the seed is tried", lambda: alone.peers()["candidates"][0]["tries"] >= 2, 30)
    assert alone.log().count("the seed nobody.invalid:4100 has no address") == 1


# --- names and restarts


def test_long_odd_and_equal_names_and_a_quick_restart(net: Network) -> None:
    host_names = ["h" * 64, "büro", "日本", "pc", "pc.example.org"]
    names = ["h" * 63, "b-ro", "node", "pc", "pc"]
    machines = [net.add(f"m{number}", "auto") for number in range(len(host_names))]
    processes = [
        machine.start_light(host_name=host_name) for machine, host_name in zip(machines, host_names, strict=True)
    ]

    def all_there() -> bool:
        return all(sees(one, [*names[:number], *names[number + 1 :]]) for number, one in enumerate(machines))

    eventually("all see all, each once", all_there, _FOUND_S)
    for number in (0, 3):
        victim, others = machines[number], [*machines[:number], *machines[number + 1 :]]
        node_id = victim.peers()["node"]
        (old,) = {boot(_by_id(other, node_id)) for other in others}
        processes[number].kill()
        processes[number].wait()
        time.sleep(1)
        victim.start_light(host_name=host_names[number])
        restarted_s = time.monotonic()

        def new_boot_known(others: list[Machine] = others, node_id: str = node_id, old: int = old) -> bool:
            return all(boot(_by_id(other, node_id)) == old + 1 for other in others)

        eventually("the new boot is known to all", new_boot_known, _FOUND_S)
        eventually("all see all, each once", all_there, _FOUND_S)
        print(f"{names[number][:8]} was known again {time.monotonic() - restarted_s:.1f} s after its new start")
        assert victim.peers()["node"] == node_id
    for machine in machines:
        assert machine.peers()["twin"] is None
        assert "has this node's id" not in machine.log()


def _by_id(machine: Machine, node_id: str) -> dict[str, Any]:
    found = [peer for peer in machine.peers()["peers"] if peer["node"] == node_id]
    assert len(found) == 1, found
    return dict(found[0])


def test_a_name_of_80_characters_is_refused_with_what_it_may_be(net: Network) -> None:
    machine = net.add("machine")
    done = machine.run("--name", "n" * 80)
    assert done.returncode == 2
    assert "1 to 63" in done.stderr


# --- other swarms, and packets that nobody sent


def test_swarms_of_other_names_and_keys_do_not_see_each_other(net: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    groups = {
        "red": {"SWARM_SWARM_NAME": "red", "SWARM_SWARM_KEY": SwarmKey.generate().text()},
        "rust": {"SWARM_SWARM_NAME": "red", "SWARM_SWARM_KEY": SwarmKey.generate().text()},
        "open": {"SWARM_SWARM_NAME": "red"},
        "blue": {"SWARM_SWARM_NAME": "blue"},
    }
    pairs = {group: [net.add(f"{group}{number}", "auto") for number in (1, 2)] for group in groups}
    for group, pair in pairs.items():
        for machine in pair:
            machine.start_light(env=groups[group])
    for pair in pairs.values():
        eventually("each pair is a swarm", partial(all_see_all, pair), _FOUND_S)
    same_name = [pair for group, pair in pairs.items() if group != "blue"]
    strangers = {
        machine.name: [other.address for pair in same_name if machine not in pair for other in pair]
        for machine in [one for pair in same_name for one in pair]
    }

    def all_warned() -> bool:
        return all(
            f"{address} calls itself of this swarm, but" in machine.log()
            for machine in net.machines
            for address in strangers.get(machine.name, [])
        )

    eventually("each is told of those with another key", all_warned, 30)
    time.sleep(5)
    for pair in pairs.values():
        assert all_see_all(pair)
    for machine in net.machines:
        for address in {other.address for other in net.machines} - {machine.address}:
            warned = machine.log().count(f" {address} calls itself of this swarm")
            assert warned == (1 if address in strangers.get(machine.name, []) else 0), (machine.name, address)
        nodes = json.loads(machine.curl("/status")[1])["nodes"]
        assert {node["name"][:-1] for node in nodes} == {machine.name[:-1]}
        document = machine.peers()
        assert document["incompatible"] == []
        shown = {entry["host"] for entry in document["other_keys"]}
        assert {host for host in shown if ":" not in host} == set(strangers.get(machine.name, []))
        assert (document["statistics"]["foreign"] > 0) == (machine.name in strangers)
    red1, rust1 = pairs["red"][0], pairs["rust"][0]
    text = red1.run("peers").stdout
    assert (
        f"{rust1.address} calls itself of this swarm, but it has another key: one swarm has one `[swarm] key`" in text
    )
    # It is given the right one, and is no stranger any more.
    rust1.processes[0].terminate()
    rust1.processes[0].wait(10)
    rust1.start_light(env=groups["red"])
    eventually("it is one of them", lambda: all_see_all([*pairs["red"], rust1]), _FOUND_S)
    eventually("no stranger", lambda: rust1.address not in str(red1.peers()["other_keys"]), 30)


@pytest.mark.parametrize("swarm", ["with a key", "without"])
def test_packets_that_nobody_sent_change_nothing_but_counters(swarm: str, net: Network, tmp_path: Path) -> None:
    # Without IPv6 there is nothing that changes by itself meanwhile.
    one, two = (net.add(name, "auto", link_local=False) for name in ("one", "two"))
    attacker = net.add("attacker", "10.77.0.9/24")
    key = {"SWARM_SWARM_KEY": SwarmKey.generate().text()} if swarm == "with a key" else {}
    one.start_light(env=key)
    two.start_light(env=key)
    eventually("they see each other", lambda: all_see_all([one, two]), _FOUND_S)
    captured = tmp_path / "captured"
    if key:
        _run_packets(one, "capture", "4", str(captured))
        assert len(captured.read_text().split()) > 4
        # Some of these are repeated as they are: true packets, of a time that is over.
        _crash_and_start(two, key)
        eventually("the new start is known", lambda: boot(one.peer("two")) == 2 and all_see_all([one, two]), _FOUND_S)
    else:
        # Nobody can tell there whether a packet was forged: only what is no packet at all can be refused.
        captured.touch()
    eventually("at eth0", lambda: one.used_host("two") == "10.77.0.2", 30)

    # A record of the other's start may still be on its way.
    before = one.peers()
    settled_since_s, deadline_s = time.monotonic(), time.monotonic() + 60
    while time.monotonic() - settled_since_s < 3:
        assert time.monotonic() < deadline_s, before
        time.sleep(0.5)
        now = one.peers()
        if _what_it_believes(now) != _what_it_believes(before):
            settled_since_s = time.monotonic()
        before = now
    log_before = one.log()
    _run_packets(attacker, "flood", one.address, str(captured), "1", "20000")
    after = one.peers()
    counted = {name: after["statistics"][name] - before["statistics"][name] for name in after["statistics"]}
    print(f"20,000 packets: {counted}")
    assert counted["malformed"] + counted["foreign"] > 10_000
    assert _what_it_believes(after) == _what_it_believes(before)
    assert one.log().count("10.77.0.9 calls itself of this swarm") == (1 if key else 0)
    time.sleep(5)
    assert all_see_all([one, two])
    assert accused(one.log().removeprefix(log_before)) == accused(two.log()) == set()
    assert one.used_host("two") == "10.77.0.2"
    # What it took in does not keep a new record, with addresses of its own, out.
    _crash_and_start(two, key)
    new_boot = 3 if key else 2
    eventually("a start is known", lambda: boot(one.peer("two")) == new_boot and all_see_all([one, two]), _FOUND_S)


def _crash_and_start(machine: Machine, env: dict[str, str]) -> None:
    machine.processes[-1].kill()
    machine.processes[-1].wait()
    machine.start_light(env=env)


def _what_it_believes(document: dict[str, Any]) -> dict[str, Any]:
    """Everything in /peers that does not change by itself."""
    beliefs = {key: document[key] for key in ("node", "addresses", "incompatible", "twin")}
    kept = ("node", "name", "status", "incarnation", "record_version", "found", "address", "problem")
    beliefs["peers"] = [{key: peer[key] for key in kept} for peer in document["peers"]]
    beliefs["paths"] = [sorted(path["address"] for path in peer["paths"]) for peer in document["peers"]]
    beliefs["candidates"] = sorted(entry["address"] for entry in document["candidates"])
    return beliefs


def test_a_node_of_another_version_is_shown_and_given_no_work(net: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    one, two, future = net.add("one", "10.77.0.1/24"), net.add("two", "10.77.0.2/24"), net.add("f", "10.77.0.9/24")
    one.start_light()
    two.start_light()
    eventually("they see each other", lambda: all_see_all([one, two]), _FOUND_S)
    _run_packets(future, "future", one.address, "another")
    assert one.peers()["incompatible"] == []
    _run_packets(future, "future", one.address, "default")
    assert one.peers()["incompatible"] == [{"host": "10.77.0.9", "version": 2}]
    assert "10.77.0.9 speaks gossip version 2: it is given no work" in one.run("peers").stdout
    assert all_see_all([one, two])
    assert [node["name"] for node in json.loads(one.curl("/status")[1])["nodes"]] == ["one", "two"]
    assert two.peers()["incompatible"] == []


# --- a busy machine

# Run by Python in a node's namespace: how long /health takes, every 100 ms until stdin is closed.
_SAMPLE_HEALTH = """
import http.client, json, select, sys, time
times_s, failures, connection = [], 0, None
while not select.select([sys.stdin], [], [], 0.1)[0]:
    began_s = time.monotonic()
    try:
        connection = connection or http.client.HTTPConnection("127.0.0.1", 4100, timeout=10)
        connection.request("GET", "/health")
        assert connection.getresponse().read()
        times_s.append(time.monotonic() - began_s)
    except (OSError, http.client.HTTPException):
        connection, failures = None, failures + 1
print(json.dumps({"times_s": times_s, "failures": failures}))
"""


@contextmanager
def _all_cores_busy(machine: Machine) -> Iterator[None]:
    cores = sorted(psutil.Process().cpu_affinity() or [0])
    program = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    busy = [subprocess.Popen(machine.command(sys.executable, "-c", program, str(core))) for core in cores]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_a_saturated_node_is_not_accused_and_answers(net: Network) -> None:
    machines = [net.add(name, "auto") for name in ("one", "two", "three")]
    one, two, _ = machines
    model = demo_model()
    debug = {"SWARM_LOG_LEVEL": "debug"}
    one.start("--model", str(model), cwd=model.parent, env=debug)
    for machine in machines[1:]:
        machine.start(cwd=model.parent, env=debug)
    for machine in machines:
        machine.wait_ready(3, within_s=120)
    samplers = [
        subprocess.Popen(
            machine.command(sys.executable, "-c", _SAMPLE_HEALTH),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for machine in machines
    ]
    prompts, tokens = 0, 0
    with _all_cores_busy(two):
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            # Each one begins differently, or the router would remember it.
            body = {"prompt": f"{prompts} " + "the house " * 255, "max_tokens": 1, "temperature": 0}
            status, text = two.curl("/v1/completions", *_JSON, "-m", "120", "-d", json.dumps(body))
            assert status == 200, text
            prompts, tokens = prompts + 1, tokens + json.loads(text)["usage"]["prompt_tokens"]
    print(f"{prompts} prompts of {tokens / prompts:.0f} tokens on average")
    assert tokens / prompts > 500
    for machine, sampler in zip(machines, samplers, strict=True):
        said = json.loads(sampler.communicate()[0])
        times_s = sorted(said["times_s"])
        p99_s = times_s[int(0.99 * len(times_s))]
        print(
            f"{machine.name}: /health {len(times_s)} times, p99 {1000 * p99_s:.0f} ms, max {1000 * times_s[-1]:.0f} ms"
        )
        assert said["failures"] == 0
        assert len(times_s) > 60
        assert p99_s < 1
        assert accused(machine.log()) == set(), machine.log()[-4000:]
