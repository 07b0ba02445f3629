"""The swarm's models: who has them, which one a user means, and the commands that list and remove fetched ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from node.errors import ModelError
from node.models.local import LocalModels
from node.records import OFFERS_MAX, VERSION, Offer, Record, RecordError, decode, encode
from node.transfer.catalogue import Entry, catalogue, choose
from node.transfer.store import ModelStore
from rigs import ROOT
from rigs.store_cases import piece_bytes, source

ID_A, ID_B, ID_C = "a" * 32, "aaaaaaa" + "b" * 25, "c" * 32


def _record(name: str, *offers: Offer) -> Record:
    return Record(
        version=VERSION,
        swarm="default",
        node=name.encode().hex().rjust(16, "0"),
        boot=1,
        name=name,
        build="x",
        platform="x",
        port=4100,
        expert_port=0,
        devices=(),
        memory_bytes=0,
        can_route=False,
        offers=offers,
    )


def test_who_has_what() -> None:
    whole, part = Offer(ID_A, "a.gguf", 10, True, True), Offer(ID_A, "other.gguf", 10, False, False)
    entries = catalogue([_record("two", part, Offer(ID_C, "c.gguf", 5, False, False)), _record("one", whole)])
    assert entries[0] == Entry(ID_A, "a.gguf", 10, ("one",), ("two",), has_trunk=True)
    assert entries[1] == Entry(ID_C, "c.gguf", 5, (), ("two",), has_trunk=False)


def test_what_a_user_means() -> None:
    a, b, c = (
        Entry(i, f, 1, (), (), True) for i, f in ((ID_A, "Big.gguf"), (ID_B, "big-2.gguf"), (ID_C, "aaaaaa.gguf"))
    )
    assert choose([a, b, c], "big") == choose([a, b, c], "big.gguf") == a
    assert choose([a, b, c], ID_B[:9]) == b
    assert choose([a, b, c], "aaaaaa") == c  # a name comes before an id
    assert choose([a, b, c], "cccccc") == c
    assert choose([a, b, c], "ccccc") is None
    assert choose([a, b, c], "nothing") is None
    with pytest.raises(ModelError, match="give more of the id"):
        choose([a, b], "aaaaaaa")


def test_offers_are_bounded_and_checked() -> None:
    offer = Offer(ID_A, "a.gguf", 10, True, True)
    assert decode(encode(_record("one", *[offer] * OFFERS_MAX))).offers == (offer,) * OFFERS_MAX
    for wrong in (
        [offer] * (OFFERS_MAX + 1),
        [msgspec.structs.replace(offer, id="../" + ID_A[3:])],
        [msgspec.structs.replace(offer, id=ID_A + "\n")],
        [msgspec.structs.replace(offer, file="x" * 64)],
        [msgspec.structs.replace(offer, bytes=-1)],
    ):
        with pytest.raises(RecordError):
            decode(encode(_record("one", *wrong)))


@pytest.mark.parametrize(
    ("configured", "name"),
    [("", ""), ("demo", ""), ("x/Qwen3", "Qwen3"), ("typo.gguf", ""), ("here", ""), ("8b6b72", "8b6b72")],
)
def test_what_is_no_path_is_a_name(configured: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    local = LocalModels(str(tmp_path / configured) if configured not in ("", "demo") else configured)
    assert local.catalogue_name() == name
    if configured == "typo.gguf":
        with pytest.raises(ModelError, match="does not exist"):
            local.served()
    elif configured != "demo":
        assert local.served() is None


def test_the_commands(tmp_path: Path) -> None:
    index, manifest, layout = source()
    store = ModelStore(tmp_path / "models")
    with store.create(manifest, layout, "small.gguf") as stored:
        stored.write(0, [piece_bytes(index, stored, 0)])
        stored.commit()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "node.commands.main", "model", *arguments],
            env={"SWARM_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path), "PATH": "", "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    nobody = ("--url", "http://127.0.0.1:9")
    (listed,) = json.loads(run("list", "--json", *nobody).stdout)["cache"]
    assert (listed["id"], listed["file"], listed["in_use"]) == (manifest.model_id, "small.gguf", False)
    assert 0 < listed["present_bytes"] < listed["bytes"]
    assert "small.gguf" in run("list", *nobody).stdout
    assert run("prune").stdout.startswith("nothing to remove")
    assert run("prune", "ffffff").returncode == 1
    with store.open(manifest.model_id) or pytest.fail():
        assert run("prune", "--all").stdout.startswith("in use, kept: small.gguf")
    assert run("prune", manifest.model_id[:6]).stdout.startswith("removed small.gguf")
    assert store.models() == []
