"""The command ``swarm-node``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from node.commands.model import add_model_command
from node.commands.verify import add_verify_command
from node.errors import ConfigError, SwarmError
from node.settings.load import add_flags
from node.version import version

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

#: Has a long answer, also from a model that knows little.
TRACE_PROMPT = "Write a long story about a cat who lives in Paris."


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # `swarm-node` alone, or with settings only, runs a node.
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help", "--version", "-v", "--verbose")):
        given.insert(0, "run")
    options = _parser().parse_args(given)
    try:
        return _run(options)
    except KeyboardInterrupt:  # before the signals were taken over
        return 128 + signal.SIGINT


def _run(options: argparse.Namespace) -> int:
    if options.run is not _run_node:  # which has settings for its log
        logging.basicConfig(
            level=logging.DEBUG if options.verbose else logging.CRITICAL,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
    return_status = 1
    try:
        return asyncio.run(_until_signalled(options.run(options)))
    except* ConfigError as group:
        for error in _leaves(group):
            print(error, file=sys.stderr)
        return_status = 2
    except* (SwarmError, FileNotFoundError) as group:
        for error in _leaves(group):
            print(f"swarm-node: {error}", file=sys.stderr)
    except* BrokenPipeError:
        # Whoever read stdout is gone (`| head -1`). What Python flushes at its end must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return return_status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="swarm-node",
        description="Ordinary machines of one LAN serve one Mixture-of-Experts model that none could hold alone. "
        "Without a command, runs a node: `swarm-node --model FILE` on the machine that has the model, `swarm-node` on "
        "the others.",
    )
    parser.add_argument("--version", action="version", version=f"swarm-node {version()}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what happens inside, on stderr")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    _add_questions(commands)
    _add_doctor(commands)
    _add_report(commands)
    add_model_command(commands)
    add_verify_command(commands)
    _add_keygen(commands)
    _add_demo(commands)
    return parser


def _add_run(commands: Commands) -> None:
    run = commands.add_parser(
        "run",
        help="run a node (the default)",
        description="Runs a node until Ctrl-C. Settings come from swarm.toml, SWARM_SECTION_NAME variables and these "
        "flags.",
        epilog="examples: swarm-node --model model.gguf    swarm-node    swarm-node --seed 192.168.1.5:4100",
        allow_abbrev=False,
    )
    add_flags(run)
    run.set_defaults(run=_run_node)


def _add_questions(commands: Commands) -> None:
    """The commands that ask a running node."""
    ask = commands.add_parser(
        "ask",
        help="ask the swarm a question",
        description="Streams the answer of a running swarm: of this machine's node, of one found on the network, or of "
        "--url.",
        epilog='example: swarm-node ask "What is the capital of France?"',
    )
    ask.add_argument("text", type=_question, metavar="TEXT")
    ask.add_argument("--max-tokens", type=_token_count, default=512, metavar="N", help="longest answer (default: 512)")
    status = commands.add_parser(
        "status",
        help="show nodes, slices, router, and what is missing",
        description="Shows the swarm as a node sees it. Exit status 0: ready for queries; 3: not.",
    )
    peers = commands.add_parser(
        "peers",
        help="show how the other nodes were found, and which of their addresses answer",
        description="Shows every node that this one knows: how it was found, which of its addresses is used, and why "
        "another is not; and what was announced or named and does not answer.",
    )
    trace = commands.add_parser(
        "trace",
        help="show where the time of a token went, by node and layer",
        description="Has the swarm write a short answer, and shows what its tokens took: the trunk on the router, "
        "making requests, waiting for each node, adding up. A node's `alone` is how long it held up layers after all "
        "others had answered.",
    )
    for command, work in ((ask, _ask), (status, _status), (peers, _peers), (trace, _trace)):
        command.add_argument("--url", metavar="URL", help="a node, http://HOST:PORT (default: found by itself)")
        command.add_argument("--json", action="store_true", help="JSON, for scripts")
        command.add_argument("--config", metavar="FILE", help="swarm.toml with this machine's port")
        command.set_defaults(run=work)
    for command in (ask, trace):
        command.add_argument(
            "--api-key", default=os.environ.get("SWARM_API_KEY", ""), metavar="KEY", help="the swarm's API key"
        )
    what = trace.add_mutually_exclusive_group()
    what.add_argument(
        "--watch", type=_seconds, metavar="SECONDS", help="ask for nothing, show what the swarm does in this time"
    )
    what.add_argument("--prompt", type=_question, default=TRACE_PROMPT, metavar="TEXT", help="what is to be answered")


def _add_doctor(commands: Commands) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check this machine",
        description="Checks what a node needs on this machine (build, devices, memory, ports, network) and says what "
        "to do. Takes the settings of `run`. Exit status 0: nothing failed; 1: something did.",
        allow_abbrev=False,
    )
    doctor.add_argument("--json", action="store_true", help="JSON, for scripts")
    add_flags(doctor)
    doctor.set_defaults(run=_doctor)


def _add_report(commands: Commands) -> None:
    report = commands.add_parser(
        "report",
        help="collect what a bug report needs, without keys and questions, in one archive",
        description="Writes an archive for a bug report: status, peers, trace and metrics of the node that this "
        "machine runs, doctor, settings, versions, and the last log lines of the node and its children. Where the "
        "node does not run, the rest. Keys, questions and answers are not in it; addresses and names are. Takes the "
        "settings of `run`, so that it finds a node that was started with them.",
        epilog="examples: swarm-node report    swarm-node report bug.tar.gz    swarm-node report --name b --port 4200",
        allow_abbrev=False,
    )
    report.add_argument(
        "file", nargs="?", metavar="FILE", help="the archive (default: swarm-node-report-NAME-DATE.tar.gz)"
    )
    report.add_argument("--force", action="store_true", help="replace FILE if it is there")
    report.add_argument("--url", metavar="URL", help="a node, http://HOST:PORT (default: found by itself)")
    report.add_argument("--json", action="store_true", help="JSON with the path and what is in it, for scripts")
    add_flags(report)
    report.set_defaults(run=_report)


def _add_keygen(commands: Commands) -> None:
    keygen = commands.add_parser(
        "keygen",
        help="make a swarm key",
        description="Prints a new swarm key: put it into `[swarm] key` of swarm.toml on every machine of the swarm.",
    )
    keygen.set_defaults(run=_keygen)


def _add_demo(commands: Commands) -> None:
    demo = commands.add_parser(
        "demo",
        help="a swarm of several processes on this machine, with a small built-in chat model",
        description="Carves SmolLM2-135M into a Mixture of Experts (once, in the cache folder), starts expert servers "
        "on loopback that share every layer's experts, and llama-server over them, which holds no expert itself.",
        epilog='example: swarm-node demo --nodes 3 --ask "What is the capital of France? Tell me one fact about it."',
    )
    demo.add_argument("--nodes", type=_node_count, default=3, metavar="N", help="expert servers, 1 to 8 (default: 3)")
    demo.add_argument("--ask", type=_question, metavar="TEXT", help="answer this and exit; without it, a chat prompt")
    demo.add_argument("--json", action="store_true", help="one JSON object per event on stdout, for scripts")
    demo.add_argument(
        "--reduce",
        choices=("rows", "sum"),
        default="rows",
        help="what experts send back: each row (the bits of one machine; default) or sums (less traffic)",
    )
    demo.add_argument("--max-tokens", type=_token_count, default=256, metavar="N", help="longest answer (default: 256)")
    demo.set_defaults(run=_demo)


def _node_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 8:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 to 8: the demo model has 8 experts a layer")
    return int(text)


def _token_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 86400")
    return seconds


def _question(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("the question is empty")
    return text


def _run_node(options: argparse.Namespace) -> Coroutine[Any, Any, int]:
    from node.commands.run import run_node

    return run_node(options)


def _ask(options: argparse.Namespace) -> Coroutine[Any, Any, int]:
    from node.commands.ask import run_ask

    return run_ask(options)


def _status(options: argparse.Namespace) -> Coroutine[Any, Any, int]:
    from node.commands.status import run_status

    return run_status(options)


def _peers(options: argparse.Namespace) -> Coroutine[Any, Any, int]:
    from node.commands.peers import run_peers

    return run_peers(options)


def _trace(options: argparse.Namespace) -> Coroutine[Any, Any, int]:
    from node.commands.trace import run_trace

    return run_trace(options)


def _doctor(options: argparse.Namespace) -> Coroutine[Any, Any, int]:
    from node.commands.doctor import run_doctor

    return run_doctor(options)


def _report(options: argparse.Namespace) -> Coroutine[Any, Any, int]:
    from node.commands.report import run_report

    return run_report(options)


async def _keygen(options: argparse.Namespace) -> int:
    from node.swarm_key import SwarmKey

    print(SwarmKey.generate().text())
    return 0


def _demo(options: argparse.Namespace) -> Coroutine[Any, Any, int]:
    from node.commands.demo import DemoOptions, run_demo

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
