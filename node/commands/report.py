"""``swarm-node report``: what a bug report needs, of the node that this machine runs, in one archive.

Every part is made by itself and bounded. Where one cannot be had, a text that says why stands in the archive instead,
so that a node that has died, or answers half of it, gives the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from node.commands.report_parts import PARTS, Part, Sources, find_sources
from node.errors import SwarmError
from node.files import replace_file
from node.version import version

# The doctor's checks of a slow machine, of which each has its own limit.
_PART_TIMEOUT_S: Final = 60.0
# A trace or metrics of a large swarm has megabytes; none has this much.
_PART_BYTES_MAX: Final = 16 << 20

_README: Final = """\
A report of the swarm-node on one machine, made by `swarm-node report`.

{made}
{node}

{parts}

A name that ends in .error.txt says why that part could not be had.

Not in here: the swarm key, the API key, what clients asked, and what they were answered. Log lines
that may hold such text are left out or end with […].

In here: addresses, host names, names of models, nodes and devices, and paths of files. Look through
it before you give it to anybody whom these do not concern.
"""


@dataclass(frozen=True)
class Member:
    """A file of the archive. ``problem``: why the part could not be had, which is then what the file holds."""

    name: str
    data: bytes
    problem: str = ""


async def run_report(options: argparse.Namespace) -> int:
    """Writes the archive and says where it is. Raises SwarmError when it cannot be written."""
    console = Console(stderr=True, highlight=False, quiet=options.json)
    sources = await find_sources(options)
    path = Path(options.file or _default_name(sources.name))
    await asyncio.to_thread(_check_place, path, options.force)
    members = []
    for part in PARTS:
        member = await _make(part, sources)
        members.append(member)
        _show(console, part, member)
    await asyncio.to_thread(_write, path, _packed(_folder(path), members, sources), options.force)
    if options.json:
        parts = [{"name": one.name, "bytes": len(one.data), "problem": one.problem or None} for one in members]
        print(json.dumps({"path": str(Path.cwd() / path), "parts": parts}, indent=1))
    else:
        print(path)
        console.print("[dim]Addresses and names of machines are in it; keys, questions and answers are not.[/]")
    return 0


async def _make(part: Part, sources: Sources) -> Member:
    problem = ""
    try:
        async with asyncio.timeout(_PART_TIMEOUT_S):
            data = (await part.make(sources)).encode()
        if len(data) > _PART_BYTES_MAX:
            problem = f"it has {len(data)} bytes, above {_PART_BYTES_MAX}"
    except TimeoutError as error:
        problem = str(error) or f"it was not there within {_PART_TIMEOUT_S:.0f} s"
    except Exception as error:  # whatever it is, it is this part's finding, and the others are made
        problem = str(error) if isinstance(error, SwarmError) and str(error) else f"{type(error).__name__}: {error}"
    if problem:
        problem = sources.redactor.text(problem)
        return Member(f"{part.name}.error.txt", f"{problem}\n".encode(), problem)
    return Member(part.name, data)


def _show(console: Console, part: Part, member: Member) -> None:
    # Text, not markup: errors come from elsewhere.
    line = Text(f"{part.name:<24}")
    if member.problem:
        line.append(f"not to be had: {member.problem.splitlines()[0][:200]}", "yellow")
    else:
        line.append(f"{len(member.data) / 1024:.1f} KiB", "dim")
    console.print(line)


def _check_place(path: Path, force: bool) -> None:
    """Says before all the work what would keep the archive from being written. Blocks. Raises SwarmError."""
    if path.is_dir():
        raise SwarmError(f"{path} is a folder; name the archive in it")
    if path.exists() and not force:
        raise _is_there(path)
    if not os.access(path.parent, os.W_OK | os.X_OK):
        why = "nothing may be written there" if path.parent.is_dir() else "there is no such folder"
        raise SwarmError(f"{path} cannot be written: {why} ({path.parent})")


def _is_there(path: Path) -> SwarmError:
    return SwarmError(f"{path} is there already; --force replaces it")


def _default_name(node: str) -> str:
    return f"swarm-node-report-{node}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz"


def _folder(path: Path) -> str:
    """The folder in the archive, called as the archive is."""
    return path.name.removesuffix(".gz").removesuffix(".tar").removesuffix(".tgz") or "report"


def _packed(folder: str, members: Sequence[Member], sources: Sources) -> bytes:
    made = f"Made at {time.strftime('%Y-%m-%d %H:%M:%S %z')} by swarm-node {version()}."
    purposes = {part.name: part.purpose for part in PARTS}
    listed = [f"{one.name:<34} {purposes[one.name.removesuffix('.error.txt')]}" for one in members]
    readme = _README.format(made=made, node=sources.description, parts="\n".join(listed))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for member in (Member("README.txt", readme.encode()), *members):
            entry = tarfile.TarInfo(f"{folder}/{member.name}")
            entry.size, entry.mtime, entry.mode = len(member.data), int(time.time()), 0o644
            archive.addfile(entry, io.BytesIO(member.data))
    return packed.getvalue()


def _write(path: Path, data: bytes, force: bool) -> None:
    """Blocks. Raises SwarmError; nothing is left of a file that could not be written whole."""
    try:
        if force:
            replace_file(path, data, mode=0o600)
            return
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            try:
                file.write(data)
                file.flush()
            except OSError:
                path.unlink(missing_ok=True)
                raise
    except FileExistsError:
        raise _is_there(path) from None
    except OSError as error:
        raise SwarmError(f"{path} cannot be written: {error.strerror or error}") from error
