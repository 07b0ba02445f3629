"""The swarm's model on a node without its file: which copy it takes, and when it may route what it fetches."""

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
    """What membership says: live nodes, and silent ones that are not forgotten."""

    def __init__(self) -> None:
        self.live: list[Record] = []
        self.silent: list[Record] = []

    def alive(self, now_s: float) -> Mapping[str, Peer]:
        return {one.node: Peer(one, f"http://{one.name}:4100", True, 0.0) for one in self.live}

    def known(self, now_s: float) -> Mapping[str, Peer]:
        silent = {one.node: Peer(one, f"http://{one.name}:4100", False, 20.0) for one in self.silent}
        return {**self.alive(now_s), **silent}


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
        self.trunk = False

    def look_up(self, model_id: str, file: str) -> ModelIndex | None:
        self.asked.append((model_id, file))
        if self.index is None:
            return None
        self.stored.append(model_id)
        return self.index.with_model_id(model_id)

    def is_stored(self, index: ModelIndex) -> bool:
        return index.model_id in self.stored

    def has_trunk(self, index: ModelIndex) -> bool:
        return self.trunk


class Rig:
    def __init__(self, folder: Path) -> None:
        self.index, _, _ = source()
        self.peers, self.known, self.shared = Peers(), Known(), Shared(self.index)
        self.own = record("own")
        self.model = SwarmModel(
            self.known,  # type: ignore[arg-type]
            new_store(folder),
            self.peers,  # type: ignore[arg-type]
            lambda: self.own,
            lambda: None,
            bytes_per_s=0.0,
        )
        self.model.shared = self.shared  # type: ignore[assignment]

    def fetch(self) -> ModelIndex:
        """The node takes part in the model without a file of it."""
        self.model.fetched = self.index.with_model_id(ID_A)
        return self.model.fetched


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_sources_are_the_live_nodes_that_offer_the_model(rig: Rig) -> None:
    rig.peers.live = [
        record("part", offers=(offer(),)),
        record("other", offers=(offer(ID_B),)),
        record("whole", offers=(offer(ID_B), offer(whole=True))),
    ]
    rig.peers.silent = [record("gone", offers=(offer(whole=True),))]
    assert rig.model.sources(ID_A) == {"http://part:4100": "part", "http://whole:4100": "whole"}


def test_the_catalogue_has_this_nodes_models_and_those_of_the_live(rig: Rig) -> None:
    rig.own = record("own", offers=(offer(ID_B, "own.gguf", whole=True),))
    rig.peers.live = [record("one", offers=(offer(),))]
    rig.peers.silent = [record("gone", offers=(offer("c" * 32, "gone.gguf"),))]
    assert [(entry.id, entry.whole, entry.part) for entry in rig.model.catalogue()] == [
        (ID_A, (), ("one",)),
        (ID_B, ("own",), ()),
    ]


@pytest.mark.parametrize(
    ("fields", "silent", "routed"),
    [
        ({}, False, True),
        ({}, True, True),  # it may come back
        ({"fetches": True}, False, False),
        ({"can_route": False}, False, False),
    ],
)
def test_who_has_the_file_routes_though_silent_for_the_moment(
    rig: Rig, fields: dict[str, object], silent: bool, routed: bool
) -> None:
    assert not rig.model.is_routed_by_others()
    (rig.peers.silent if silent else rig.peers.live).append(record("one", **fields))
    assert rig.model.is_routed_by_others() is routed


@pytest.mark.parametrize(
    ("offered", "own_trunk", "can"),
    [
        ((), False, False),
        ((offer(),), False, False),  # some experts of it: nobody could give the trunk
        ((offer(trunk=True),), False, True),
        ((offer(whole=True),), False, True),
        ((offer(ID_B, whole=True),), False, False),
        ((), True, True),
    ],
)
def test_what_is_fetched_is_routed_only_where_the_trunk_is_to_be_had(
    rig: Rig, offered: tuple[Offer, ...], own_trunk: bool, can: bool
) -> None:
    rig.peers.live = [record("one", fetches=True, offers=offered)]
    rig.shared.trunk = own_trunk
    assert not rig.model.can_be_routed([ID_A])  # the node fetches nothing yet
    rig.fetch()
    assert rig.model.can_be_routed([ID_A]) is can
    assert not rig.model.can_be_routed([ID_B])  # no programs of it
    rig.peers.silent = [record("has the file")]
    assert not rig.model.can_be_routed([ID_A])


def test_a_model_that_was_told_by_name_is_fetched_to_be_routed(rig: Rig) -> None:
    rig.peers.live = [record("one", fetches=True, offers=(offer(trunk=True), offer(ID_B, "other.gguf", whole=True)))]
    rig.model.name = "big"
    index = rig.model.to_route()
    assert index is not None and index.model_id == ID_A and rig.shared.asked == [(ID_A, "big.gguf")]
    rig.model.name = "bbbbbb"
    index = rig.model.to_route()
    assert index is not None and index.model_id == ID_B
    rig.shared.index = None
    assert rig.model.to_route() is None  # while its header is fetched
    rig.model.name = "unknown"
    with pytest.raises(ModelError, match=r"no node .* 'unknown'.*big\.gguf \(aaaaaaaaaaaa\), other\.gguf"):
        rig.model.to_route()
    rig.peers.live = [record("one", fetches=True, offers=(offer(),))]
    rig.model.name = "big"
    with pytest.raises(ModelError, match="no node that answers"):  # nobody has its trunk
        rig.model.to_route()


def test_nothing_is_fetched_to_be_routed_where_it_need_not_be(rig: Rig) -> None:
    rig.peers.live = [record("one", fetches=True, offers=(offer(whole=True),), model=MODEL)]
    rig.known.found = NoCopy("none of them")
    index = rig.model.to_route()
    assert index is not None and index.model_id == ID_A  # the model that the others had
    rig.model.told = True
    assert rig.model.to_route() is None
    rig.model.told = False
    rig.fetch()
    assert rig.model.to_route() is None
    rig.model.fetched = None
    rig.peers.silent = [record("has the file")]
    assert rig.model.to_route() is None
    rig.peers.silent = []
    rig.known.found = rig.index.with_model_id(ID_A)
    rig.shared.stored.clear()
    assert rig.model.to_route() is None  # a file of its own is nothing that is fetched
    rig.peers.live = []
    assert rig.model.to_route() is None


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
    rig.model.told = True
    with pytest.raises(NoCopy):  # who was told to serve a file of another model keeps to it
        rig.model.copy_of(MODEL)
    rig.known.found = ModelError("the file has other bytes")
    rig.model.told = False
    with pytest.raises(ModelError, match="other bytes"):
        rig.model.copy_of(MODEL)
    fetched = rig.fetch()
    assert rig.model.copy_of(MODEL) is fetched


def test_a_node_that_was_told_a_model_takes_no_other(rig: Rig) -> None:
    rig.known.found = rig.index.with_model_id(ID_A)
    for name, takes in (("big", True), ("big.gguf", True), (ID_A[:8], True), ("other", False), (ID_B[:8], False)):
        rig.model.name = name
        if takes:
            assert rig.model.copy_of(MODEL) is rig.known.found
        else:
            with pytest.raises(ModelError, match=rf"told to serve {name}, and the router serves big\.gguf"):
                rig.model.copy_of(MODEL)


def test_only_files_of_the_users_may_have_changed(rig: Rig) -> None:
    own = rig.index.with_model_id(ID_B)
    rig.shared.stored.append(ID_A)
    rig.model.check_file(rig.index.with_model_id(ID_A))
    rig.model.check_file(own)
    assert rig.known.checked == [own]
