"""What is done to simulated swarms, what is promised then, and the figures that come of it.

A scenario is a function of a `Run`. It fails by `PromiseBroken` or `gossip.simulate.invariants.InvariantViolated`; both say how to see it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from gossip.simulate.invariants import Invariants
from gossip.simulate.simulation import Link, Node, Simulation
from gossip.swim.events import Change, Notify

#: Promises, in simulated seconds. A crash is known to all live nodes; of larger swarms it is only reported.
DETECTION_S = {3: 8.0, 100: 16.0}
#: The views of all are equal after everything is well again.
HEAL_S = 30.0
#: The same after a mix of all faults, some of which only just happened.
CALM_S = 90.0
#: No false death up to this share of lost packets: in any swarm, and in one of 10 nodes at most.
LOSS_ANY, LOSS_SMALL, SMALL = 0.05, 0.10, 10

_JOIN_S = 60.0
# Until the news of the start is told: all of n nodes send n pieces 4·log10 n times, 20 in a packet, 15 packets a second.
_QUIET_S = 300.0
_NEWS_QUIET = 3
_CUT_S = 60.0
_PAUSE_S = 45.0  # of a laptop's lid, or SIGSTOP (SCENARIOS DISC-6)
_RECORD_CHANGES = 20
_CRASHES = 3
# A death is nobody's mistake so long after the member was away or paused, or after a cut: news travels.
_AFTERMATH_S = 30.0


class PromiseBroken(Exception):
    """A swarm did not do what it should. The message says what, when, and how to see it again."""


@dataclass(frozen=True)
class Options:
    """A swarm and its network. ``minutes``: how long the steady and the random scenario last."""

    nodes: int = 10
    loss: float = 0.0
    delay_ms: float = 0.5
    jitter_ms: float = 1.0
    duplicates: float = 0.0
    minutes: float = 10.0
    check: bool = True

    def replay(self, scenario: str, seed: int) -> str:
        """The command that runs it again."""
        words = ["python -m gossip.simulate", f"--scenario {scenario}", f"--nodes {self.nodes}", f"--seed {seed}"]
        for name in ("loss", "delay_ms", "jitter_ms", "duplicates", "minutes"):
            if getattr(self, name) != getattr(Options, name):
                words.append(f"--{name.replace('_', '-')} {getattr(self, name):g}")
        return " ".join(words)


@dataclass
class Figures:
    """What runs showed, in simulated seconds; lists have one entry per occasion.

    ``packets``, ``bytes``: per node and second while nothing happens. ``speed``: simulated seconds in one of CPU time.
    """

    join_s: list[float] = field(default_factory=list)
    detection_s: list[float] = field(default_factory=list)
    leave_s: list[float] = field(default_factory=list)
    heal_s: list[float] = field(default_factory=list)
    record_s: list[float] = field(default_factory=list)
    packets: list[float] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)
    speed: list[float] = field(default_factory=list)
    suspicions: int = 0
    false_deaths: int = 0

    def add(self, other: Figures) -> None:
        """Those of another run."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Run:
    """One swarm in one scenario."""

    def __init__(self, scenario: str, options: Options, seed: int) -> None:
        self.options = options
        self.figures = Figures()
        self.replay = options.replay(scenario, seed)
        link = Link(options.delay_ms / 1000, options.jitter_ms / 1000, options.loss, options.duplicates)
        self.simulation = Simulation(options.nodes, seed, link)
        self.simulation.on_notify = self._notice
        self.invariants = Invariants(self.simulation, self.replay) if options.check else None
        self.trace: Callable[[float, Node, Notify], None] | None = None
        self._absent_until_s: dict[bytes, float] = {}
        self._cut_until_s = float("-inf")
        self._false: list[str] = []

    # --- parts of scenarios

    def start_all(self) -> None:
        """Starts every node, and waits until all know all."""
        for node in self.simulation.nodes:
            self.simulation.start(node)
        self.figures.join_s.append(self.settle(_JOIN_S, "after all started"))

    def settle(self, limit_s: float, when: str) -> float:
        """Waits until every view is right; returns how long that took."""
        return self.wait(self.simulation.views_agree, limit_s, f"{when}, views differ")

    def wait(self, condition: Callable[[], bool], limit_s: float, problem: str) -> float:
        """Waits for a condition; returns how long that took."""
        start_s = self.simulation.now_s
        if not self.simulation.run(limit_s, until=condition):
            raise self.broken(f"{problem} after {limit_s:g} s")
        return self.simulation.now_s - start_s

    def restart(self, node: Node, payload: bytes = b"again") -> None:
        """The node's program starts again."""
        self._absent_until_s[node.id] = self.simulation.now_s
        self.simulation.start(node, payload)

    def pause(self, node: Node, duration_s: float) -> None:
        """The node does nothing for a while."""
        self._absent_until_s[node.id] = self.simulation.now_s + duration_s
        self.simulation.pause(node, duration_s)

    def cut(self, side: set[int], *, both: bool = True) -> None:
        """Cuts a part of the swarm off."""
        self._cut_until_s = float("inf")
        self.simulation.cut(side, both=both)

    def heal(self) -> None:
        """Ends all cuts."""
        self._cut_until_s = self.simulation.now_s
        self.simulation.heal()

    def some(self, share: float) -> set[int]:
        """The indexes of some nodes, at least one."""
        nodes = range(len(self.simulation.nodes))
        return set(self.simulation.random.sample(nodes, max(1, round(share * len(nodes)))))

    def any_node(self) -> Node:
        """One of those that run."""
        return self.simulation.random.choice(self.simulation.up)

    def broken(self, what: str) -> PromiseBroken:
        """The error that says what did not hold."""
        return PromiseBroken(
            f"{what}\nseed {self.simulation.seed}, after {self.simulation.now_s:.3f} simulated seconds; to see it again:\n"
            f"    {self.replay}"
        )

    def check_deaths(self) -> None:
        """No node that was well was thought dead, if so few packets are lost that this is promised."""
        loss_max = LOSS_SMALL if self.options.nodes <= SMALL else LOSS_ANY
        if self._false and self.options.loss <= loss_max:
            raise self.broken("false deaths: " + "; ".join(self._false[:5]))

    def _notice(self, node: Node, notify: Notify) -> None:
        now_s = self.simulation.now_s
        if self.trace is not None:
            self.trace(now_s, node, notify)
        if notify.change is Change.SUSPECTED:
            self.figures.suspicions += 1
        elif notify.change is Change.DIED:
            lives = any(other.is_up and other.id == notify.node for other in self.simulation.nodes)
            excused_s = _AFTERMATH_S + max(self._cut_until_s, self._absent_until_s.get(notify.node, float("-inf")))
            if lives and now_s > excused_s:
                self.figures.false_deaths += 1
                self._false.append(f"{notify.node.hex()} as node {node.index} saw it at {now_s:.3f} s")


