"""The long checks behind scripts/soak, in named suites: each prints its seed, so that a failure can be run again.

What has passed is kept in build/soak.json, by commit: a run that was cut short goes on where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STATE = ROOT / "build" / "soak.json"

#: What the tests do with fewer seeds, and swarms of 1,000.
GOSSIP = (
    "--scenario crash --nodes 100 --seeds 20",
    "--scenario cut-and-heal --nodes 100 --seeds 20",
    "--scenario one-way-cut --nodes 100 --seeds 20",
    "--scenario steady --nodes 100 --seeds 20 --loss 0.05",
    "--scenario record-change --nodes 100 --seeds 20",
    "--scenario random --nodes 100 --seeds 5 --loss 0.02",
    "--scenario steady --nodes 1000 --minutes 2 --no-checks",
    "--scenario crash --nodes 1000 --no-checks",
    "--scenario record-change --nodes 1000 --no-checks",
    "--scenario cut-and-heal --nodes 1000 --no-checks",
)


@dataclass(frozen=True)
class Limits:
    """How much of it: ``seconds`` for each fuzz and repetition, ``seed`` for what is random."""

    seconds: float
    seed: int


def of_tests(path: str) -> Any:
    """A module of tests, whose fuzz is run for longer here."""
    sys.path[:0] = [] if str(ROOT / "tests") in sys.path else [str(ROOT / "tests")]
    spec = importlib.util.spec_from_file_location("soak_" + Path(path).stem, ROOT / "tests" / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def decoder(limits: Limits) -> str:
    """Mutated expert calls, decoded or refused."""
    accepted = of_tests("node/expert_server/test_wire.py").fuzz(limits.seconds, limits.seed)
    return f"{accepted} mutants accepted"


def headers(limits: Limits) -> str:
    """Damaged headers of model files: a typed error or a model, within a second and 64 MiB."""
    with tempfile.TemporaryDirectory() as folder:
        count, good = of_tests("node/models/test_index.py").fuzz(Path(folder), limits.seconds, limits.seed)
    return f"{count} damaged headers, {good} of them still models"


def server(limits: Limits) -> str:
    """Mutated expert calls to an expert server, which lives."""
    module = of_tests("node/expert_server/test_server.py")
    from rigs.fake_server import order, server  # type: ignore[import-not-found,unused-ignore]

    async def fuzz() -> int:
        async with server(order(), max_rows=16) as process:
            return int(await module.fuzz(process, limits.seconds, limits.seed))

    return f"{asyncio.run(fuzz())} mutants computed"


def simulate(arguments: str) -> None:
    """Simulated swarms; their figures go to stdout."""
    print(f"python -m gossip.simulate {arguments}", flush=True)
    subprocess.run([sys.executable, "-m", "gossip.simulate", *arguments.split()], cwd=ROOT, check=True)


def fire(limits: Limits) -> str:
    """Small simulated swarms under random faults."""
    end_s = time.monotonic() + limits.seconds
    seed = limits.seed
    while seed == limits.seed or time.monotonic() < end_s:
        simulate(
            f"--scenario random --nodes {2 + seed % 12} --seed {seed} --loss 0.03 --duplicates 0.02 --jitter-ms 50"
        )
        seed += 1
    return f"{seed - limits.seed} swarms"


def machine(limits: Limits) -> str:
    """A state machine of gossip cores under faults, by hypothesis."""
    of_tests("gossip/test_machine.py").hunt(examples=2000, steps=60)
    return "2,000 examples"


def run_tests(*arguments: str) -> None:
    """Tests of the checkout."""
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", *arguments], cwd=ROOT, check=True)


def repeat(tests: str, limits: Limits) -> str:
    """A selection of tests again and again."""
    end_s = time.monotonic() + limits.seconds
    rounds = 0
    while rounds == 0 or time.monotonic() < end_s:
        run_tests(tests)
        rounds += 1
    return f"{rounds} rounds"


def faults(limits: Limits) -> str:
    """Whole swarms and what breaks them, over and over."""
    return repeat("tests/swarm/test_faults.py", limits)


def exactness(limits: Limits) -> str:
    """The swarm against stock llama.cpp, over and over."""
    return repeat("tests/swarm/test_exactness.py", limits)


def long_tests(limits: Limits) -> str:
    """The tests that are marked `soak`: more seeds, sizes and architectures than CI has time for."""
    run_tests("-m", "soak")
    return "passed"


def gossip_suites() -> dict[str, Callable[[Limits], str]]:
    """One suite for each line of GOSSIP: gossip-1, gossip-2, …"""

    def suite(arguments: str) -> Callable[[Limits], str]:
        def run(limits: Limits) -> str:
            simulate(arguments)
            return "held"

        run.__doc__ = f"python -m gossip.simulate {arguments}"
        return run

    return {f"gossip-{number}": suite(arguments) for number, arguments in enumerate(GOSSIP, 1)}


SUITES: dict[str, Callable[[Limits], str]] = {
    "decoder": decoder,
    "headers": headers,
    "server": server,
    **gossip_suites(),
    "fire": fire,
    "machine": machine,
    "long-tests": long_tests,
    "faults": faults,
    "exactness": exactness,
}


def commit() -> str:
    """What is checked out; with changes that are not committed, a name that no other run has."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout
    return f"{head}+{time.time_ns()}" if changed or not head else head


