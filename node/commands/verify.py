"""``swarm-node verify``: the equivalence matrix, on a screen, as JSON or as Markdown."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from node.errors import ModelError, SwarmError

if TYPE_CHECKING:
    import aiohttp

    from node.commands.verify_matrix import Backend, Outcome, Subject
    from node.models.index import ModelIndex

    # argparse's subparsers have no public type.
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
    _Done = tuple[Subject, Sequence[Backend], Outcome]

_SHAPE = "qwen3.5-122b"
# The size of a synthetic layer without --full: enough to see a type's noise, and computed in seconds.
_FEW_EXPERTS = 8
_PEER_TIMEOUT_S = 180.0


def add_verify_command(commands: Commands) -> None:
    """Adds ``verify`` to the program's commands; `options.run` becomes a coroutine function as the others'."""
    verify = commands.add_parser(
        "verify",
        help="compare what different hardware computes, with the same input",
        description="Computes the same experts on every device of this build, in NumPy with float64, and, for a "
        "model that a running swarm serves, on every live node; and shows how alike the results are. Without --model: "
        f"random weights in the shape of a layer of {_SHAPE}. Exit status 0: all within the limits; 1: not.",
        epilog="examples: swarm-node verify --full    swarm-node verify --type q8_0 f16    swarm-node verify --model "
        "model.gguf --layer 3",
    )
    _add_flags(verify)
    verify.set_defaults(run=run_verify)


def _add_flags(verify: argparse.ArgumentParser) -> None:
    verify.add_argument(
        "--model", type=Path, metavar="FILE", help="a GGUF file; nodes of a swarm that serves it take part"
    )
    verify.add_argument(
        "--layer", type=_count, metavar="N", help="with --model: which layer (default: the first with experts)"
    )
    verify.add_argument("--experts", type=_range, metavar="A-B", help="with --model: which experts (default: all)")
    verify.add_argument(
        "--shape", default=_SHAPE, metavar="SHAPE", help=f"random weights in this shape (default: {_SHAPE})"
    )
    verify.add_argument(
        "--type",
        nargs="+",
        default=[],
        metavar="T",
        help="random weights of these types, one after the other (default: as Q4_K_M)",
    )
    verify.add_argument(
        "--full", action="store_true", help=f"all experts of the layer of random weights, not {_FEW_EXPERTS}"
    )
    verify.add_argument(
        "--rows",
        type=_row_count,
        nargs="+",
        metavar="N",
        help="rows with each expert (default: 1 8 33 512; with --full 1 8 33)",
    )
    verify.add_argument(
        "--device",
        nargs="+",
        default=[],
        metavar="NAME",
        help="only these devices of this build (default: all that can)",
    )
    verify.add_argument(
        "--seed", type=_count, default=0, metavar="N", help="other inputs and random weights (default: 0)"
    )
    verify.add_argument("--no-nodes", action="store_true", help="only this machine, whatever swarm runs")
    verify.add_argument("--url", metavar="URL", help="a node of the swarm, http://HOST:PORT (default: found by itself)")
    verify.add_argument("--config", metavar="FILE", help="swarm.toml with this machine's port and the swarm's key")
    verify.add_argument(
        "--decisions",
        action="store_true",
        help="instead: how many choices of experts and of 256 greedy tokens change between stock llama.cpp and a "
        "swarm of three servers on this machine (--model FILE, or the demo model)",
    )
    form = verify.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="JSON, for scripts")
    form.add_argument("--markdown", action="store_true", help="Markdown, for documents")


async def run_verify(options: argparse.Namespace) -> int:
    """Compares and shows; 0 when everything is within the limits. Raises SwarmError."""
    from rich.console import Console

    from node.commands.verify_matrix import document
    from node.commands.verify_screen import markdown, print_matrix

    if options.decisions:
        return await _run_decisions(options)
    if options.model is None and (options.layer is not None or options.experts is not None):
        raise SwarmError("--layer and --experts are of a model: name it with --model FILE")
    if options.model is not None and (options.type or options.full):
        raise SwarmError("--type and --full are of random weights: a model has its own types")
    try:
        done = await (_verify_model(options) if options.model is not None else _verify_random(options))
    except OSError as error:
        raise SwarmError(f"{error.filename or 'a file'} cannot be used: {error.strerror or error}") from error
    result = document(done, options.seed)
    if options.json:
        # NaN is no JSON; a figure that is not finite is null, and its problem says why.
        print(json.dumps(_plain(result), indent=1, allow_nan=False))
    elif options.markdown:
        print(markdown(result))
    else:
        print_matrix(result, Console(file=sys.stdout, highlight=False))
    return 0 if result["well"] else 1


async def _run_decisions(options: argparse.Namespace) -> int:
    """0 when a swarm that sends rows decides as stock llama.cpp, to the last bit. Raises SwarmError."""
    from node.commands.verify_decisions import decisions, describe, document
    from node.models.demo import demo_model
    from node.models.index import read_model

    path = options.model or await asyncio.to_thread(demo_model)
    found = document(await decisions(await asyncio.to_thread(read_model, path)))
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(*(f"- {line}" if options.markdown else line for line in describe(found)), sep="\n")
    rows = found[0]
    return 0 if rows["first_difference"] is None and rows["logprob_max"] == 0 else 1


async def _verify_random(options: argparse.Namespace) -> list[_Done]:
    import kernels
    from node.commands.verify_matrix import Subject
    from node.expert_server.speed import SWIGLU_PROGRAM
    from node.models.random_blocks import BLOCK_TYPES
    from node.models.synthetic import SHAPES, expert_tensors

    if options.shape not in SHAPES:
        raise ModelError(f"there is no shape {options.shape!r}; there are {', '.join(SHAPES)}")
    shape = SHAPES[options.shape]
    n_expert = shape.n_expert if options.full else min(_FEW_EXPERTS, shape.n_expert)
    by_lower_case = {name.lower(): name for name in BLOCK_TYPES}
    done = []
    for type_name in options.type or [None]:
        type_name = by_lower_case.get(type_name.lower(), type_name) if type_name else None
        tensors = expert_tensors(shape, n_expert=n_expert, expert_type=type_name, seed=options.seed)
        with tempfile.NamedTemporaryFile(prefix="swarm-node-verify-") as file:
            sources = {}
            for tensor in tensors:
                start = file.tell()
                await asyncio.to_thread(file.writelines, tensor.data())
                part = (file.name, start, file.tell() - start)
                sources[tensor.name.removeprefix("blk.0.")] = kernels.TensorSource(tensor.type, tensor.ne[:-1], [part])
            file.flush()
            subject = Subject(
                label=f"random weights, {options.shape}",
                layer=0,
                first=0,
                last=n_expert - 1,
                n_expert=n_expert,
                n_used=shape.n_used,
                program=SWIGLU_PROGRAM,
                sources=sources,
            )
            done.append(await _compare(options, subject, [], (shape.n_embd, shape.n_embd)))
    return done


async def _verify_model(options: argparse.Namespace) -> list[_Done]:
    import aiohttp

    import kernels
    from node.commands.verify_matrix import Subject, n_values
    from node.models.index import read_model
    from node.router.programs import read_programs

    index = await asyncio.to_thread(read_model, options.model)
    programs = await read_programs(index)
    layer = min(programs.layers) if options.layer is None else options.layer
    if layer not in programs.layers:
        raise ModelError(f"layer {layer} of {options.model} has no routed experts")
    program = programs.layers[layer]
    first, last = options.experts or (0, program.n_expert - 1)
    sources = {
        name: kernels.TensorSource(tensor.type, tensor.ne, [(p.path, p.offset, p.bytes) for p in tensor.parts])
        for name, tensor in index.slice_parts(layer, first, last).items()
        if name in kernels.Program(program.text).tensors
    }
    subject = Subject(
        label=Path(index.paths[0]).name,
        layer=layer,
        first=first,
        last=last,
        n_expert=program.n_expert,
        n_used=program.n_used,
        program=program.text,
        sources=sources,
    )
    width = await asyncio.to_thread(n_values, subject)
    timeout = aiohttp.ClientTimeout(total=_PEER_TIMEOUT_S, sock_connect=5)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        nodes: list[Backend] = []
        if not options.no_nodes:
            subject, nodes = await _nodes(session, options, index, subject, width[1])
        return [await _compare(options, subject, nodes, width)]


async def _nodes(
    session: aiohttp.ClientSession, options: argparse.Namespace, index: ModelIndex, subject: Subject, n_out: int
) -> tuple[Subject, list[Backend]]:
    """The subject under the id by which the swarm knows its model, and the live nodes that hold some of its experts."""
    from dataclasses import replace

    from node.commands.find_node import find_node, get_document
    from node.commands.verify_matrix import NodeBackend
    from node.expert_server.client import ExpertClient
    from node.models.hashing import local_manifest
    from node.settings.load import load_config
    from node.swarm_key import SwarmKey

    try:
        url = await find_node(session, options)
        status = await get_document(session, f"{url}/status")
    except SwarmError as error:
        if options.url:
            raise
        print(f"swarm-node: only this machine is compared: {error}", file=sys.stderr)
        return subject, []
    manifest = await asyncio.to_thread(local_manifest, index)
    model_id = manifest.model_id
    if status["model"] is None or status["model"]["id"] != model_id:
        served = "none" if status["model"] is None else f"{status['model']['file']}, {status['model']['id']}"
        raise ModelError(
            f"{options.model} is model {model_id}, the swarm of {url} serves another: {served}. "
            "With --no-nodes only this machine is compared"
        )
    key = load_config(options, os.environ).swarm.key
    call_key = SwarmKey.parse(key).derive("call") if key else None
    term = int(status["router"]["term"]) if status["router"] else 0
    subject = replace(subject, model_id=model_id)
    backends: list[Backend] = []
    for node in status["nodes"]:
        experts = _held(node["ready"], subject)
        if not node["alive"] or not node["expert_port"] or not experts:
            continue
        host = urlsplit(node["url"] if node["url"].startswith("http") else url).hostname or "127.0.0.1"
        client = ExpertClient(session, node["name"], host, int(node["expert_port"]), call_key)
        devices = ", ".join(f"{device['name']} ({device['type']})" for device in node["devices"])
        about = f"{node['platform']}, of its devices {devices}" if devices else node["platform"]
        backends.append(NodeBackend(client, experts, subject, term=term, n_out=n_out, description=about))
    return subject, backends


def _held(ready: Sequence[Sequence[int]], subject: Subject) -> frozenset[int]:
    mine = range(subject.first, subject.last + 1)
    spans = [(first, last) for layer, first, last in ready if layer == subject.layer]
    return frozenset(expert for expert in mine if any(first <= expert <= last for first, last in spans))


async def _compare(
    options: argparse.Namespace, subject: Subject, nodes: Sequence[Backend], width: tuple[int, int]
) -> _Done:
    import kernels
    from node.commands.verify_matrix import ROWS, DeviceBackend, ReferenceBackend, compare_backends

    backends: list[Backend] = []
    unusable: dict[str, str] = {}
    for device in _devices(options.device):
        try:
            backends.append(await asyncio.to_thread(DeviceBackend, device, subject, kernels.default_threads()))
        except (RuntimeError, OSError) as error:
            unusable[device.name] = str(error)
    rows = options.rows or (ROWS[:3] if options.full else ROWS)
    # Last, so that it is the b of each pair: what the other is measured by.
    backends += [*nodes, ReferenceBackend(subject)]
    with _progress(subject) as progress:
        outcome = await compare_backends(subject, backends, width[0], rows=rows, seed=options.seed, progress=progress)
    outcome.left_out.update(unusable)
    return subject, backends, outcome


def _devices(names: Sequence[str]) -> list[Any]:
    import kernels

    able = [device for device in kernels.devices() if device.computes_ffn]
    if not names:
        return able
    by_name = {device.name.lower(): device for device in able}
    missing = [name for name in names if name.lower() not in by_name]
    if missing:
        raise SwarmError(
            f"no device {', '.join(missing)} of this build can compute experts; there are "
            f"{', '.join(d.name for d in able)}"
        )
    return [by_name[name.lower()] for name in names]


@contextlib.contextmanager
def _progress(subject: Subject) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f} of {task.total:.0f}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"computing {' and '.join(subject.types)}", total=1)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# --- what is shown


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value


# --- arguments


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) > 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return int(text)


def _row_count(text: str) -> int:
    # As many as a call may have by default.
    if not text.isdecimal() or not 1 <= int(text) <= 512:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows from 1 to 512")
    return int(text)


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    last = last or first
    if not first.isdecimal() or not last.isdecimal() or int(last) < int(first):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of experts such as 0-7")
    return int(first), int(last)
