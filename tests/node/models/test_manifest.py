"""The pieces of a model, and the manifest of their digests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.errors import ModelError
from node.models import manifest as manifest_module
from node.models import pieces as pieces_module
from node.models.hashing import local_manifest
from node.models.index import ModelIndex, read_model
from node.models.manifest import MANIFEST_BYTES_MAX, Manifest, differing, expert_digests, identified
from node.models.pieces import PIECES_MAX, expert_numbers, pieces, trunk_numbers
from node.slices import Slice
from rigs import model_files, store_cases

digests = st.binary(min_size=32, max_size=32)
manifests = st.builds(Manifest, digests.map(bytes.hex), st.lists(digests, min_size=1, max_size=40).map(tuple))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def index(folder: Path) -> ModelIndex:
    return read_model(model_files.tiny_model(folder / "a.gguf"))


@pytest.fixture
def small_stretches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pieces_module, "STRETCH_BYTES", 10_000)
    yield


def _manifest(index: ModelIndex, folder: Path) -> Manifest:
    return local_manifest(index, folder=folder / "manifests")


def test_the_pieces_are_every_weight_once(index: ModelIndex, small_stretches: None) -> None:
    found = pieces(index)
    assert [piece.number for piece in found] == list(range(len(found)))
    assert len({piece.key for piece in found}) == len(found)
    covered: list[tuple[int, int]] = []
    for piece in found:
        parts = piece.parts(index)
        assert sum(part.bytes for part in parts) == piece.bytes > 0
        covered += [(part.offset, part.offset + part.bytes) for part in parts]
    ends: dict[int, int] = dict(covered)
    assert len(ends) == len(covered)
    for tensor in index.tensors:
        position = tensor.offset
        while position != tensor.offset + tensor.bytes:
            position = ends.pop(position)
    assert not ends


def test_a_piece_is_an_expert_or_a_stretch_of_the_trunk(index: ModelIndex) -> None:
    found = pieces(index)
    assert len(found) == len(index.trunk_tensors) + 4 * 8
    trunk, experts = trunk_numbers(found), expert_numbers(found)
    assert sorted([*trunk, *experts.values()]) == list(range(len(found)))
    assert max(trunk) < min(experts.values())
    assert set(experts) == {(layer, expert) for layer in range(4) for expert in range(8)}
    expert = found[experts[2, 7]]
    assert expert.key == ("expert", 2, 7)
    # Tensors come in the order of their names, whatever the file's order is.
    names = ["ffn_down_exps.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight"]
    assert expert.parts(index) == tuple(index.slice_parts(2, 7, 7)[name].parts[0] for name in names)
    assert index.trunk_tensors[found[0].key[1]].name == min(tensor.name for tensor in index.trunk_tensors)


def test_stretches_of_a_tensor(index: ModelIndex, small_stretches: None) -> None:
    embedding = next(tensor for tensor in index.trunk_tensors if tensor.name == "token_embd.weight")
    number = index.trunk_tensors.index(embedding)
    own = [piece for piece in pieces(index) if piece.key[:2] == ("trunk", number)]
    assert [piece.key[2] for piece in own] == list(range(len(own)))
    assert [piece.bytes for piece in own] == [10_000] * (len(own) - 1) + [embedding.bytes % 10_000]
    assert own[1].parts(index)[0].offset == embedding.offset + 10_000


def test_too_many_pieces_are_refused(index: ModelIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "PIECES_MAX", 71)
    assert len(pieces(index)) == 71
    monkeypatch.setattr(pieces_module, "PIECES_MAX", 70)
    with pytest.raises(ModelError, match="would have 71 pieces; up to 70 are possible"):
        pieces(index)


def test_a_split_copy_has_the_same_pieces_elsewhere(index: ModelIndex, folder: Path) -> None:
    split = read_model(model_files.split_copy(Path(index.paths[0]), folder / "split", 4))
    assert split.paths != index.paths and len(split.paths) == 4
    assert pieces(split) == pieces(index)
    assert _manifest(split, folder) == _manifest(index, folder)


def test_verify_tells_one_byte(index: ModelIndex, folder: Path) -> None:
    manifest = _manifest(index, folder)
    data = Path(index.paths[0]).read_bytes()
    for piece in pieces(index):
        own = b"".join(data[part.offset : part.offset + part.bytes] for part in piece.parts(index))
        assert manifest.verify(piece, own)
        assert manifest.verify_digest(piece, hashlib.sha256(own).digest())
        assert not manifest.verify(piece, own + b"\0")
        changed = bytearray(own)
        changed[len(own) // 2] ^= 1
        assert not manifest.verify(piece, changed)


def test_the_id_is_of_the_content(index: ModelIndex, folder: Path) -> None:
    source = Path(index.paths[0])
    manifest = _manifest(index, folder)
    other_byte = read_model(model_files.with_other_byte(source, folder / "c.gguf", 3, 5))
    other_type = read_model(model_files.with_layer_in_q8_0(source, folder / "b.gguf", 3))
    changed = _manifest(other_byte, folder)
    assert other_byte.header_digest == index.header_digest
    assert len({manifest.model_id, changed.model_id, _manifest(other_type, folder).model_id}) == 3
    assert [piece.key for piece in differing(manifest, changed, pieces(index))] == [("expert", 3, 5)]
    # The index takes it over, from its own manifest only.
    assert index.model_id == index.header_digest[:32] != manifest.model_id
    known = identified(index, manifest)
    assert known.model_id == manifest.model_id and known.header_digest == index.header_digest
    with pytest.raises(ModelError, match=r"the header of .*b.gguf has the digest"):
        identified(other_type, manifest)
    with pytest.raises(ModelError, match=r"has 71 pieces, the manifest of [0-9a-f]{32} 70"):
        identified(index, Manifest(manifest.header_digest, manifest.sha256[1:]))


@given(manifests)
def test_bytes_and_back(manifest: Manifest) -> None:
    data = manifest.to_bytes()
    assert len(data) <= MANIFEST_BYTES_MAX
    assert Manifest.from_bytes(data) == manifest
    assert len(manifest.model_id) == 32 and int(manifest.model_id, 16) >= 0


def test_a_manifest_of_the_most_pieces() -> None:
    manifest = Manifest("0" * 64, (bytes(32),) * PIECES_MAX)
    data = manifest.to_bytes()
    assert len(data) <= MANIFEST_BYTES_MAX
    assert Manifest.from_bytes(data) == manifest
    one_more = Manifest("0" * 64, (bytes(32),) * (PIECES_MAX + 1)).to_bytes()
    with pytest.raises(ModelError, match=f"are not 1 to {PIECES_MAX} digests"):
        Manifest.from_bytes(one_more)


def test_golden_bytes() -> None:
    """Between nodes, so known from outside: docs/protocol.md, "Manifest"."""
    manifest = Manifest(bytes(range(32)).hex(), (b"\x11" * 32, b"\x22" * 32))
    golden = (
        "83a776657273696f6e01a6686561646572c420" + bytes(range(32)).hex() + "a6736861323536c440" + "11" * 32 + "22" * 32
    )
    assert manifest.to_bytes().hex() == golden
    text = f"swarm-node model 1\n{bytes(range(32)).hex()}\n2\n".encode() + b"\x11" * 32 + b"\x22" * 32
    assert manifest.model_id == hashlib.sha256(text).hexdigest()[:32]


_GOOD = {"version": 1, "header": bytes(32), "sha256": bytes(64)}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": 2}, "a manifest of version 2; this program reads 1"),
        ({"version": True}, "a manifest of version True"),
        ({"version": None}, "a manifest of version None"),
        ({"version": "1" * 1000}, "a manifest of version 1{20};"),
        ({"header": bytes(31)}, "digest is 31 bytes long, not 32"),
        ({"header": "0" * 32}, "header is not binary"),
        ({"sha256": bytes(33)}, "33 bytes are not 1 to 262144 digests"),
        ({"sha256": b""}, "0 bytes are not 1 to 262144 digests"),
        ({"sha256": [1]}, "sha256 is not binary"),
        ({"more": 1}, "and nothing else"),
    ],
)
def test_what_is_no_manifest(change: dict[str, object], problem: str) -> None:
    assert Manifest.from_bytes(msgpack.packb(_GOOD)).sha256 == (bytes(32), bytes(32))
    with pytest.raises(ModelError, match=problem):
        Manifest.from_bytes(msgpack.packb(_GOOD | change))


def _spoilt(manifest: Manifest, start: int, other: bytes) -> bytes:
    data = manifest.to_bytes()
    return data[:start] + other + data[start + len(other) :]


@given(st.binary(max_size=200) | st.builds(_spoilt, manifests, st.integers(0, 200), st.binary(max_size=3)))
def test_anything_else_is_a_typed_error(data: bytes) -> None:
    try:
        manifest = Manifest.from_bytes(data)
    except ModelError:
        return
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_too_long_is_not_read() -> None:
    with pytest.raises(ModelError, match=f"at most {manifest_module.MANIFEST_BYTES_MAX} are allowed"):
        Manifest.from_bytes(bytes(MANIFEST_BYTES_MAX + 1))


def test_the_digests_of_a_slice_are_those_of_its_experts_bytes() -> None:
    index, manifest, _ = store_cases.source()
    found = expert_digests(index, manifest, [Slice(1, 2, 4), Slice(0, 5, 5)])
    assert set(found) == {(1, 2, 4), (0, 5, 5)} and len(found[1, 2, 4]) == 3
    for (layer, first, last), digests in found.items():
        for expert, digest in zip(range(first, last + 1), digests, strict=True):
            tensors = index.slice_parts(layer, expert, expert)
            data = b"".join(
                store_cases.read(p.path, p.offset, p.bytes) for name in sorted(tensors) for p in tensors[name].parts
            )
            assert hashlib.sha256(data).hexdigest() == digest