# --- the scenarios


def steady(run: Run) -> None:
    """Nothing happens."""
    run.start_all()
    simulation, n = run.simulation, len(run.simulation.nodes)
    run.wait(partial(_is_quiet, run), _QUIET_S, "news of the start is still told")
    packets, size = sum(node.packets for node in simulation.nodes), sum(node.bytes for node in simulation.nodes)
    begun_s = time.process_time()
    duration_s = 60 * run.options.minutes
    simulation.run(duration_s)
    run.figures.speed.append(duration_s / (time.process_time() - begun_s))
    run.figures.packets.append((sum(node.packets for node in simulation.nodes) - packets) / n / duration_s)
    run.figures.bytes.append((sum(node.bytes for node in simulation.nodes) - size) / n / duration_s)
    run.check_deaths()


def _is_quiet(run: Run) -> bool:
    return all(node.core is None or node.core.sizes.news <= _NEWS_QUIET for node in run.simulation.nodes)


def crash(run: Run) -> None:
    """Nodes end without a word, one after the other."""
    run.start_all()
    limit_s = next((limit_s for n, limit_s in DETECTION_S.items() if run.options.nodes <= n), CALM_S)
    for _ in range(_CRASHES):
        run.simulation.run(run.simulation.random.uniform(1, 5))
        node = run.any_node()
        run.simulation.crash(node)
        run.figures.detection_s.append(
            run.wait(partial(run.simulation.all_know_gone, node.id), limit_s, "a crash is not known to all")
        )
        run.restart(node)
        run.settle(HEAL_S, "after a crashed node came back")
    run.check_deaths()


