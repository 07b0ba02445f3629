"""The long checks behind scripts/soak: each prints its seed, so that a failure can be run again."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("", "node/expert_server", "node/models", "gossip")
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in FOLDERS]

import test_index  # noqa: E402
import test_machine  # noqa: E402
import test_server  # noqa: E402
import test_wire  # noqa: E402

from rigs.fake_server import order, server  # noqa: E402

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


def simulate(arguments: str) -> None:
    """Simulated swarms; their figures go to stdout."""
    subprocess.run([sys.executable, "-m", "gossip.simulate", *arguments.split()], cwd=ROOT, check=True)


def swarms_under_fire(seconds: float, seed: int) -> int:
    """Random faults in small swarms, for so long; how many."""
    end_s = time.monotonic() + seconds
    first = seed
    while seed == first or time.monotonic() < end_s:
        simulate(
            f"--scenario random --nodes {2 + seed % 12} --seed {seed} --loss 0.03 --duplicates 0.02 --jitter-ms 50"
        )
        seed += 1
    return seed - first


async def fuzz_server(seconds: float, seed: int) -> int:
    async with server(order(), max_rows=16) as process:
        return await test_server.fuzz(process, seconds, seed)


def repeat(tests: str, seconds: float) -> int:
    """Runs a test selection again and again; how often."""
    end_s = time.monotonic() + seconds
    rounds = 0
    while rounds == 0 or time.monotonic() < end_s:
        subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", *tests.split()], cwd=ROOT, check=True)
        rounds += 1
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="for each check (default: 10)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the fuzzes (default: the clock)")
    options = parser.parse_args()
    seconds = options.minutes * 60
    print(f"seed {options.seed}")
    print("decoder fuzz:", test_wire.fuzz(seconds, options.seed), "mutants accepted")
    with tempfile.TemporaryDirectory() as folder:
        count, good = test_index.fuzz(Path(folder), seconds, options.seed)
    print(f"header fuzz: {count} damaged headers, {good} of them still models")
    print("server fuzz:", asyncio.run(fuzz_server(seconds, options.seed)), "mutants computed")
    for arguments in GOSSIP:
        simulate(arguments)
    print("swarms under fire:", swarms_under_fire(seconds, options.seed))
    test_machine.hunt(examples=2000, steps=60)
    print("faults, over and over:", repeat("tests/swarm/test_faults.py", seconds), "rounds")
    print("exactness, over and over:", repeat("tests/swarm/test_exactness.py", seconds), "rounds")


if __name__ == "__main__":
    main()
