"""What is done to simulated swarms, and what is promised then.

A scenario is a function of a `Run`. It fails by `PromiseBroken` or `gossip.simulate.invariants.InvariantViolated`; both
say how to see it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from gossip.simulate.run import AFTERMATH_S, JOIN_S, Figures, Options, Run
from gossip.simulate.simulation import Node
from gossip.swim.events import Notify

#: Promises, in simulated seconds. A crash is known to all live nodes; of larger swarms it is only reported.
DETECTION_S = {3: 8.0, 100: 16.0}
#: The views of all are equal after everything is well again.
HEAL_S = 30.0
#: The same after a mix of all faults, some of which only just happened.
CALM_S = 90.0

# The news of the start is told for so long at most: each of n nodes tells of all n, 4·log10 n times, 20 in a packet,
# 15 packets a second.
_QUIET_S = 300.0
_NEWS_QUIET = 3
_CUT_S = 60.0
_PAUSE_S = 45.0  # what a laptop with a closed lid does, or a process under SIGSTOP
_RECORD_CHANGES = 20
_CRASHES = 3


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
    run.simulation.run(AFTERMATH_S)
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
    run.simulation.run(AFTERMATH_S)
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
    run.settle(JOIN_S, "after half started")
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
    """Makes everything well again: no cuts, no pauses, the network as it was, all nodes on. Then views must agree."""
    simulation = run.simulation
    run.heal()
    simulation.network.links.clear()
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
    if len(run.simulation.network.cuts) < 2:
        run.cut(run.some(run.simulation.random.uniform(0, 0.5)), both=run.simulation.random.random() < 0.6)


def _heal(run: Run) -> None:
    run.heal()


def _worsen_link(run: Run) -> None:
    a, b = run.simulation.random.choices(range(len(run.simulation.nodes)), k=2)
    link = run.simulation.network.own_link(a, b)
    link.loss = run.simulation.random.uniform(0, 0.5)
    link.jitter_s = run.simulation.random.uniform(0, 0.3)
    link.duplicates = run.simulation.random.uniform(0, 0.2)


_FAULTS = (_stop_one, _start_one, _start_one, _pause_one, _change_record, _cut_some, _heal, _heal, _worsen_link)

#: The scenarios by the names that the command takes.
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
