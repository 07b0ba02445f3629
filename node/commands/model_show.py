"""What ``swarm-node model show`` says of a model: what of it fits into how much memory,
as a document, and on one screen.

A router's machine keeps the trunk, and experts in what is left; the others keep experts only. A conversation's memory
(KV cache) comes on top on the router's machine: its size is a matter of settings, not of the file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import kernels
from node.memory_limit import MEMORY_SHARE, free_memory_bytes
from node.models.hashing import cached_manifest
from node.models.index import ModelIndex, TensorInfo

# An idle desktop system leaves this less than the machine has.
SYSTEM_BYTES = 3 << 29
# Looked for up to here; a swarm of more machines is no answer to "how many do I need".
_MACHINES_MAX = 1024


@dataclass(frozen=True)
class Fit:
    """What machines hold of a model together. ``layers``: those that are there with all their experts, if the machines
    are filled layer by layer; ``experts``: of all layers."""

    trunk: bool
    layers: int
    experts: int
    experts_total: int

    @property
    def whole(self) -> bool:
        """Nothing is missing."""
        return self.trunk and self.experts == self.experts_total


def offer_bytes(machine_bytes: int, share: float) -> int:
    """What an otherwise idle machine of that much memory offers a swarm: ``share`` of what its system leaves."""
    return int(max(0, machine_bytes - SYSTEM_BYTES) * share)


def fit(index: ModelIndex, offers_bytes: Sequence[int], trunk_beside: bool = False) -> Fit:
    """What machines that offer so much hold together; the one with the most is the router.

    ``trunk_beside``: the trunk is in other memory than what is offered, as with experts on a graphics card.
    """
    offers = sorted(offers_bytes, reverse=True)
    trunk = bool(offers) and (trunk_beside or offers[0] >= index.trunk_bytes)
    if trunk and not trunk_beside:
        offers[0] -= index.trunk_bytes
    sizes = [index.expert_bytes(layer) // index.n_expert for layer in index.expert_layers]
    experts = layers = 0
    for size in sizes:
        left = index.n_expert
        for number, free in enumerate(offers):
            count = min(left, free // max(size, 1))
            offers[number] -= count * size
            left -= count
        experts += index.n_expert - left
        layers += left == 0
    return Fit(trunk, layers, experts, len(sizes) * index.n_expert)


def machines_needed(index: ModelIndex, offered_bytes: int) -> int | None:
    """How many machines that offer so much each hold the model; None if no number does: the
    trunk or an expert is too large."""
    lowest, highest = 1, _MACHINES_MAX
    if not fit(index, [offered_bytes] * highest).whole:
        return None
    while lowest < highest:
        middle = (lowest + highest) // 2
        if fit(index, [offered_bytes] * middle).whole:
            highest = middle
        else:
            lowest = middle + 1
    return lowest


_LAYER_PREFIX = re.compile(r"blk\.\d+\.")
_GIB = 1 << 30
# Machines that people have.
_USUAL_GIB = (8, 16, 32, 64)


def model_document(index: ModelIndex, machines_gib: Sequence[float]) -> dict[str, Any]:
    """All that is known of the model without reading a weight, and what of it fits into machines of so much memory,
    into usual ones, and into this one. ``id`` is None until the file was hashed."""
    manifest = cached_manifest(index)
    name = index.metadata.get("general.name")
    layers = [
        {
            "layer": layer,
            "bytes": index.expert_bytes(layer),
            "expert_bytes": index.expert_bytes(layer) // index.n_expert,
            "used": index.expert_used(layer),
            "tensors": {
                tensor_name: {"type": tensor.type, "ne": list(tensor.ne)}
                for tensor_name, tensor in sorted(index.expert_tensors(layer).items())
            },
        }
        for layer in index.expert_layers
    ]
    return {
        "files": list(index.paths),
        "name": name if isinstance(name, str) else None,
        "id": None if manifest is None else manifest.model_id,
        "header": index.header_digest,
        "architecture": index.architecture,
        "layers": index.n_layer,
        "embedding": index.n_embd,
        "experts": index.n_expert,
        "experts_used": index.n_expert_used if index.n_expert else 0,
        "bytes": index.trunk_bytes + sum(map(index.expert_bytes, index.expert_layers)),
        "trunk_bytes": index.trunk_bytes,
        "expert_layers": layers,
        "types": _types(index),
        "this_machine": _this_machine(index) if layers else None,
        "machines_needed": {
            str(gib): machines_needed(index, offer_bytes(gib * _GIB, MEMORY_SHARE)) for gib in _USUAL_GIB
        }
        if layers
        else {},
        "machines": None
        if not machines_gib or not layers
        else {
            "memory_gib": list(machines_gib),
            **_fit_document(fit(index, [offer_bytes(int(gib * _GIB), MEMORY_SHARE) for gib in machines_gib])),
        },
    }


def _types(index: ModelIndex) -> list[dict[str, Any]]:
    """The types of the experts' and the trunk's weights, each with its bytes and the kinds of tensors that have it."""
    of_experts = [tensor for layer in index.expert_layers for tensor in index.expert_tensors(layer).values()]
    found = []
    for part, tensors in (("experts", of_experts), ("trunk", list(index.trunk_tensors))):
        total = Counter(_kind(tensor) for tensor in tensors)
        by_type: dict[str, list[TensorInfo]] = {}
        for tensor in tensors:
            by_type.setdefault(tensor.type, []).append(tensor)
        for type_name, own in sorted(by_type.items(), key=lambda item: -sum(tensor.bytes for tensor in item[1])):
            kinds = {kind: [count, total[kind]] for kind, count in sorted(Counter(map(_kind, own)).items())}
            found.append({"part": part, "type": type_name, "bytes": sum(t.bytes for t in own), "tensors": kinds})
    return found


def _kind(tensor: TensorInfo) -> str:
    return _LAYER_PREFIX.sub("", tensor.name).removesuffix(".weight")


def _this_machine(index: ModelIndex) -> dict[str, Any]:
    device = next(d for d in kernels.devices() if d.name == kernels.choose_device())
    on_cpu = device.type == "cpu"
    offered = int((free_memory_bytes() if on_cpu else device.memory_free_bytes) * MEMORY_SHARE)
    return {
        "device": device.name,
        "offered_bytes": offered,
        **_fit_document(fit(index, [offered], trunk_beside=not on_cpu)),
    }


def _fit_document(found: Fit) -> dict[str, Any]:
    return {
        "whole": found.whole,
        "trunk": found.trunk,
        "layers": found.layers,
        "experts": found.experts,
        "experts_total": found.experts_total,
    }


def print_model(document: dict[str, Any], console: Console) -> None:
    """The document of `model_document` for people."""
    files = document["files"]
    title = document["name"] or Path(files[0]).name
    console.print(f"[bold]{_plain(title)}[/]: {_size(document['bytes'])}, {_files(files)}", soft_wrap=True)
    rows = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    layers = document["expert_layers"]
    model = f"{document['architecture']}, {document['layers']} layers, rows of {document['embedding']}"
    if layers:
        partly = "" if len(layers) == document["layers"] else f" in {len(layers)} of the layers"
        model += f", {document['experts']} experts{partly}, {document['experts_used']} used for a token"
    rows.add_row("model", _plain(model))
    rows.add_row("id", document["id"] or "[yellow]not known[/]: --hash reads the whole file, once")
    if not layers:
        console.print(rows)
        console.print("[yellow]No routed experts:[/] a dense model gains nothing from a swarm.")
        return
    total = sum(layer["bytes"] for layer in layers)
    rows.add_row("trunk", f"{_size(document['trunk_bytes'])}, on the router")
    rows.add_row("experts", f"{_size(total)}, on all machines")
    rows.add_row("a layer's", _sizes([layer["bytes"] for layer in layers]))
    rows.add_row("one expert", _sizes([layer["expert_bytes"] for layer in layers]))
    console.print(rows)
    console.print(_types_table(document["types"]))
    rows = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    here = document["this_machine"]
    offers = f"offers {_size(here['offered_bytes'])} ({escape(here['device'])})"
    rows.add_row("this machine", f"{offers}: {_fit_text(here, len(layers))}")
    if document["machines"] is not None:
        sizes = ", ".join(f"{gib:g}" for gib in document["machines"]["memory_gib"])
        rows.add_row(f"machines of {sizes} GiB", _fit_text(document["machines"], len(layers)))
    rows.add_row("machines needed", _needed_text(document["machines_needed"]))
    console.print(rows)
    console.print(
        f"[dim]A machine is taken to offer {MEMORY_SHARE:.0%} of all but 1.5 GiB, this one of what is free now. "
        "A conversation's memory on the router comes on top.[/]"
    )


def _types_table(types: list[dict[str, Any]]) -> Table:
    table = Table()
    for heading in ("part", "type", "size", "tensors"):
        table.add_column(heading, overflow="fold", no_wrap=heading != "tensors")
    for row in types:
        kinds = [
            _plain(kind) if count == total else f"{_plain(kind)} ({count} of {total})"
            for kind, (count, total) in row["tensors"].items()
        ]
        table.add_row(row["part"], row["type"], _size(row["bytes"]), ", ".join(kinds))
    return table


def _fit_text(found: dict[str, Any], n_layers: int) -> str:
    if found["whole"]:
        return "[green]all of it[/]"
    if not found["trunk"]:
        return f"[yellow]not the trunk[/]; of the experts {found['layers']} of {n_layers} layers"
    return (
        f"trunk + {found['layers']} of {n_layers} layers ({100 * found['experts'] // found['experts_total']} % of "
        "the experts)"
    )


def _needed_text(needed: dict[str, int | None]) -> str:
    parts = []
    for gib, count in needed.items():
        if count is not None:
            parts.append(f"{count} of {gib} GiB")
        if count == 1:
            break
    return ", or ".join(parts) or f"each needs more than {max(map(int, needed))} GiB: the trunk alone is larger"


def _files(files: Sequence[str]) -> str:
    return _plain(files[0]) if len(files) == 1 else f"{len(files)} files from {_plain(files[0])}"


def _plain(text: str) -> str:
    """What a file says of itself, as text and nothing else."""
    return escape("".join(character if character.isprintable() else "?" for character in text))


def _sizes(sizes: Sequence[int]) -> str:
    counts = Counter(sizes)
    if len(counts) == 1:
        return _size(sizes[0])
    if len(counts) > 3:
        return f"{_size(min(sizes))} to {_size(max(sizes))}"
    return ", ".join(f"{_size(size)} in {count} layers" for size, count in sorted(counts.items(), reverse=True))


def _size(n_bytes: int) -> str:
    """A size as text, with a space at which no line is cut."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.2f}\N{NO-BREAK SPACE}{unit}"
    return f"{n_bytes / 1024:.1f}\N{NO-BREAK SPACE}KiB"
