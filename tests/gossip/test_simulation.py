"""Whole swarms, simulated: what is promised of them (gossip/simulate/scenarios.py), by seeds.

A failure names its seed and the command to see it again. Each promise has a few seeds for each size of swarm, and 20
under the mark `soak`; scripts/soak has 20 for swarms of 100 too, and swarms of 1,000.
"""

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from random import Random

import pytest

from gossip.messages import Record, Update
from gossip.simulate import __main__ as simulate
from gossip.simulate import scenarios
from gossip.simulate.invariants import InvariantViolated
from gossip.simulate.network import Link, Network
from gossip.simulate.run import Figures, Options, PromiseBroken, Run
from gossip.simulate.scenarios import SCENARIOS, play
from gossip.simulate.simulation import Simulation
from gossip.swim import local
from gossip.swim.beliefs import Beliefs
from gossip.swim.events import Change, Notify
from gossip.swim.members import Member
from gossip.swim.pings import Pings
from gossip.swim.probing import Prober
from gossip.swim.pulls import Fetcher
from gossip.swim.ring import ProbeRing

SMALL = (2, 3, 10)


def and_soak(cases: list[tuple[object, ...]]) -> list[object]:
    """Each case, whose last value is how many seeds it has; and those of small swarms with 20, for scripts/soak."""
    longer = [pytest.param(*case[:-1], 20, marks=pytest.mark.soak) for case in cases if 100 not in case]
    return [*cases, *longer]


def played(scenario: str, seeds: range, **options: object) -> Figures:
    figures = Figures()
    for seed in seeds:
        figures.add(play(scenario, Options(**options), seed))  # type: ignore[arg-type]
    return figures


# --- the promises


@pytest.mark.parametrize("nodes", SMALL)
@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_every_scenario_once(scenario: str, nodes: int) -> None:
    played(scenario, range(1, 3), nodes=nodes, minutes=2)


@pytest.mark.parametrize("nodes", SMALL)
@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_every_scenario_where_packets_are_lost(scenario: str, nodes: int) -> None:
    played(scenario, range(1, 3), nodes=nodes, minutes=3, loss=0.05, duplicates=0.02, jitter_ms=20)


@pytest.mark.parametrize("nodes,limit_s,seeds", and_soak([(2, 8, 6), (3, 8, 6), (10, 16, 6), (100, 16, 2)]))
def test_a_crash_is_known_to_all_in_time(nodes: int, limit_s: float, seeds: int) -> None:
    figures = played("crash", range(1, seeds + 1), nodes=nodes, check=nodes < 100)
    assert len(figures.detection_s) == 3 * seeds and max(figures.detection_s) <= limit_s
    assert figures.false_deaths == 0


@pytest.mark.parametrize("nodes,seeds", and_soak([(2, 4), (3, 4), (10, 4), (100, 1)]))
@pytest.mark.parametrize("scenario", ["cut-and-heal", "one-way-cut"])
def test_views_are_equal_soon_after_a_cut(scenario: str, nodes: int, seeds: int) -> None:
    figures = played(scenario, range(1, seeds + 1), nodes=nodes, check=nodes < 100)
    assert len(figures.heal_s) == seeds and max(figures.heal_s) <= 30


@pytest.mark.parametrize(
    "nodes,loss,seeds",
    and_soak([(2, 0.05, 3), (3, 0.05, 3), (10, 0.05, 6), (100, 0.05, 1), (2, 0.1, 3), (3, 0.1, 3), (10, 0.1, 3)]),
)
def test_lost_packets_kill_nobody_in_ten_minutes(nodes: int, loss: float, seeds: int) -> None:
    figures = played("steady", range(1, seeds + 1), nodes=nodes, loss=loss, minutes=10, check=nodes < 10)
    assert figures.false_deaths == 0 and len(figures.packets) == seeds
    assert figures.suspicions > 0  # or the test would not show much


@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_what_a_node_sends_does_not_grow_with_the_swarm(loss: float) -> None:
    few = played("steady", range(1, 4), nodes=10, loss=loss, minutes=5)
    many = played("steady", range(1, 2), nodes=100, loss=loss, minutes=1, check=False)
    for name in ("packets", "bytes"):
        ratio = statistics.mean(getattr(many, name)) / statistics.mean(getattr(few, name))
        assert 1 / 1.5 < ratio < 1.5, (name, ratio)


@pytest.mark.parametrize("nodes,seeds", and_soak([(2, 4), (3, 4), (10, 4), (100, 1)]))
def test_a_changed_record_is_soon_known_to_all(nodes: int, seeds: int) -> None:
    figures = played("record-change", range(1, seeds + 1), nodes=nodes)
    assert len(figures.record_s) == 20 * seeds
    assert statistics.median(figures.record_s) <= 1.0 and max(figures.record_s) <= 10.0