def passed(at: str) -> dict[str, str]:
    """What of the suites has passed at a commit, with its figures. A file that is damaged says nothing."""
    try:
        found = json.loads(STATE.read_text())
        return {str(k): str(v) for k, v in found["passed"].items()} if found["commit"] == at else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def keep(at: str, results: dict[str, str]) -> None:
    """Keeps what has passed, for the next run."""
    STATE.parent.mkdir(exist_ok=True)
    unfinished = STATE.with_suffix(".part")
    unfinished.write_text(json.dumps({"commit": at, "passed": results}, indent=1))
    unfinished.replace(STATE)


def chosen(names: list[str]) -> list[str]:
    """The suites of these names; ``gossip`` is all that begin so. Raises ValueError naming what is none."""
    found: list[str] = []
    for name in names:
        matching = [suite for suite in SUITES if suite == name or suite.startswith(f"{name}-")]
        if not matching:
            raise ValueError(f"there is no suite {name}; suites are {', '.join(SUITES)}")
        found += matching
    return list(dict.fromkeys(found)) or list(SUITES)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="which (default: all)")
    parser.add_argument("--list", action="store_true", help="show the suites, and which have passed on this commit")
    parser.add_argument("--again", action="store_true", help="run what has passed as well")
    parser.add_argument("--minutes", type=float, default=10, help="for each fuzz and repetition (default: 10)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the fuzzes (default: the clock)")
    options = parser.parse_args()
    try:
        suites = chosen(options.suites)
    except ValueError as error:
        parser.error(str(error))
    at = commit()
    results = passed(at)
    if options.list:
        for name in suites:
            print(f"{name:12} {'passed: ' + results[name] if name in results else SUITES[name].__doc__}")
        return 0
    failed = []
    for name in suites:
        if name in results and not options.again:
            print(f"{name}: has passed on this commit ({results[name]})")
            continue
        print(f"{name}: {SUITES[name].__doc__} Seed {options.seed}", flush=True)
        started_s = time.monotonic()
        try:
            figures = SUITES[name](Limits(options.minutes * 60, options.seed))
        except (Exception, SystemExit) as error:
            failed.append(name)
            print(f"{name}: FAILED: {error}", flush=True)
            continue
        results[name] = f"{figures}, {time.monotonic() - started_s:.0f} s"
        print(f"{name}: {results[name]}", flush=True)
        keep(at, results)
    if failed:
        print(f"failed: {', '.join(failed)}; with --seed {options.seed} they run as they did")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