def crash_many(run: Run) -> None:
    """A quarter of the nodes end at once."""
    run.start_all()
    some = run.some(0.25)
    for index in some:
        run.simulation.crash(run.simulation.nodes[index])
    run.figures.detection_s.append(run.settle(CALM_S, "after a quarter crashed"))
    run.check_deaths()


def cut_and_heal(run: Run) -> None:
    """A third of the nodes is cut off for a minute."""
    _cut(run, both=True, duration_s=_CUT_S)


def one_way_cut(run: Run) -> None:
    """For a minute nothing passes from a third of the nodes to the others, but all the other way."""
    _cut(run, both=False, duration_s=_CUT_S)


def long_cut(run: Run) -> None:
    """A third of the nodes is cut off until both sides have forgotten each other."""
    _cut(run, both=True, duration_s=run.simulation.settings.dead_s + 60)


def _cut(run: Run, *, both: bool, duration_s: float) -> None:
    run.start_all()
    run.cut(run.some(0.33), both=both)
    run.simulation.run(duration_s)
    run.heal()
    run.figures.heal_s.append(run.settle(HEAL_S, "after a cut"))
    run.simulation.run(_AFTERMATH_S)
    run.check_deaths()


def restart(run: Run) -> None:
    """A node crashes and starts again: at once, and after it was thought dead."""
    _restart(run, lambda node: None)


def restart_new_disk(run: Run) -> None:
    """A node crashes and starts again as another one, at the same address."""
    _restart(run, run.simulation.lose_disk)


def restart_old_disk(run: Run) -> None:
    """A node crashes and starts again with its id, but without its boot counter, and with another record."""
    _restart(run, run.simulation.forget_boot)


def _restart(run: Run, disk: Callable[[Node], None]) -> None:
    run.start_all()
    for after_s in (0.5, 5.0, 40.0):
        node = run.any_node()
        run.simulation.crash(node)
        run.simulation.run(after_s)
        disk(node)
        run.restart(node, run.simulation.random.randbytes(100))
        run.figures.heal_s.append(run.settle(HEAL_S, f"{after_s:g} s after a crash, and a start"))
    run.check_deaths()


def pause(run: Run) -> None:
    """A node is stopped for 45 s, and goes on."""
    run.start_all()
    node = run.any_node()
    run.pause(node, _PAUSE_S)
    run.simulation.run(_PAUSE_S)
    run.figures.heal_s.append(run.settle(HEAL_S, "after a pause"))
    run.simulation.run(_AFTERMATH_S)
    run.check_deaths()


def clocks(run: Run) -> None:
    """Nothing happens, but clocks run up to a fifth too fast or too slow."""
    for node in run.simulation.nodes:
        node.rate = run.simulation.random.uniform(0.8, 1.2)
    steady(run)


