"""Suites of scripts/soak: which are meant, and what is remembered of those that have passed."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import soak


def test_which_suites_are_meant() -> None:
    assert soak.chosen([]) == list(soak.SUITES)
    assert soak.chosen(["faults", "decoder", "faults"]) == ["faults", "decoder"]
    assert len(soak.chosen(["gossip"])) == len(soak.GOSSIP)
    with pytest.raises(ValueError, match="no suite nothing; suites are decoder, "):
        soak.chosen(["decoder", "nothing"])


def test_a_run_that_was_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "STATE", tmp_path / "build" / "soak.json")
    assert soak.passed("abc") == {}
    soak.keep("abc", {"decoder": "3 mutants accepted"})
    assert soak.passed("abc") == {"decoder": "3 mutants accepted"}
    assert soak.passed("another commit") == {}
    for damaged in ("", "[]", '{"commit": "abc"}', '{"commit": "abc", "passed": 3}'):
        soak.STATE.write_text(damaged)
        assert soak.passed("abc") == {}


def test_a_failure_is_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(limits: soak.Limits) -> str:
        raise AssertionError("as it should")

    ran: list[int] = []

    def holds(limits: soak.Limits) -> str:
        ran.append(limits.seed)
        return "held"

    monkeypatch.setattr(soak, "STATE", tmp_path / "soak.json")
    monkeypatch.setattr(soak, "commit", lambda: "abc")
    monkeypatch.setattr(soak, "SUITES", {"one": fails, "two": holds})
    monkeypatch.setattr("sys.argv", ["soak", "--seed", "7"])
    assert soak.main() == 1
    said = capsys.readouterr().out
    assert "one: FAILED: as it should" in said and "failed: one; with --seed 7 they run as they did" in said
    assert soak.main() == 1 and ran == [7], "what has passed is not run again"
    monkeypatch.setattr("sys.argv", ["soak", "--again", "two"])
    assert soak.main() == 0 and len(ran) == 2
