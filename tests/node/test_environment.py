"""The table of environment variables: the same in code and document, and nothing is read that is not in it."""

from __future__ import annotations

import re

import pytest

from node import environment
from node.settings.table import SETTINGS
from rigs import ROOT

DOCUMENT = ROOT / "docs" / "environment.md"
SETTINGS_VARIABLES = {setting.variable for setting in SETTINGS}


def _table() -> str:
    rows = [f"| `{v.name}` | {v.readers} | {v.purpose} | {v.default} |" for v in environment.VARIABLES]
    return "\n".join(["| variable | read by | what it does | without it |", "|---|---|---|---|", *rows])


def test_the_document_has_the_table() -> None:
    start, end = "<!-- variables -->\n", "\n<!-- end of variables -->"
    assert _table() == DOCUMENT.read_text().partition(start)[2].partition(end)[0]


def test_what_stands_in_the_table_is_no_setting() -> None:
    names = [variable.name for variable in environment.VARIABLES]
    assert len(set(names)) == len(names)
    assert not SETTINGS_VARIABLES & set(names)


def test_every_variable_that_the_sources_read_is_in_the_table() -> None:
    """A name in quotes, in Python or C++, is a variable that is read or set: constants have no quotes."""
    known = {variable.name for variable in environment.VARIABLES} | SETTINGS_VARIABLES
    found = {}
    for folder, kinds in (("node", ("py",)), ("gossip", ("py",)), ("kernels", ("py", "cpp", "hpp"))):
        for kind in kinds:
            for path in (ROOT / folder).rglob(f"*.{kind}"):
                for name in re.findall(r"""["'](SWARM_[A-Z_]+)["']""", path.read_text()):
                    found[name] = path
    assert len(found) > 10
    assert {name: path for name, path in found.items() if name not in known} == {}


def test_python_names_each_variable_once() -> None:
    """So that a reader finds who else uses it: by its constant."""
    names = {variable.name for variable in environment.VARIABLES}
    for path in (ROOT / "node").rglob("*.py"):
        if path != ROOT / "node" / "environment.py":
            assert not names & set(re.findall(r"""["'](SWARM_[A-Z_]+)["']""", path.read_text())), path


@pytest.mark.parametrize(
    ("text", "limit_us"),
    [("", 300), ("0", 0), ("250", 250), ("10001", 10_000), ("1000000", 300), ("-1", 300), ("x", 300), ("1.5", 300)],
)
def test_the_limit_of_polling(text: str, limit_us: int) -> None:
    assert environment.poll_us({environment.POLL_US: text}) == limit_us


def test_the_native_side_has_the_same_limit_of_polling() -> None:
    sources = [path.read_text() for kind in ("cpp", "hpp") for path in (ROOT / "kernels" / "src").rglob(f"*.{kind}")]
    found = re.findall(r"(?i)\b\w*(?:default|max)\w*_?us\s*=\s*([0-9']+)", "\n".join(sources))
    limits = [int(number.replace("'", "")) for number in found]
    assert sorted(limits) == [environment.DEFAULT_POLL_US, environment.MAX_POLL_US]
