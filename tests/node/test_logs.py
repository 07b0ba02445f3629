"""Logs: for people, for machines, and never a key in either."""

import io
import json
import logging
import re
import warnings
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.logs import Redactor, configure

log = logging.getLogger("node.test")
SECRET = 'k"ey\\/+with all'


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    logging.captureWarnings(False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(format: str, level: str = "info", *, terminal: bool = False) -> io.StringIO:
    stream = Terminal() if terminal else io.StringIO()
    root = logging.getLogger()
    # pytest's own raise what ours must survive.
    root.handlers[:] = [one for one in root.handlers if "_pytest" not in type(one).__module__]
    configure(format, level, secrets=[SECRET, ""], stream=stream)
    return stream


def raised() -> None:
    try:
        raise ValueError(f"no {SECRET}")
    except ValueError:
        log.exception("it failed")


def test_text() -> None:
    stream = written("text")
    log.info("node %s joined", "beta", extra={"layer": 3, "experts": [1, 2], "address": "10.0.0.1"})
    log.debug("not shown")
    log.error("bad")
    first, second, end = stream.getvalue().split("\n")
    assert re.fullmatch(r"\d\d:\d\d:\d\d info    node beta joined layer=3 experts=\[1, 2\] address=10\.0\.0\.1", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d error   bad", second) and end == ""


def test_json() -> None:
    stream = written("json", "debug")
    log.debug(
        "node %s", "beta", extra={"layer": 3, "experts": (1, 2), "rate": float("nan"), "ts": "mine", "of": {1: None}}
    )
    raised()
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("ts"))
    assert first == {
        "level": "debug", "logger": "node.test", "msg": "node beta", "layer": 3, "experts": [1, 2], "rate": "nan",
        "of": {"1": None},
    }  # fmt: skip
    assert second["level"] == "error" and second["exception"].endswith("ValueError: no [redacted]")


def test_colour_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = written("text", terminal=True)
    log.warning("careful")
    assert "\x1b[33mwarning\x1b[0m careful" in stream.getvalue()
    for variable, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            stream = written("text", terminal=True)
            log.warning("careful")
            assert "\x1b" not in stream.getvalue()
    stream = written("json", terminal=True)
    log.warning("careful")
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("format", ["text", "json"])
def test_no_key_in_any_part_of_a_record(format: str) -> None:
    stream = written(format)
    log.info("key %s", SECRET)
    log.info(f"key {SECRET}")
    log.info("url /?key=k%22ey%5C%2F%2Bwith%20all")
    log.info("repr %r of %s", SECRET, [SECRET])
    log.info("extra", extra={"key": SECRET, "deep": {"a": [{SECRET: (SECRET,)}]}, "object": Exception(SECRET)})
    log.info("too %s few", SECRET, "arguments")
    log.info("headers %s", {"Authorization": "Bearer abc.def-123", "x-api-key": "sk-abc.def"})
    log.info("Authorization: bearer abc.def-123")
    raised()
    text = stream.getvalue()
    assert text.count("\n") >= 9
    for part in ("with all", "with%20all", "abc.def"):
        assert part not in text
    assert text.count("[redacted]") >= 12


@given(st.text(min_size=1), st.text(), st.text())
def test_redaction_is_complete(secret: str, before: str, after: str) -> None:
    text = Redactor([secret]).text(before + secret + after)
    assert "[redacted]" in text
    assert secret not in text.replace("[redacted]", "\0") or "\0" in secret


def test_a_message_cannot_look_like_another_record() -> None:
    stream = written("text")
    log.info("peer says %s", "x\n00:00:00 error   all is lost\x1b[2J\r\x9b\u202ereversed")
    lines = stream.getvalue().rstrip("\n").split("\n")
    assert len(lines) == 2
    assert lines[1] == "    00:00:00 error   all is lost\\x1b[2J\\r\\x9b\\u202ereversed"


def test_configured_twice_writes_once() -> None:
    first, second = written("text"), written("json")
    log.info("once")
    assert first.getvalue() == "" and second.getvalue().count("\n") == 1


def test_levels_and_libraries() -> None:
    stream = written("text")
    logging.getLogger("aiohttp.access").info("GET /")
    logging.getLogger("zeroconf").warning("a problem")
    assert "GET" not in stream.getvalue() and "a problem" in stream.getvalue()
    stream = written("text", "debug")
    logging.getLogger("aiohttp.access").info("GET /")
    assert "GET /" in stream.getvalue()
    stream = written("text", "error")
    log.warning("hidden")
    assert stream.getvalue() == ""
    with pytest.raises(ValueError, match="yaml"):
        configure("yaml", "info")


def test_warnings_of_python_are_logged() -> None:
    with warnings.catch_warnings():
        stream = written("text")
        warnings.simplefilter("always")
        warnings.warn("old call", stacklevel=1)
        assert "warning" in stream.getvalue() and "old call" in stream.getvalue()
        logging.captureWarnings(False)
