"""One swarm in one scenario: what can be done to it and waited for, what came of it, and which deaths were mistakes.

What does not hold raises `PromiseBroken`, which says how to see it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gossip.simulate.invariants import Invariants
from gossip.simulate.network import Link
from gossip.simulate.simulation import Node, Simulation
from gossip.swim.events import Change, Notify

#: A swarm whose nodes all start at once knows all of them after this, in simulated seconds.
JOIN_S = 60.0
#: A death is nobody's mistake so long after the member was away or paused, or after a cut: news travels.
AFTERMATH_S = 30.0
#: No false death up to this share of lost packets: in any swarm, and in one of 10 nodes at most.
LOSS_ANY, LOSS_SMALL, SMALL = 0.05, 0.10, 10


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
    """What runs have shown, in simulated seconds; lists have one entry per occasion.

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
        """Adds the figures of another run."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Run:
    """One swarm in one scenario, with what came of it."""

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
        self.figures.join_s.append(self.settle(JOIN_S, "after all started"))

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
        """Starts the node's program again."""
        self._absent_until_s[node.id] = self.simulation.now_s
        self.simulation.start(node, payload)

    def pause(self, node: Node, duration_s: float) -> None:
        """Stops the node for a while."""
        self._absent_until_s[node.id] = self.simulation.now_s + duration_s
        self.simulation.pause(node, duration_s)

    def cut(self, side: set[int], *, both: bool = True) -> None:
        """Cuts a part of the swarm off."""
        self._cut_until_s = float("inf")
        self.simulation.network.cut(side, both=both)

    def heal(self) -> None:
        """Ends all cuts."""
        self._cut_until_s = self.simulation.now_s
        self.simulation.network.heal()

    def some(self, share: float) -> set[int]:
        """The indexes of some nodes, at least one."""
        nodes = range(len(self.simulation.nodes))
        return set(self.simulation.random.sample(nodes, max(1, round(share * len(nodes)))))

    def any_node(self) -> Node:
        """A node whose program runs, by chance."""
        return self.simulation.random.choice(self.simulation.up)

    def broken(self, what: str) -> PromiseBroken:
        """The error that says what did not hold."""
        return PromiseBroken(
            f"{what}\nseed {self.simulation.seed}, after {self.simulation.now_s:.3f} simulated seconds; "
            f"to see it again:\n    {self.replay}"
        )

    def check_deaths(self) -> None:
        """Raises if a node that was well was thought dead, and so few packets are lost that this must not be."""
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
            excused_s = AFTERMATH_S + max(self._cut_until_s, self._absent_until_s.get(notify.node, float("-inf")))
            if lives and now_s > excused_s:
                self.figures.false_deaths += 1
                self._false.append(f"{notify.node.hex()} as node {node.index} saw it at {now_s:.3f} s")
