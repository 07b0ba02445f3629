"""Swarms under any order of faults that Hypothesis thinks of: invariants at every step, then views that agree.

A failure prints the steps, as short as Hypothesis can make them.
"""

from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from gossip.simulate.invariants import Invariants
from gossip.simulate.network import Link
from gossip.simulate.scenarios import CALM_S
from gossip.simulate.simulation import Node, Simulation

NODES_MAX = 7
#: Which of the nodes: taken modulo their number, so that it shrinks towards the first ones.
WHICH = st.integers(0, NODES_MAX - 1)
DISKS: dict[str, Callable[[Simulation, Node], None]] = {
    "kept": lambda simulation, node: None,
    "new": Simulation.lose_disk,
    "put back": Simulation.forget_boot,
}


class Swarm(RuleBasedStateMachine):
    """A few nodes on a network that gets worse and better."""

    simulation: Simulation | None = None
    has_forgotten = False

    @initialize(n=st.integers(2, 5), seed=st.integers(0, 1000), loss=st.sampled_from([0.0, 0.05, 0.3]))
    def begin(self, n: int, seed: int, loss: float) -> None:
        self.simulation = Simulation(n, seed, Link(loss=loss, duplicates=0.01, jitter_s=0.02))
        self.checks = Invariants(self.simulation, "the steps that Hypothesis prints")
        for node in self.simulation.nodes:
            self.simulation.start(node)

    def node(self, which: int) -> Node:
        assert self.simulation is not None
        return self.simulation.nodes[which % len(self.simulation.nodes)]

    @precondition(lambda self: self.simulation is not None and len(self.simulation.nodes) < NODES_MAX)
    @rule()
    def join(self) -> None:
        self.simulation.start(self.simulation.add_node())

    @rule(which=WHICH)
    def crash(self, which: int) -> None:
        self.simulation.crash(self.node(which))

    @rule(which=WHICH)
    def leave(self, which: int) -> None:
        self.simulation.leave(self.node(which))

    @rule(which=WHICH, disk=st.sampled_from(sorted(DISKS)), payload=st.binary(max_size=3))
    def restart(self, which: int, disk: str, payload: bytes) -> None:
        node = self.node(which)
        self.simulation.crash(node)
        DISKS[disk](self.simulation, node)
        self.simulation.start(node, payload)

    @rule(which=WHICH, duration_s=st.sampled_from([0.4, 3.0, 45.0]))
    def pause(self, which: int, duration_s: float) -> None:
        if self.node(which).is_up:
            self.simulation.pause(self.node(which), duration_s)

    @rule(which=WHICH, payload=st.binary(max_size=3))
    def change_record(self, which: int, payload: bytes) -> None:
        self.simulation.publish(self.node(which), payload)

    @rule(side=st.sets(WHICH, min_size=1, max_size=3), both=st.booleans())
    def cut(self, side: set[int], both: bool) -> None:
        self.simulation.network.cut(side, both=both)

    @rule()
    def heal(self) -> None:
        self.simulation.network.heal()

    @rule(a=WHICH, b=WHICH, loss=st.sampled_from([0.0, 0.5, 1.0]), jitter_s=st.sampled_from([0.0, 0.4]))
    def change_link(self, a: int, b: int, loss: float, jitter_s: float) -> None:
        link = self.simulation.network.own_link(self.node(a).index, self.node(b).index)
        link.loss, link.jitter_s = loss, jitter_s

    @rule(duration_s=st.sampled_from([0.05, 1.0, 5.0, 30.0]))
    def time_passes(self, duration_s: float) -> None:
        self.simulation.run(duration_s)

    # Once in a swarm: it takes longer than everything else together.
    @precondition(lambda self: not self.has_forgotten)
    @rule()
    def the_dead_are_forgotten(self) -> None:
        self.has_forgotten = True
        self.simulation.run(self.simulation.settings.dead_s + 100.0)

    def teardown(self) -> None:
        """All is well again: all nodes on, no cuts, few packets lost. Then they must come to agree."""
        simulation = self.simulation
        if simulation is None:
            return
        network = simulation.network
        network.heal()
        network.links.clear()
        network.link.loss = min(network.link.loss, 0.05)
        for node in simulation.nodes:
            if not node.is_up:
                simulation.start(node)
        simulation.run(max(node.paused_until_s or simulation.now_s for node in simulation.nodes) - simulation.now_s)
        assert simulation.run(CALM_S, until=simulation.views_agree), [
            [member.update() for member in node.core.members] for node in simulation.up
        ]
        self.checks.check_everything()


def hunt(examples: int, steps: int) -> None:
    """More of it, at random: for scripts/soak."""
    more = settings(TestSwarm.settings, max_examples=examples, stateful_step_count=steps, derandomize=False)
    run_state_machine_as_test(Swarm, settings=more)


TestSwarm = Swarm.TestCase
TestSwarm.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