@pytest.mark.parametrize("nodes,minutes,seeds", and_soak([(2, 5, 5), (3, 5, 5), (10, 3, 5), (100, 1, 1)]))
def test_swarms_under_fire_recover(nodes: int, minutes: float, seeds: int) -> None:
    played("random", range(1, seeds + 1), nodes=nodes, minutes=minutes, loss=0.02, duplicates=0.02)


# --- the simulation itself


def test_one_seed_is_one_run() -> None:
    def story(seed: int) -> list[tuple[float, int, Notify]]:
        told: list[tuple[float, int, Notify]] = []
        play(
            "random",
            Options(nodes=5, loss=0.1, minutes=1),
            seed,
            lambda *notice: told.append((notice[0], notice[1].index, notice[2])),
        )
        return told

    assert story(1) == story(1) != story(2)


def test_cuts_have_directions() -> None:
    network = Network(Link(), Random(1), tcp_timeout_s=2.0)
    network.cut({0}, both=False)
    assert network.is_cut(0, 1) and network.is_cut(0, 2)
    assert not network.is_cut(1, 0) and not network.is_cut(1, 2)
    network.cut({0, 1})
    assert network.is_cut(2, 1) and network.is_cut(2, 0) and not network.is_cut(1, 0)
    assert network.udp_delays_s(2, 1) == () and network.tcp_delay_s(1, 2, connects=False) is None
    network.heal()
    assert not network.is_cut(0, 1) and network.udp_delays_s(2, 1) != ()


def test_links_lose_delay_and_duplicate_as_they_are_told() -> None:
    network = Network(Link(delay_s=0.1, jitter_s=0.5, loss=0.2, duplicates=0.1), Random(1), tcp_timeout_s=2.0)
    delays_s = [delay_s for _ in range(10_000) for delay_s in network.udp_delays_s(0, 1)]
    assert len(delays_s) == pytest.approx(10_000 * 0.8 * 1.1, rel=0.03)
    assert min(delays_s) >= 0.1 and max(delays_s) <= 0.6
    network.own_link(0, 1).loss = 0.0
    assert network.link.loss == 0.2
    assert len([1 for _ in range(1000) if network.udp_delays_s(0, 1)]) == 1000  # this pair's alone
    assert len([1 for _ in range(1000) if network.udp_delays_s(1, 0)]) < 900


def test_tcp_loses_nothing_but_takes_longer_where_packets_are_lost() -> None:
    def delays_s(loss: float) -> list[float | None]:
        network = Network(Link(delay_s=0.01, jitter_s=0.0, loss=loss), Random(1), tcp_timeout_s=2.0)
        return [network.tcp_delay_s(0, 1, connects=True) for _ in range(1000)]

    assert all(delay_s == pytest.approx(0.03) for delay_s in delays_s(0.0))
    late = [delay_s for delay_s in delays_s(0.3) if delay_s is None or delay_s > 0.1]
    assert 300 < len(late) < 900 and any(delay_s is None for delay_s in late)  # not within its time


def test_a_paused_node_does_nothing_and_then_catches_up() -> None:
    simulation = Simulation(3, 1)
    for node in simulation.nodes:
        simulation.start(node)
    assert simulation.run(10.0, until=simulation.views_agree)
    node = simulation.nodes[0]
    simulation.pause(node, 20.0)
    sent = node.packets
    simulation.run(19.9)
    assert (
        node.packets == sent
        and node.backlog
        and all(not other.core.members.get(node.id).is_live for other in simulation.nodes[1:])
    )
    assert simulation.run(5.0, until=simulation.views_agree) and node.packets > sent


def test_views_agree_only_if_they_are_right() -> None:
    simulation = Simulation(3, 1)
    for node in simulation.nodes:
        simulation.start(node)
    assert not simulation.views_agree()
    assert simulation.run(10.0, until=simulation.views_agree)
    simulation.publish(simulation.nodes[0], b"new")
    assert not simulation.views_agree() and not simulation.all_know_record(simulation.nodes[0])
    assert simulation.run(10.0, until=simulation.views_agree) and simulation.all_know_record(simulation.nodes[0])
    simulation.crash(simulation.nodes[0])
    assert not simulation.views_agree() and not simulation.all_know_gone(simulation.nodes[0].id)
    assert simulation.run(10.0, until=simulation.views_agree)


def test_only_deaths_of_those_who_were_well_are_false() -> None:
    run = Run("steady", Options(nodes=3), 1)
    run.start_all()
    a, b, c = run.simulation.nodes
    run.simulation.run(100.0)
    for reason, counts in [("paused", False), ("crashed", False), ("nothing", True)]:
        if reason == "paused":
            run.pause(b, 20.0)
            run.simulation.run(15.0)
        elif reason == "crashed":
            run.simulation.run(100.0)
            run.simulation.crash(b)
            run.simulation.run(10.0)
            run.restart(b)
            run.simulation.run(100.0)
        else:
            run._notice(a, Notify(Change.DIED, c.id))
        assert (run.figures.false_deaths > 0) is counts
    with pytest.raises(PromiseBroken, match=f"false deaths: {c.id.hex()} as node 0"):
        run.check_deaths()


