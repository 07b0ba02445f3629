"""What CONTRIBUTING.md promises of the code itself, and that each of these rules finds
what it is for (rigs/tidy.py)."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from node.commands import main as main_module
from rigs import ROOT, tidy

CODE_FOLDERS = ("node", "gossip", "kernels", "scripts", "tests")
DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def _modules(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def _native() -> list[Path]:
    folders = (ROOT / "kernels/src", ROOT / "tests/native")
    return sorted(path for folder in folders for path in folder.rglob("*.[ch]pp"))


def _packages() -> list[Path]:
    return [path for path in _modules("node", "gossip", "kernels") if path.name == "__init__.py"]


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _none(problems: list[str], path: Path) -> None:
    assert not problems, "\n".join(f"{path.relative_to(ROOT)}: {problem}" for problem in problems)


def _each(paths: list[Path]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return pytest.mark.parametrize("path", paths, ids=[str(path.relative_to(ROOT)) for path in paths])


# ---- the repository


@_each(_modules("node", "gossip", "kernels"))
def test_imports_go_one_way(path: Path) -> None:
    _none(tidy.import_problems(_dotted(path), path.read_text()), path)


@_each(_modules("node"))
def test_node_uses_what_gossip_shows(path: Path) -> None:
    _none(tidy.public_problems(path.read_text()), path)


def test_a_package_is_a_folder_and_never_two_deep() -> None:
    folders = [path for path in _packages() if len(path.relative_to(ROOT).parts) > 3]
    assert not folders, folders
    packages = {_dotted(path) for path in _packages() if path.parent.name not in ("node", "gossip", "kernels")}
    assert packages == {name for name in tidy.MAY_IMPORT if (ROOT / name.replace(".", "/")).is_dir()}


@_each(sorted((ROOT / "kernels/src").rglob("*.[ch]pp")))
def test_includes_go_one_way(path: Path) -> None:
    _none(tidy.include_problems(path.parent.name, path.read_text()), path)


@_each(_modules(*CODE_FOLDERS))
def test_a_module_fits(path: Path) -> None:
    text = path.read_text()
    long = path.is_relative_to(ROOT / "tests")
    _none(tidy.length_problems(text, tidy.LONG_MODULE_LINES_MAX if long else tidy.MODULE_LINES_MAX), path)
    _none(tidy.function_problems(text), path)
    _none(tidy.code_width_problems(text), path)


@_each(_native())
def test_a_native_file_fits(path: Path) -> None:
    _none(tidy.length_problems(path.read_text(), tidy.LONG_MODULE_LINES_MAX), path)
    _none(tidy.code_width_problems(path.read_text()), path)


@_each(DOCUMENTS)
def test_a_document_can_be_read_and_is_true(path: Path) -> None:
    text = path.read_text()
    _none(tidy.prose_problems(text), path)
    _none(tidy.path_problems(ROOT, text), path)
    _none(tidy.command_problems(ROOT, text, SUBCOMMANDS), path)


@_each([*_modules(*CODE_FOLDERS), *_native(), *DOCUMENTS])
def test_no_name_is_cited_that_is_not_here(path: Path) -> None:
    if path != Path(__file__):
        _none(tidy.foreign_names(path.read_text()), path)


@_each(_modules(*CODE_FOLDERS))
def test_docstrings_and_comments_stand_alone(path: Path) -> None:
    _none(tidy.fragment_problems(path.read_text()), path)


@_each(_packages())
def test_a_package_tells_its_story(path: Path) -> None:
    name = _dotted(path)
    neighbours = [*tidy.MAY_IMPORT, "node", "gossip", "kernels"]
    _none(tidy.story_problems(path.read_text(), [other for other in neighbours if other != name]), path)


def test_the_table_of_packages_is_the_one_that_is_held_to() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| `((?:node|gossip)\.[a-z_]+)` \|.*\| ([^|]*) \|$", text, re.MULTILINE)
    table = {name: set(re.findall(r"(?:node|gossip)\.[a-z_]+", allowed)) for name, allowed in rows}
    assert table == {name: set(allowed.split()) for name, allowed in tidy.MAY_IMPORT.items()}


def test_documents_are_all_held_to_it() -> None:
    assert {path.name for path in ROOT.glob("*.md")} == {path.name for path in DOCUMENTS if path.parent == ROOT}


# ---- the rules: each finds what is planted, and nothing beside it


def _subcommands(parser: argparse.ArgumentParser, prefix: str = "") -> Iterator[tuple[str, set[str]]]:
    flags = {flag for action in parser._actions for flag in action.option_strings}
    yield prefix, flags
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from _subcommands(child, f"{prefix} {name}".strip())


SUBCOMMANDS = dict(_subcommands(main_module._parser()))
# Without a command a node runs.
SUBCOMMANDS[""] |= SUBCOMMANDS["run"]


@pytest.mark.parametrize(
    ("module", "text", "found"),
    [
        ("node.api.turns", "from node.router.failure import ExpertFailure", ""),
        ("node.api.turns", "from node.agent.view import View", "node.api must not import node.agent.view"),
        ("node.api.turns", "def f():\n    import node.agent", "line 2: node.api must not import node.agent"),
        ("node.api.turns", "from node import agent", "node.api must not import node.agent"),
        ("node.slices", "from node.models import gguf", "node must not import node.models.gguf"),
        ("node.slices", "from node.errors import SwarmError\nimport gossip", ""),
        ("node.models.gguf", "import kernels", ""),
        ("gossip.address", "import node.errors", "gossip must not import node.errors"),
        ("gossip.service", "from gossip.swim.core import Gossip", ""),
        ("gossip", "from gossip.swim.core import Gossip\nfrom gossip.service import Service", ""),
        ("gossip", "from node.errors import SwarmError", "gossip must not import node.errors"),
        (
            "gossip.discovery.dns_sd",
            "from gossip.swim import core",
            "gossip.discovery must not import gossip.swim.core",
        ),
        ("gossip.swim.core", "import asyncio", "asyncio in the state machine"),
        ("gossip.swim.core", "from time import monotonic", "time in the state machine"),
        ("kernels.reference", "from node.slices import Slice", "kernels must not import node.slices"),
    ],
)
def test_imports(module: str, text: str, found: str) -> None:
    assert found in "".join(tidy.import_problems(module, text))
    assert bool(tidy.import_problems(module, text)) == bool(found)


def test_what_is_not_public() -> None:
    assert tidy.public_problems("from gossip import Service\nfrom gossip.discovery import find\nimport json") == []
    assert len(tidy.public_problems("from gossip.swim.core import Gossip\nimport gossip.state")) == 2


@pytest.mark.parametrize(
    ("folder", "line", "good"),
    [
        ("router", '#include "common/net.hpp"', True),
        ("router", '#include "router/wire.hpp"', True),
        ("router", "#include <vector>", True),
        ("llama", '#include "ggml-backend-impl.h"', True),
        ("router", '#include "llama/backend.hpp"', False),
        ("expert_server", '#include "router/wire.hpp"', False),
        ("common", '#  include "router/wire.hpp"', False),
        ("router", '#include "wire.hpp"', False),
    ],
)
def test_includes(folder: str, line: str, good: bool) -> None:
    assert (not tidy.include_problems(folder, line)) == good


def test_lengths() -> None:
    assert tidy.length_problems("x = 1\n" * 400, 400) == [] and tidy.length_problems("x = 1\n" * 401, 400)
    body = "    x = 1\n"
    assert tidy.function_problems("def f():\n" + 59 * body) == []
    assert tidy.function_problems("def f():\n" + 60 * body)
    assert tidy.function_problems("class A:\n  async def f(self):\n" + 60 * body)
    assert tidy.code_width_problems("x" * 120 + "  # noqa: E501") == [] and tidy.code_width_problems("\n" + "x" * 121)


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("w " * 50, True),
        ("w " * 51, False),
        ("- " + "w " * 50, False),
        ("```\n" + "w " * 90 + "\n```\n", True),
        ("text\n\n    " + "w " * 90 + "\n", True),
        ("text\n    " + "w " * 90 + "\n", False),
        ("```\n```\n" + "w " * 90, False),
        ("[" + "w" * 90 + "](" + "x" * 90 + ")", True),
        ("see https://example.com/" + "x" * 90 + " there", True),
        ("| " + "w " * 75 + "|" + " x" * 75 + " |", True),
        ("| " + "w " * 81 + "| x |", False),
    ],
)
def test_prose(text: str, good: bool) -> None:
    assert (not tidy.prose_problems(text)) == good


def test_foreign_names() -> None:
    assert tidy.foreign_names("SHA-256 of UTF-8, AVX-512; x-1, A-1, n-1") == []
    # Put together here, so that this file has none.
    assert tidy.foreign_names("as in " + "DISC" + "-2") and tidy.foreign_names("# (" + "SEC" + "-1)")


def test_fragments() -> None:
    assert tidy.fragment_problems('x = 1  # Of it\n"""The record of it."""\n# The name\n# Of a node') == []
    assert tidy.fragment_problems('    """' + 'Of its record."""') and tidy.fragment_problems("# " + "By content.")


def test_stories() -> None:
    long = '"""What it is.\n\nIts neighbours are node.agent and others.\n"""'
    assert tidy.story_problems(long, ["node.agent"]) == []
    assert tidy.story_problems(long, ["node.api"])
    assert tidy.story_problems('"""Short."""', ["node.agent"]) and tidy.story_problems("", ["node.agent"])


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("`node/errors.py` and `tests/rigs/tidy.py`", True),
        ("`api/front_door` and `api/front_door.py:12`", True),
        ("`node/{errors,paths}.py`, `docs/*.md`, `gossip/swim`", True),
        ("[this](architecture.md#agents), [that](../README.md)", True),
        ("`GET /v1/models`, `a/b`, `x.y`, `application/json`", True),
        ("    node/nothing.py in a screen", True),
        ("`node/nothing.py`", False),
        ("`api/nothing`", False),
        ("`nothing.cpp`", False),
        ("`node/{errors,nothing}.py`", False),
        ("[this](nothing.md)", False),
    ],
)
def test_paths(text: str, good: bool) -> None:
    assert (not tidy.path_problems(ROOT, "x\n\n" + text)) == good


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("`scripts/run --ask` and `scripts/test`", True),
        ("`python -m gossip.simulate --nodes 3`, `python -P -m node.expert_server`", True),
        ("`swarm-node status`, `swarm-node model show FILE --memory 16`, `swarm-node --model FILE`", True),
        ("    $ swarm-node ask --max-tokens 3 x  # --nothing", True),
        ("swarm-node runs on any machine", True),
        ("`scripts/nothing`", False),
        ("`python -m gossip.nothing`", False),
        ("`swarm-node nothing`", False),
        ("`swarm-node status --nothing`", False),
        ("swarm-node model show --nothing", False),
    ],
)
def test_commands(text: str, good: bool) -> None:
    assert (not tidy.command_problems(ROOT, text, SUBCOMMANDS)) == good


def test_every_rule_has_its_planted_violation() -> None:
    """A rule that is added gets a test that shows it failing."""
    rules = {
        found.name
        for found in ast.parse((ROOT / "tests/rigs/tidy.py").read_text()).body
        if isinstance(found, ast.FunctionDef) and (found.name.endswith("_problems") or found.name == "foreign_names")
    }
    tested = Path(__file__).read_text().split("# ---- the rules")[1]
    assert [rule for rule in rules if f"tidy.{rule}(" not in tested and rule != "usage_problems"] == []
