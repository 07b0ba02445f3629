"""Levels by name: how the setting is read, what is said of a wrong one, and what each logger then writes."""

import ast
import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node import log_levels
from node.log_levels import LEVELS, LogLevels, apply_levels, known_names, levels_from_environment, parse_levels
from node.logs import configure
from rigs import ROOT, fake_server

NAMES = sorted(known_names())


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield
    apply_levels(LogLevels("warning"))
    root.handlers[:] = handlers
    logging.captureWarnings(False)


def problem(text: str) -> str:
    with pytest.raises(ValueError) as caught:
        parse_levels(text)
    return str(caught.value)


@given(st.sampled_from(LEVELS), st.dictionaries(st.sampled_from(NAMES), st.sampled_from(LEVELS), max_size=9))
def test_what_is_written_is_read_again(default: str, by_name: dict[str, str]) -> None:
    levels = LogLevels(default, by_name)
    assert parse_levels(str(levels)) == levels


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(LEVELS)), unique_by=lambda pair: pair[0], max_size=5),
    st.sampled_from(LEVELS),
    st.integers(0, 5),
    st.sampled_from(["", " ", "  "]),
)
def test_the_default_may_stand_anywhere(by_name: list[tuple[str, str]], default: str, place: int, blank: str) -> None:
    words = [f"{name}{blank}={blank}{level.upper()}" for name, level in by_name]
    words.insert(min(place, len(words)), default)
    assert parse_levels(f"{blank},{blank}".join(words)) == LogLevels(default, dict(by_name))


def test_without_a_default_it_is_info() -> None:
    assert parse_levels("node.api=debug") == LogLevels("info", {"node.api": "debug"})


@given(st.text(max_size=300))
def test_any_other_text_is_refused_in_a_line(text: str) -> None:
    try:
        levels = parse_levels(text)
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
    else:
        assert {levels.default, *levels.by_name.values()} <= set(LEVELS) and set(levels.by_name) <= set(NAMES)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("inf", 'must be "debug", "info", "warning" or "error"; did you mean "info"?'),
        ("node.api=info,inf", '\'inf\': the level must be "debug", "info", "warning" or "error"; did you mean "info"?'),
        ("info,node.api=loud", '\'node.api=loud\': the level must be "debug", "info", "warning" or "error"'),
        (
            "info,nodes.api=debug",
            "'nodes.api=debug': there is no package or module of that name; did you mean node.api?",
        ),
        ("info,=debug", "'=debug': there is no package or module of that name; known are gossip, gossip.discovery,"),
        ("aiohttp=debug", "'aiohttp=debug': there is no package or module of that name; known are gossip,"),
        ("node.api", "'node.api' needs a level: node.api=debug"),
        ("info,debug", "'debug' is a second level for everything"),
        ("node=info,node=info", "'node=info' names node a second time"),
        ("info,", "has an empty word"),
        ("", "has an empty word"),
        (",".join(f"{name}=info" for name in NAMES), "has more than 64 words"),
        ("x" * 9999, "must be"),
        ("x" * 9999 + "=info", "'xxx"),
    ],
)
def test_what_is_said_of_a_wrong_one(text: str, wanted: str) -> None:
    assert problem(text).startswith(wanted)
    assert len(problem(text)) < 600


def test_names_are_those_of_the_modules() -> None:
    assert {"node", "node.api", "node.api.front_door", "gossip.swim.core", "kernels", "node.expert_server"} <= set(
        NAMES
    )
    files = [path for root in ("node", "gossip", "kernels") for path in (ROOT / root).rglob("*.py")]
    assert len(NAMES) >= len(files) > 100


def written(level: str) -> io.StringIO:
    stream = io.StringIO()
    configure("text", level, stream=stream)
    for name in ("node.api.front_door", "node.api", "node.agent.agent", "gossip.service", "node.apiary"):
        for one in LEVELS:
            logging.getLogger(name).log(getattr(logging, one.upper()), "%s of %s", one, name)
    return stream


def test_a_name_covers_what_is_below_it_and_nothing_else() -> None:
    text = written("warning,node.api=debug,gossip=error").getvalue()
    for shown in ("debug of node.api.front_door", "debug of node.api\n", "warning of node.agent.agent"):
        assert shown in text
    assert "info of node.apiary" not in text and "info of node.agent" not in text
    assert "warning of gossip" not in text and "error of gossip" in text


def test_the_longer_name_counts() -> None:
    text = written("error,node.api.front_door=debug,node.api=warning").getvalue()
    assert "debug of node.api.front_door" in text
    assert "info of node.api\n" not in text and "warning of node.api\n" in text


def test_levels_replace_earlier_ones() -> None:
    written("info,node.api=error")
    text = written("info").getvalue()
    assert "info of node.api.front_door" in text and "debug of" not in text


def test_only_debug_for_everything_opens_the_talkative_libraries() -> None:
    configure("text", "info,node=debug")
    assert not logging.getLogger("zeroconf").isEnabledFor(logging.INFO)
    configure("text", "debug,node=info")
    assert logging.getLogger("zeroconf").isEnabledFor(logging.DEBUG)


def test_a_childs_levels_are_its_parents() -> None:
    levels = LogLevels("warning", {"node.expert_server": "debug"})
    assert levels_from_environment({log_levels.VARIABLE: str(levels)}) == levels
    assert levels_from_environment({log_levels.VARIABLE: "nonsense"}) == levels_from_environment({}) == LogLevels()


def run_node(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`swarm-node` on a port that cannot be had, so that it ends as soon as it has read its settings."""
    own = {"SWARM_NODE_STATE_FOLDER": str(folder / "file" / "in the way"), "SWARM_CONFIG": os.devnull}
    (folder / "file").touch()
    return subprocess.run(
        [sys.executable, "-m", "node.commands.main", *arguments],
        env={**os.environ, **own},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_verbose_is_debug_for_everything_that_has_no_level_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from node.commands import run

    configured: list[str] = []

    def stop(format: str, level: str, **more: object) -> None:
        configured.append(level)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "configure", stop)
    monkeypatch.setenv("SWARM_CONFIG", os.devnull)
    from node.commands.main import main

    for arguments in (["-v", "run", "--log-level=info,gossip=error"], ["--log-level=info,gossip=error"]):
        assert main(arguments) == 130
    assert configured == ["debug,gossip=error", "info,gossip=error"]


def test_a_wrong_level_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    done = run_node(tmp_path, "--log-level", "info,node.ap=debug")
    assert done.returncode == 2
    assert done.stderr.startswith("--log-level \"info,node.ap=debug\": 'node.ap=debug': there is no package")
    assert done.stderr.endswith("did you mean node.api?\n")


@pytest.mark.parametrize(("level", "shown"), [("info,node.expert_server=debug", True), ("debug,node=info", False)])
async def test_an_expert_server_has_the_levels_of_its_parent(tmp_path: Path, level: str, shown: bool) -> None:
    path = tmp_path / "experts.log"
    async with fake_server.server(fake_server.order(), environment={log_levels.VARIABLE: level}, stderr=path):
        pass
    assert ("DEBUG node.expert_server" in path.read_text()) is shown


def test_debug_lines_cost_nothing_when_they_are_off() -> None:
    """Their text is formatted by the logging module, once a handler wants it."""
    for root in ("node", "gossip", "kernels"):
        for path in (ROOT / root).rglob("*.py"):
            for call in ast.walk(ast.parse(path.read_text())):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "log.debug":
                    assert isinstance(call.args[0], ast.Constant), f"{path}:{call.lineno} formats its text itself"