# --- the checks can fail


def lie(patch: pytest.MonkeyPatch) -> None:
    """It tells of others more than they said."""
    update = Member.update

    def told(self: Member) -> Update:
        true = update(self)
        return Update(true.node, true.incarnation + 1, true.status, true.version, true.accusers)

    patch.setattr(Member, "update", told)


def forge(patch: pytest.MonkeyPatch) -> None:
    """It gives other records than it got."""
    patch.setattr(Fetcher, "give", lambda self, request: Record(request.node, request.version, (), 1, b"forged"))


def forget_order(patch: pytest.MonkeyPatch) -> None:
    """It believes what it heard last."""
    patch.setattr("gossip.swim.beliefs.supersedes", lambda a, b, c, d: (a, b) != (c, d))


def keep_probing(patch: pytest.MonkeyPatch) -> None:
    """It probes the dead."""
    patch.setattr(ProbeRing, "remove", lambda self, node: None)


def chatter(patch: pytest.MonkeyPatch) -> None:
    """It puts all news into one packet."""
    patch.setattr(local, "UPDATES_MAX", 60)


def leak(patch: pytest.MonkeyPatch) -> None:
    """It keeps the pings that were answered."""
    patch.setattr(Pings, "forget", lambda self, now_s, sequence: None)


def miscount(patch: pytest.MonkeyPatch) -> None:
    """Its hash is not kept up."""
    patch.setattr("gossip.swim.members.Members._toggle", lambda self, member: None)


def suspect_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A suspicion ends without the suspect."""
    patch.setattr(Beliefs, "forgive", lambda self, late_s: [setattr(m, "suspicion", None) for m in self._local.members])


@pytest.mark.parametrize(
    "mistake,scenario,nodes,message",
    [
        (lie, "steady", 3, "never reached that|more of .* than it ever said"),
        (forge, "steady", 3, "which it did not write so"),
        (forget_order, "restart", 5, "fell from"),
        (keep_probing, "crash", 3, "probes others than the live members"),
        (chatter, "steady", 60, "sends a packet of 1[4-9][0-9][0-9] bytes"),
        (leak, "steady", 4, "holds Sizes"),
        (miscount, "steady", 3, "its hash is not that"),
        (suspect_for_ever, "random", 5, "without a deadline"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_mistakes_are_noticed(
    mistake: Callable[[pytest.MonkeyPatch], None],
    scenario: str,
    nodes: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = Options(nodes=nodes, minutes=2)
    mistake(monkeypatch)
    with pytest.raises(InvariantViolated, match=message) as error:
        for seed in range(1, 6):
            play(scenario, options, seed)
    said = re.search(r"python -m gossip\.simulate (.*)", str(error.value))
    assert said is not None and simulate.main(said[1].split()) == 1  # the command shows it again


def test_a_promise_that_is_broken_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Prober, "_failed", lambda self, now_s, probe: self.dismiss())
    with pytest.raises(PromiseBroken, match="a crash is not known to all after 8 s"):
        play("crash", Options(nodes=3), 7)
    assert simulate.main(["--scenario", "crash", "--nodes", "3", "--seed", "7", "--loss", "0.01"]) == 1
    assert "python -m gossip.simulate --scenario crash --nodes 3 --seed 7 --loss 0.01\n" in capsys.readouterr().err


# --- the command


def test_the_command_reports_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--scenario", "crash", "--nodes", "3", "--seeds", "2", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    figures = json.loads(line)
    assert figures["scenario"] == "crash" and len(figures["detection_s"]) == 6 and figures["false_deaths"] == 0
    assert simulate.main(["--scenario", "all", "--nodes", "2", "--minutes", "0.2", "--trace"]) == 0
    said = capsys.readouterr()
    assert [line.split()[0] for line in said.out.splitlines()[2:]] == list(SCENARIOS)
    assert "joined" in said.err and "died" in said.err


@pytest.mark.parametrize(
    "arguments", ["--nodes 1", "--nodes 3.5", "--loss 1.5", "--minutes 0", "--scenario none", "--seeds 0"]
)
def test_the_command_refuses_what_it_cannot_do(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        simulate.main(arguments.split())
    assert error.value.code == 2 and arguments.split()[0] in capsys.readouterr().err


def test_the_command_helps() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gossip.simulate", "--help"], capture_output=True, text=True, check=True
    )
    for name, function in SCENARIOS.items():
        assert re.search(rf"{name} +{re.escape((function.__doc__ or '').strip())}", done.stdout), name
    assert scenarios.HEAL_S == 30 and "--loss" in done.stdout
