"""``python -m gossip.simulate``: what a swarm does in a network, in figures, and the seed that shows it again."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence

from gossip.simulate.invariants import InvariantViolated
from gossip.simulate.run import Figures, Options, PromiseBroken
from gossip.simulate.scenarios import SCENARIOS, play
from gossip.simulate.simulation import Node
from gossip.swim.events import Notify

_COLUMNS: tuple[tuple[str, Callable[[Figures], float | int | None], str], ...] = (
    ("joined s", lambda figures: max(figures.join_s, default=None), ".1f"),
    ("crash known s", lambda figures: max(figures.detection_s, default=None), ".1f"),
    ("goodbye known s", lambda figures: max(figures.leave_s, default=None), ".1f"),
    ("healed s", lambda figures: max(figures.heal_s, default=None), ".1f"),
    ("record p50 s", lambda figures: statistics.median(figures.record_s) if figures.record_s else None, ".1f"),
    ("record max s", lambda figures: max(figures.record_s, default=None), ".1f"),
    ("suspicions", lambda figures: figures.suspicions, "d"),
    ("false deaths", lambda figures: figures.false_deaths, "d"),
    ("packets/s", lambda figures: statistics.mean(figures.packets) if figures.packets else None, ".2f"),
    ("bytes/s", lambda figures: statistics.mean(figures.bytes) if figures.bytes else None, ".0f"),
    ("x real time", lambda figures: statistics.mean(figures.speed) if figures.speed else None, ".0f"),
)

_DESCRIPTION = "Simulates a swarm of gossiping nodes and reports what it does. The same seed gives the same run."
_EPILOG = """scenarios:
{scenarios}

columns (maximum over all runs, in simulated seconds, unless they say otherwise):
  joined           until all know all, after all started
  crash known      until all live nodes know of a crash;  goodbye known: the same for one that leaves
  healed           until all views are right again
  record           until all have a changed record
  suspicions       how often some node suspected another, right or wrong
  false deaths     how often some node thought one dead that was well
  packets, bytes   sent per node and second while nothing happens: UDP packets; bytes with headers, and TCP's
  x real time      simulated seconds in one second of CPU time, while nothing happens

Exit status 1: a promise was broken or an invariant violated; the command that shows it again is printed.
"""


def _parser() -> argparse.ArgumentParser:
    scenarios = "\n".join(
        f"  {name:17}{(function.__doc__ or '').splitlines()[0]}" for name, function in SCENARIOS.items()
    )
    parser = argparse.ArgumentParser(
        prog="python -m gossip.simulate",
        description=_DESCRIPTION,
        epilog=_EPILOG.format(scenarios=scenarios),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--scenario", choices=[*SCENARIOS, "all"], default="steady", help="default: steady", metavar="NAME"
    )
    parser.add_argument(
        "--nodes", type=_number(int, 2, 2000), default=Options.nodes, help="2 to 2000; default: %(default)s"
    )
    parser.add_argument("--seed", type=_number(int, 0, 2**63), default=1, help="default: %(default)s")
    parser.add_argument("--seeds", type=_number(int, 1, 10**6), default=1, help="runs so many, from --seed on")
    parser.add_argument(
        "--minutes",
        type=_number(float, 0.1, 10**5),
        default=Options.minutes,
        help="simulated, of steady, clocks and random; default: %(default)g",
    )
    parser.add_argument(
        "--loss",
        type=_number(float, 0, 0.99),
        default=Options.loss,
        help="share of packets lost in each direction, 0.05 is 5 %%",
    )
    parser.add_argument(
        "--delay-ms",
        type=_number(float, 0, 10**4),
        default=Options.delay_ms,
        help="of each packet, at least; default: %(default)g",
    )
    parser.add_argument(
        "--jitter-ms",
        type=_number(float, 0, 10**4),
        default=Options.jitter_ms,
        help="more delay, at random, which reorders; default: %(default)g",
    )
    parser.add_argument(
        "--duplicates", type=_number(float, 0, 1), default=Options.duplicates, help="share of packets that come twice"
    )
    parser.add_argument("--no-checks", action="store_true", help="without invariants: twice as fast")
    parser.add_argument("--trace", action="store_true", help="print what each node notices, to stderr")
    parser.add_argument("--json", action="store_true", help="one JSON object per scenario instead of the table")
    return parser


def _number(kind: type, least: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value: float = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not between {least:g} and {most:g}")
        return value

    parse.__name__ = "number"
    return parse


def _print_notice(now_s: float, node: Node, notify: Notify) -> None:
    print(
        f"{now_s:10.3f}  node {node.index:<4} {notify.change.value:10} {notify.node.hex()}  {notify.detail}",
        file=sys.stderr,
    )


def _print_row(name: str, figures: Figures) -> None:
    cells = [_cell(value(figures), form).rjust(max(len(title), 7)) for title, value, form in _COLUMNS]
    print(f"{name:17} " + "  ".join(cells), flush=True)


def _cell(value: float | int | None, form: str) -> str:
    return "" if value is None else format(value, form)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    chosen = _parser().parse_args(arguments)
    options = Options(
        nodes=chosen.nodes,
        loss=chosen.loss,
        delay_ms=chosen.delay_ms,
        jitter_ms=chosen.jitter_ms,
        duplicates=chosen.duplicates,
        minutes=chosen.minutes,
        check=not chosen.no_checks,
    )
    names = list(SCENARIOS) if chosen.scenario == "all" else [chosen.scenario]
    if not chosen.json:
        last = chosen.seed + chosen.seeds - 1
        print(f"{chosen.nodes} nodes, {100 * chosen.loss:g} % of packets lost, seeds {chosen.seed} to {last}")
        print(" " * 18 + "  ".join(title.rjust(7) for title, _, _ in _COLUMNS))
    failed = False
    for name in names:
        figures = Figures()
        for seed in range(chosen.seed, chosen.seed + chosen.seeds):
            try:
                figures.add(play(name, options, seed, _print_notice if chosen.trace else None))
            except (PromiseBroken, InvariantViolated) as error:
                failed = True
                print(f"{name}: {error}", file=sys.stderr, flush=True)
        if chosen.json:
            print(json.dumps({"scenario": name, "nodes": chosen.nodes, **vars(figures)}), flush=True)
        else:
            _print_row(name, figures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
