"""The swarm's model on a node: its own file, or what it fetches of the nodes that offer it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from node.errors import ModelError
from node.models.index import ModelIndex
from node.models.known import NoCopy
from node.peers.membership import Peer
from node.records import VERSION, Model, Offer, Record
from node.transfer.catalogue import Entry
from node.transfer.swarm_model import SwarmModel
from rigs.store_cases import new_store, source

ID_A, ID_B = "a" * 32, "b" * 32
MODEL = Model(id=ID_A, file="big.gguf", architecture="qwen3moe", n_layer=2, n_expert=6, trunk_bytes=1, expert_bytes=1)


def record(name: str, **fields: object) -> Record:
    plain = Record(
        version=VERSION,
        swarm="default",
        node=name.encode().hex().rjust(16, "0"),
        boot=1,
        name=name,
        build="b",
        platform="p",
        port=4100,
        expert_port=4101,
        devices=(),
        memory_bytes=0,
        can_route=True,
    )
    return msgspec.structs.replace(plain, **fields)


def offer(model_id: str = ID_A, file: str = "big.gguf", *, whole: bool = False, trunk: bool = False) -> Offer:
    return Offer(model_id, file, 100, whole, trunk)


class Peers:
    """What membership says of the live nodes."""

    def __init__(self) -> None:
        self.live: list[Record] = []

    def alive(self, now_s: float) -> Mapping[str, Peer]:
        return {one.node: Peer(one, f"http://{one.name}:4100", True, 0.0) for one in self.live}


class Known:
    """This node's own files: ``found`` is its copy, or why there is none."""

    def __init__(self) -> None:
        self.found: ModelIndex | ModelError | None = None
        self.checked: list[ModelIndex] = []

    def look_up(self, model: Model) -> ModelIndex | None:
        if isinstance(self.found, ModelError):
            raise self.found
        return self.found

    def check_unchanged(self, index: ModelIndex) -> None:
        self.checked.append(index)


class Shared:
    """What is fetched: files of every model that is looked up, or none so far."""

    def __init__(self, index: ModelIndex) -> None:
        self.index: ModelIndex | None = index
        self.stored: list[str] = []
        self.asked: list[tuple[str, str]] = []

    def look_up(self, model_id: str, file: str) -> ModelIndex | None:
        self.asked.append((model_id, file))
        if self.index is None:
            return None
        self.stored.append(model_id)
        return self.index.with_model_id(model_id)

    def is_stored(self, index: ModelIndex) -> bool:
        return index.model_id in self.stored


class Rig:
    def __init__(self, folder: Path, *, told: bool = False) -> None:
        self.index, _, _ = source()
        self.peers, self.known, self.shared = Peers(), Known(), Shared(self.index)
        self.model = SwarmModel(
            self.known,  # type: ignore[arg-type]
            new_store(folder),
            self.peers,  # type: ignore[arg-type]
            lambda: None,
            told=told,
            bytes_per_s=0.0,
        )
        self.model.shared = self.shared  # type: ignore[assignment]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_sources_are_the_live_nodes_that_offer_the_model(rig: Rig) -> None:
    assert rig.model.sources(ID_A) == {}
    rig.peers.live = [
        record("part", offers=(offer(),)),
        record("other", offers=(offer(ID_B),)),
        record("whole", offers=(offer(ID_B), offer(whole=True))),
    ]
    assert rig.model.sources(ID_A) == {"http://part:4100": "part", "http://whole:4100": "whole"}


def test_a_node_serves_its_file_before_what_it_fetches(rig: Rig) -> None:
    assert rig.model.to_serve is None
    fetched = rig.model.fetched = rig.index.with_model_id(ID_A)
    assert rig.model.to_serve is fetched
    served = rig.model.served = rig.index.with_model_id(ID_B)
    assert rig.model.to_serve is served


def test_an_entry_of_the_catalogue_is_fetched_whatever_the_node_has_of_it(rig: Rig) -> None:
    entry = Entry(ID_A, "big.gguf", 100, ("one",), (), has_trunk=True)
    rig.known.found = rig.index.with_model_id(ID_A)
    index = rig.model.to_route(entry)
    assert index is not None and index.model_id == ID_A and rig.shared.asked == [(ID_A, "big.gguf")]
    rig.shared.index = None
    assert rig.model.to_route(entry) is None  # while its header is fetched


def test_a_file_of_the_nodes_own_is_routed_only_when_told(rig: Rig) -> None:
    rig.known.found = rig.index.with_model_id(ID_A)
    assert rig.model.to_route(MODEL) is None
    rig.known.found = NoCopy("none of them")
    rig.peers.live = [record("one", offers=(offer(whole=True),))]
    index = rig.model.to_route(MODEL)
    assert index is not None and index.model_id == ID_A and rig.shared.is_stored(index)
    rig.known.found = ModelError("the file has other bytes")
    with pytest.raises(ModelError, match="other bytes"):
        rig.model.to_route(MODEL)


def test_a_copy_is_the_nodes_own_file_or_what_it_fetches(rig: Rig) -> None:
    assert rig.model.copy_of(MODEL) is None  # its files are looked through
    rig.known.found = rig.index.with_model_id(ID_A)
    assert rig.model.copy_of(MODEL) == rig.known.found and rig.shared.asked == []
    rig.known.found = NoCopy("none of them")
    with pytest.raises(NoCopy):  # and nobody offers it
        rig.model.copy_of(MODEL)
    rig.peers.live = [record("one", offers=(offer(),))]
    copied = rig.model.copy_of(MODEL)
    assert copied is not None and copied.model_id == ID_A and rig.shared.asked == [(ID_A, "big.gguf")]
    rig.known.found = ModelError("the file has other bytes")
    with pytest.raises(ModelError, match="other bytes"):
        rig.model.copy_of(MODEL)
    fetched = rig.model.fetched = rig.index.with_model_id(ID_A)
    assert rig.model.copy_of(MODEL) is fetched


def test_who_was_told_to_serve_a_file_fetches_no_other_model(tmp_path: Path) -> None:
    rig = Rig(tmp_path, told=True)
    rig.known.found = NoCopy("none of them")
    rig.peers.live = [record("one", offers=(offer(),))]
    with pytest.raises(NoCopy):
        rig.model.copy_of(MODEL)
    assert rig.shared.asked == []


def test_only_files_of_the_users_may_have_changed(rig: Rig) -> None:
    own = rig.index.with_model_id(ID_B)
    rig.shared.stored.append(ID_A)
    rig.model.check_file(rig.index.with_model_id(ID_A))
    rig.model.check_file(own)
    assert rig.known.checked == [own]
