"""What a model's bytes are: a digest of the header and one of each piece, and the id that follows from them. Pure.

The layer programs are no part of it. They are not in the file: llama.cpp makes them, another version of it may make
others, and a build without llama.cpp has none. With them in the id, an update of llama.cpp would give every file
another id, to be hashed and fetched again, and no node could name the file it has before it can run it. That two nodes
compute different things is excluded where it matters: every expert call carries the digest of its layer's program, and
is refused by a server that read another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgpack

from node.bounded_msgpack import unpack_map
from node.errors import ModelError
from node.models.index import ModelIndex
from node.models.pieces import PIECES_MAX, Piece, expert_numbers, pieces
from node.slices import Slice

VERSION = 1
_DIGEST_BYTES = 32
#: The largest manifest: the digests, and 64 bytes around them.
MANIFEST_BYTES_MAX = PIECES_MAX * _DIGEST_BYTES + _DIGEST_BYTES + 64


@dataclass(frozen=True)
class Manifest:
    """What the bytes of a model are.

    `header_digest` is the SHA-256 of the canonical header, as ModelIndex has it, 64 hex digits; `sha256` that of each
    piece, 32 bytes, in canonical order.
    """

    header_digest: str
    sha256: tuple[bytes, ...]

    @cached_property
    def model_id(self) -> str:
        """32 hex digits that stand for every byte of the model, however it is split into files."""
        digest = hashlib.sha256(f"swarm-node model {VERSION}\n{self.header_digest}\n{len(self.sha256)}\n".encode())
        for one in self.sha256:
            digest.update(one)
        return digest.hexdigest()[:32]

    def to_bytes(self) -> bytes:
        """The form on disk and between nodes (docs/protocol.md, "Manifest")."""
        header = bytes.fromhex(self.header_digest)
        packed: bytes = msgpack.packb({"version": VERSION, "header": header, "sha256": b"".join(self.sha256)})
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Reads what `to_bytes` made, from anybody. Raises ModelError, naming what is wrong."""
        if len(data) > MANIFEST_BYTES_MAX:
            raise ModelError(f"a manifest of {len(data)} bytes; at most {MANIFEST_BYTES_MAX} are allowed")
        try:
            fields = unpack_map(data)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"not a manifest: {error}") from None
        version = fields.get("version")
        if type(version) is not int or version != VERSION:
            raise ModelError(f"a manifest of version {str(version)[:20]}; this program reads {VERSION}")
        if set(fields) != {"version", "header", "sha256"}:
            raise ModelError("not a manifest: it must have version, header and sha256, and nothing else")
        header, joined = (_binary(fields, name) for name in ("header", "sha256"))
        if len(header) != _DIGEST_BYTES:
            raise ModelError(f"not a manifest: its header's digest is {len(header)} bytes long, not {_DIGEST_BYTES}")
        if len(joined) % _DIGEST_BYTES or not 0 < len(joined) <= PIECES_MAX * _DIGEST_BYTES:
            raise ModelError(f"not a manifest: {len(joined)} bytes are not 1 to {PIECES_MAX} digests")
        digests = (joined[start : start + _DIGEST_BYTES] for start in range(0, len(joined), _DIGEST_BYTES))
        return cls(header.hex(), tuple(digests))

    def check(self, index: ModelIndex) -> None:
        """Raises ModelError unless `index`, of whatever copy, has this manifest's header; then its pieces fit too."""
        if index.header_digest != self.header_digest:
            raise ModelError(
                f"the header of {index.paths[0]} has the digest {index.header_digest[:32]}…, that of model "
                f"{self.model_id} {self.header_digest[:32]}…"
            )
        count = len(pieces(index))
        if count != len(self.sha256):
            raise ModelError(f"{index.paths[0]} has {count} pieces, the manifest of {self.model_id} {len(self.sha256)}")

    def verify(self, piece: Piece, data: bytes | bytearray | memoryview) -> bool:
        """Whether `data` are the bytes of `piece`."""
        return len(data) == piece.bytes and self.verify_digest(piece, hashlib.sha256(data).digest())

    def verify_digest(self, piece: Piece, digest: bytes) -> bool:
        """Whether `digest` is the SHA-256 of `piece`, 32 bytes."""
        return self.sha256[piece.number] == digest


def identified(index: ModelIndex, manifest: Manifest) -> ModelIndex:
    """`index` with the id of its content, `manifest`'s, in place of the header's. Raises ModelError as `check`."""
    manifest.check(index)
    return index.with_model_id(manifest.model_id)


def expert_digests(index: ModelIndex, manifest: Manifest, slices: Sequence[Slice]) -> dict[Slice, tuple[str, ...]]:
    """The SHA-256 of each expert of slices, 64 hex digits each, by slice. Raises ModelError as `check`."""
    manifest.check(index)
    numbers = expert_numbers(pieces(index))
    return {
        one: tuple(manifest.sha256[numbers[one.layer, expert]].hex() for expert in range(one.first, one.last + 1))
        for one in slices
    }


def differing(one: Manifest, other: Manifest, of: Sequence[Piece]) -> tuple[Piece, ...]:
    """The pieces of two models with the same header that have other bytes in the one than in the other."""
    return tuple(piece for piece in of if one.sha256[piece.number] != other.sha256[piece.number])


def _binary(fields: dict[str, object], name: str) -> bytes:
    value = fields[name]
    if not isinstance(value, bytes | memoryview):
        raise ModelError(f"not a manifest: {name} is not binary")
    return bytes(value)
