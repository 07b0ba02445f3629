"""The command ``swarm-node``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import logging
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

from node.errors import SwarmError


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if options.verbose else logging.CRITICAL,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        return asyncio.run(_until_signalled(options.run(options)))
    except* (SwarmError, FileNotFoundError) as group:
        for error in _leaves(group):
            print(f"swarm-node: {error}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="swarm-node",
        description="Ordinary machines of one LAN serve one Mixture-of-Experts model that none of them could hold alone.",
    )
    parser.add_argument("--version", action="version", version=f"swarm-node {_version()}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what happens inside, on stderr")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="a swarm of several processes on this machine, with a small built-in chat model",
        description="Carves SmolLM2-135M into a Mixture of Experts (once, in the cache folder), starts expert servers on "
        "loopback that share every layer's experts, and llama-server over them, which holds no expert itself.",
        epilog='example: swarm-node demo --nodes 3 --ask "What is the capital of France? Tell me one fact about it."',
    )
    demo.add_argument("--nodes", type=_node_count, default=3, metavar="N", help="expert servers, 1 to 8 (default: 3)")
    demo.add_argument("--ask", metavar="TEXT", help="answer this and exit; without it, a chat prompt")
    demo.add_argument("--json", action="store_true", help="one JSON object per event on stdout, for scripts")
    demo.add_argument(
        "--reduce",
        choices=("rows", "sum"),
        default="rows",
        help="what experts send back: each row (the bits of one machine; default) or sums (less traffic)",
    )
    demo.add_argument("--max-tokens", type=int, default=256, metavar="N", help="longest answer (default: 256)")
    demo.set_defaults(run=_demo)
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("swarm-node")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: run from a source tree)"


def _node_count(text: str) -> int:
    value = int(text)
    # The demo model has 8 experts a layer.
    if not 1 <= value <= 8:
        raise argparse.ArgumentTypeError("must be 1 to 8: the demo model has 8 experts a layer")
    return value


def _demo(options: argparse.Namespace) -> Coroutine[Any, Any, int]:
    from node.demo import DemoOptions, run_demo

    return run_demo(
        DemoOptions(
            nodes=options.nodes,
            ask=options.ask,
            json=options.json,
            reduce=options.reduce,
            max_tokens=options.max_tokens,
        )
    )


async def _until_signalled(work: Coroutine[Any, Any, int]) -> int:
    """Runs ``work``; SIGINT, SIGTERM and SIGHUP cancel it, so that everything it started is ended in order."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    caught: list[int] = []

    def stop(number: int) -> None:
        caught.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number)
    with contextlib.suppress(asyncio.CancelledError):
        return await task
    return 128 + caught[0] if caught else 1


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return leaves


if __name__ == "__main__":
    sys.exit(main())
