"""``swarm-node model``: what is in a model file, and files to test with."""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.commands.model_list import add_list, add_prune

if TYPE_CHECKING:
    # argparse's subparsers have no public type.
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_model_command(commands: Commands) -> None:
    """Adds ``model`` and what it can do to the program's commands. `options.run` becomes a coroutine function that
    takes the parsed arguments and returns the exit status."""
    model = commands.add_parser(
        "model", help="list the swarm's models, look at model files, and make some to test with"
    )
    parts = model.add_subparsers(required=True, metavar="COMMAND")
    for add in (add_list, _add_show, add_prune, _add_synthetic):
        add(parts)


def _add_show(parts: Commands) -> None:
    show = parts.add_parser(
        "show",
        help="show what is in a model file, and what of it fits where",
        description="Shows a model's sizes, quantisation and id, what of it fits into this machine, and how many "
        "machines it "
        "needs. Reads the header only, and all of the file once with --hash.",
        epilog="example: swarm-node model show model.gguf --memory 16 16 8",
    )
    show.add_argument("path", type=Path, metavar="FILE", help="a GGUF file, or any part of a split one")
    show.add_argument("--memory", type=_gib, nargs="+", default=[], metavar="GIB", help="memory of machines you have")
    show.add_argument("--hash", action="store_true", help="compute the model's id, if it is not known yet")
    show.add_argument("--json", action="store_true", help="JSON, for scripts")
    show.set_defaults(run=_run_show)


async def _run_show(options: argparse.Namespace) -> int:
    import json

    from rich.console import Console

    from node.commands.model_show import model_document, print_model
    from node.models.hashing import local_manifest
    from node.models.index import read_model

    index = await asyncio.to_thread(read_model, options.path)
    if options.hash:
        await _with_progress(f"hashing {options.path.name}", lambda progress: local_manifest(index, progress))
    document = await asyncio.to_thread(model_document, index, options.memory)
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        print_model(document, Console(highlight=False))
    return 0


def _add_synthetic(parts: Commands) -> None:
    synthetic = parts.add_parser(
        "synthetic",
        help="write a model of a known shape with random weights",
        description="Writes a GGUF file with the sizes and quantisation of a known model and random weights, which "
        "llama.cpp "
        "runs like the real one: to measure, and to test a swarm.",
        epilog="example: swarm-node model synthetic qwen3-30b-a3b big.gguf --layers 4",
    )
    synthetic.add_argument("shape", metavar="SHAPE", help="qwen3-30b-a3b (18.6 GB) or qwen3.5-122b (74 GB)")
    synthetic.add_argument("path", type=Path, metavar="PATH", help="the file to write; an old one is replaced")
    synthetic.add_argument("--layers", type=_positive, metavar="N", help="only the first N layers")
    synthetic.add_argument(
        "--type", metavar="T", help="all expert tensors in this type, such as q8_0 (default: as Q4_K_M)"
    )
    synthetic.add_argument("--seed", type=_count, default=0, metavar="N", help="other random weights (default: 0)")
    synthetic.set_defaults(run=_run_synthetic)


async def _run_synthetic(options: argparse.Namespace) -> int:
    from rich.console import Console

    from node.errors import ModelError
    from node.models.random_blocks import BLOCK_TYPES
    from node.models.synthetic import SHAPES, write_synthetic_model

    if options.shape not in SHAPES:
        raise ModelError(f"there is no shape {options.shape!r}; there are {', '.join(SHAPES)}")
    by_lower_case = {type_name.lower(): type_name for type_name in BLOCK_TYPES}
    size_bytes = await _with_progress(
        f"writing {options.path.name}",
        lambda progress: write_synthetic_model(
            SHAPES[options.shape],
            options.path,
            layers=options.layers,
            expert_type=by_lower_case.get(options.type.lower(), options.type) if options.type else None,
            seed=options.seed,
            progress=progress,
        ),
    )
    Console(stderr=True, highlight=False).print(f"{options.path}: {size_bytes / 1e9:.2f} GB", soft_wrap=True)
    return 0


class _Cancelled(Exception):
    pass


async def _with_progress(title: str, work: Callable[[Callable[[int, int], None]], Any]) -> Any:
    """Runs `work` in a thread, with a bar on stderr when that is a terminal. `work` is given a function to call with
    (bytes done, bytes in all), which raises when this call is cancelled; this call then waits for `work` to end."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    stop = threading.Event()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)

        def report(done: int, total: int) -> None:
            if stop.is_set():
                raise _Cancelled
            bar.update(task, completed=done, total=total)

        thread = asyncio.ensure_future(asyncio.to_thread(work, report))
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.gather(thread, return_exceptions=True)
            raise


def _gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a memory size in GiB")
    return value


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return int(text)
