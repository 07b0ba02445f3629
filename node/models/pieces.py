"""The pieces of a model: what is hashed, fetched and kept as one. Pure.

Their order and borders follow from the canonical header alone, so a copy that is split into other files has the same
pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from node.errors import ModelError
from node.models.index import ModelIndex, TensorPart

#: A stretch of a trunk tensor is long enough to be read at full speed, and short enough to be kept in memory until it
#: is verified.
STRETCH_BYTES = 16 << 20

#: 128 layers of 1,000 experts and a trunk of a terabyte have so many: there is no such model yet.
PIECES_MAX = 1 << 18

PieceKey = tuple[Literal["trunk", "expert"], int, int]


@dataclass(frozen=True)
class Piece:
    """An expert of a layer, its bytes in all tensors in the order of their names; or one stretch of a trunk tensor.

    `key` is ("expert", layer, expert) or ("trunk", number of the tensor in the order of names, number of the stretch);
    `number` the place in canonical order, and in a manifest.
    """

    number: int
    key: PieceKey
    bytes: int

    def parts(self, index: ModelIndex) -> tuple[TensorPart, ...]:
        """Where the bytes are in the files of one copy of the model, in the order in which they are hashed."""
        kind, first, second = self.key
        if kind == "expert":
            tensors = index.slice_parts(first, second, second)
            return tuple(part for name in sorted(tensors) for part in tensors[name].parts)
        tensor = index.trunk_tensors[first]
        return (TensorPart(tensor.path, tensor.offset + second * STRETCH_BYTES, self.bytes),)


def pieces(index: ModelIndex) -> tuple[Piece, ...]:
    """All pieces in canonical order: the trunk by names of tensors, then the experts by layer and number.

    Raises ModelError when there are more than PIECES_MAX.
    """
    count = sum(-(-tensor.bytes // STRETCH_BYTES) for tensor in index.trunk_tensors)
    count += len(index.expert_layers) * index.n_expert
    if count > PIECES_MAX:
        raise ModelError(f"{index.paths[0]} would have {count} pieces; up to {PIECES_MAX} are possible")
    found: list[Piece] = []
    for number, tensor in enumerate(index.trunk_tensors):
        for stretch, start in enumerate(range(0, tensor.bytes, STRETCH_BYTES)):
            found.append(Piece(len(found), ("trunk", number, stretch), min(STRETCH_BYTES, tensor.bytes - start)))
    for layer in index.expert_layers:
        one = index.expert_bytes(layer) // index.n_expert
        for expert in range(index.n_expert):
            found.append(Piece(len(found), ("expert", layer, expert), one))
    return tuple(found)


def trunk_numbers(all_pieces: Sequence[Piece]) -> tuple[int, ...]:
    """The numbers of the trunk's pieces, ascending."""
    return tuple(piece.number for piece in all_pieces if piece.key[0] == "trunk")


def expert_numbers(all_pieces: Sequence[Piece]) -> dict[tuple[int, int], int]:
    """The numbers of the experts' pieces, by (layer, expert)."""
    return {piece.key[1:]: piece.number for piece in all_pieces if piece.key[0] == "expert"}