def join_storm(run: Run) -> None:
    """Half of the nodes start at once, among the others."""
    late = run.simulation.nodes[len(run.simulation.nodes) // 2 :]
    for node in run.simulation.nodes:
        if node not in late:
            run.simulation.start(node)
    run.settle(_JOIN_S, "after half started")
    for node in late:
        run.simulation.start(node)
    run.figures.join_s.append(run.settle(HEAL_S, "after a join storm"))
    run.check_deaths()


def leave(run: Run) -> None:
    """Nodes say goodbye, one after the other, and come back."""
    run.start_all()
    for _ in range(_CRASHES):
        node = run.any_node()
        run.simulation.leave(node)
        run.figures.leave_s.append(
            run.wait(partial(run.simulation.all_know_gone, node.id), CALM_S, "a goodbye is not known to all")
        )
        run.restart(node)
        run.settle(HEAL_S, "after one came back")
    run.check_deaths()


def record_change(run: Run) -> None:
    """Records change, one after the other."""
    run.start_all()
    for _ in range(_RECORD_CHANGES):
        node = run.any_node()
        run.simulation.publish(node, run.simulation.random.randbytes(2000))
        run.figures.record_s.append(
            run.wait(partial(run.simulation.all_know_record, node), HEAL_S, "a record is not known to all")
        )
    run.check_deaths()


def random(run: Run) -> None:
    """Everything that can happen, at random; then all is well again."""
    run.start_all()
    simulation, draw = run.simulation, run.simulation.random
    end_s = simulation.now_s + 60 * run.options.minutes
    while simulation.now_s < end_s:
        draw.choice(_FAULTS)(run)
        simulation.run(draw.expovariate(1 / 3))
    calm(run)


def calm(run: Run) -> None:
    """Everything is well again: no cuts, no pauses, the network as it was, all nodes on. Then views must agree."""
    simulation = run.simulation
    run.heal()
    simulation.links.clear()
    for node in simulation.nodes:
        if not node.is_up:
            run.restart(node, simulation.random.randbytes(20))
    simulation.run(
        max([0.0] + [node.paused_until_s - simulation.now_s for node in simulation.nodes if node.paused_until_s])
    )
    run.figures.heal_s.append(run.settle(CALM_S, "after all faults ended"))
    if run.invariants is not None:
        run.invariants.check_everything()


# --- single faults, for the random scenario


def _stop_one(run: Run) -> None:
    up = run.simulation.up
    if len(up) > 1:
        node = run.simulation.random.choice(up)
        run.simulation.random.choice((run.simulation.crash, run.simulation.leave))(node)


def _start_one(run: Run) -> None:
    down = [node for node in run.simulation.nodes if not node.is_up]
    if down:
        node = run.simulation.random.choice(down)
        disk = run.simulation.random.random()
        if disk < 0.2:
            run.simulation.lose_disk(node)
        elif disk < 0.4:
            run.simulation.forget_boot(node)
        run.restart(node, run.simulation.random.randbytes(20))


def _pause_one(run: Run) -> None:
    node = run.any_node()
    if not node.is_paused:
        run.pause(node, run.simulation.random.uniform(0.1, _PAUSE_S))


def _change_record(run: Run) -> None:
    run.simulation.publish(run.any_node(), run.simulation.random.randbytes(50))


def _cut_some(run: Run) -> None:
    if len(run.simulation.cuts) < 2:
        run.cut(run.some(run.simulation.random.uniform(0, 0.5)), both=run.simulation.random.random() < 0.6)


def _heal(run: Run) -> None:
    run.heal()


def _worsen_link(run: Run) -> None:
    a, b = run.simulation.random.choices(range(len(run.simulation.nodes)), k=2)
    link = run.simulation.link_of(a, b)
    link.loss = run.simulation.random.uniform(0, 0.5)
    link.jitter_s = run.simulation.random.uniform(0, 0.3)
    link.duplicates = run.simulation.random.uniform(0, 0.2)


_FAULTS = (_stop_one, _start_one, _start_one, _pause_one, _change_record, _cut_some, _heal, _heal, _worsen_link)

#: By name.
SCENARIOS: dict[str, Callable[[Run], None]] = {
    "steady": steady,
    "crash": crash,
    "crash-many": crash_many,
    "cut-and-heal": cut_and_heal,
    "one-way-cut": one_way_cut,
    "long-cut": long_cut,
    "restart": restart,
    "restart-new-disk": restart_new_disk,
    "restart-old-disk": restart_old_disk,
    "pause": pause,
    "clocks": clocks,
    "join-storm": join_storm,
    "leave": leave,
    "record-change": record_change,
    "random": random,
}


def play(
    scenario: str, options: Options, seed: int, trace: Callable[[float, Node, Notify], None] | None = None
) -> Figures:
    """Runs a scenario. Raises PromiseBroken or InvariantViolated."""
    run = Run(scenario, options, seed)
    run.trace = trace
    SCENARIOS[scenario](run)
    return run.figures
