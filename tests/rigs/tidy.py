"""Rules that a machine can hold, each a function of a text: what it returns are the violations, as sentences.

``tests/test_tidy.py`` holds the repository to them, and shows that each finds what it is for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

#: A package may import those named here, itself, and the leaves: the modules that lie directly in `node` and in
#: `gossip`, which import no package. The whole architecture; docs/architecture.md has it as a table.
MAY_IMPORT: dict[str, str] = {
    "node.settings": "",
    "node.models": "",
    "node.expert_server": "",
    "node.peers": "node.settings gossip.discovery",
    "node.router": "node.models",
    "node.transfer": "node.models node.peers",
    "node.api": "node.peers node.router",
    "node.agent": "node.settings node.models node.expert_server node.peers node.router node.transfer node.api",
    "node.commands": "node.settings node.models node.expert_server node.peers node.router node.transfer node.agent "
    "gossip.discovery",
    "gossip.swim": "",
    "gossip.discovery": "",
    "gossip.service": "gossip.swim",
    "gossip.simulate": "gossip.swim gossip.service",
}
#: What `node` may import of `gossip`: the lists of these, and nothing below.
PUBLIC = ("gossip", "gossip.discovery")
#: The state machine has no I/O and no clock: its caller gives it both.
WITHOUT_IO = ("asyncio", "socket", "time", "aiohttp", "threading", "subprocess", "select", "selectors")
#: The same for the folders of kernels/src: a file may include those of these folders, and of its own.
MAY_INCLUDE = {"common": "", "expert_server": "common", "router": "common", "llama": "common router"}

FUNCTION_LINES_MAX = 60
MODULE_LINES_MAX = 400
LONG_MODULE_LINES_MAX = 700
CODE_COLUMNS_MAX = 120
PROSE_COLUMNS_MAX = 100
CELL_COLUMNS_MAX = 160

#: Names of that form which everybody knows, or can look up. All others are of catalogues that a reader does not have.
_KNOWN_NAMES = {"AES-256", "AVX-512", "GPT-2", "LENGTH-1", "SHA-1", "SHA-256", "UTF-8", "UTF-16"}


def _part(module: str) -> str:
    """The package that a module is of; ``node``, ``gossip`` or ``kernels`` for a module directly there."""
    two = ".".join(module.split(".")[:2])
    return two if two in MAY_IMPORT else module.split(".")[0]


def _imports(text: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that is imported, also within functions."""
    for found in ast.walk(ast.parse(text)):
        if isinstance(found, ast.Import):
            yield from ((found.lineno, alias.name) for alias in found.names)
        elif isinstance(found, ast.ImportFrom) and found.level == 0 and found.module:
            if found.module in ("node", "gossip", *MAY_IMPORT):
                yield from ((found.lineno, f"{found.module}.{alias.name}") for alias in found.names)
            else:
                yield found.lineno, found.module


def import_problems(module: str, text: str) -> list[str]:
    """Imports that go another way than MAY_IMPORT says."""
    own = _part(module)
    allowed = {own, own.split(".")[0], *MAY_IMPORT.get(own, "").split(), "kernels"}
    if own.split(".")[0] == "node":
        allowed.add("gossip")
    if own == "kernels":
        allowed = {"kernels"}
    if module == "gossip":
        # The public list of the package, which imports what it lists.
        allowed.update(name for name in MAY_IMPORT if name.startswith("gossip."))
    problems = []
    for line, name in _imports(text):
        if name.split(".")[0] in ("node", "gossip", "kernels") and _part(name) not in allowed:
            problems.append(f"line {line}: {own} must not import {name}")
        if own == "gossip.swim" and name.split(".")[0] in WITHOUT_IO:
            problems.append(f"line {line}: {name} in the state machine, which has no I/O and no clock")
    return problems


def public_problems(text: str) -> list[str]:
    """Imports of `gossip` by another part than through its public lists."""
    problems = []
    for found in ast.walk(ast.parse(text)):
        names = [found.module] if isinstance(found, ast.ImportFrom) and found.module else []
        if isinstance(found, ast.Import):
            names = [alias.name for alias in found.names]
        problems += [
            f"line {found.lineno}: {name} is not public: import from {' or '.join(PUBLIC)}"
            for name in names
            if name.split(".")[0] == "gossip" and name not in PUBLIC
        ]
    return problems


def include_problems(folder: str, text: str) -> list[str]:
    """Includes of C++ files that go another way than MAY_INCLUDE says, or that name no folder."""
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        found = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if found is None:
            continue
        target = found[1].split("/")[0]
        if "/" not in found[1]:
            if found[1].startswith(("ggml", "llama", "gguf")):
                continue
            problems.append(f"line {number}: {found[1]} is included without its folder")
        elif target in MAY_INCLUDE and target != folder and target not in MAY_INCLUDE[folder].split():
            problems.append(f"line {number}: {folder} must not include {found[1]}")
    return problems


def length_problems(text: str, lines_max: int) -> list[str]:
    """A file of more lines than that."""
    count = len(text.splitlines())
    return [f"{count} lines of at most {lines_max}: is there a second idea in it?"] if count > lines_max else []


def function_problems(text: str) -> list[str]:
    """Python functions of more than FUNCTION_LINES_MAX lines."""
    problems = []
    for found in ast.walk(ast.parse(text)):
        if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            count = (found.end_lineno or found.lineno) - found.lineno + 1
            if count > FUNCTION_LINES_MAX:
                problems.append(f"line {found.lineno}: {found.name} has {count} lines of at most {FUNCTION_LINES_MAX}")
    return problems


def code_width_problems(text: str) -> list[str]:
    """Lines of code of more than CODE_COLUMNS_MAX columns; what they say to tools at their end does not count."""
    return [
        f"line {number}: {len(line)} columns of at most {CODE_COLUMNS_MAX}"
        for number, line in enumerate(text.splitlines(), 1)
        if len(_PRAGMA.sub("", line)) > CODE_COLUMNS_MAX
    ]


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a document that are neither code nor a screen: not between fences, not indented by four."""
    fenced = screen = False
    before = ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            if line.strip():
                screen = line.startswith("    ") and (screen or not before.strip())
            if not screen:
                yield number, line
        before = line


def prose_problems(text: str) -> list[str]:
    """Lines of a document of more than PROSE_COLUMNS_MAX columns and cells of more than CELL_COLUMNS_MAX.

    Targets of links do not count: nobody reads them.
    """
    problems = []
    for number, line in prose_lines(text):
        shown = re.sub(r"\]\([^)]*\)|https?://\S+", "]", line)
        if line.startswith("|"):
            wide = [cell for cell in re.split(r"(?<!\\)\|", shown) if len(cell.strip()) > CELL_COLUMNS_MAX]
            problems += [f"line {number}: a cell of {len(c.strip())} columns, at most {CELL_COLUMNS_MAX}" for c in wide]
        elif len(shown) > PROSE_COLUMNS_MAX and " " in shown.strip():
            problems.append(f"line {number}: {len(shown)} columns of at most {PROSE_COLUMNS_MAX}")
    return problems


def foreign_names(text: str) -> list[str]:
    """Names of letters, a dash and a number, of catalogues that are not in the repository."""
    return [
        f"line {number}: {name} is no name in this repository: state the promise itself"
        for number, line in enumerate(text.splitlines(), 1)
        for name in re.findall(r"\b[A-Z]{2,8}-[0-9]+\b", line)
        if name not in _KNOWN_NAMES
    ]


_FRAGMENT = re.compile(r"(?:Of|One's|Those of|Both of)\b|By .{1,24}$")
_PRAGMA = re.compile(r"  # (?:type: ignore|noqa|fmt:|pragma:).*")


def fragment_problems(text: str) -> list[str]:
    """Docstrings and comments that begin in the middle of a sentence, whose noun a reader of a hover does not see."""
    problems = []
    before_is_comment = False
    for number, line in enumerate(text.splitlines(), 1):
        found = re.match(r"\s*(?:#:? |[bru]*\"\"\")(.*?)(?:\"\"\")?$", line)
        is_comment = line.lstrip().startswith("#")
        if found is not None and not (is_comment and before_is_comment) and _FRAGMENT.match(found[1]):
            problems.append(f"line {number}: {found[1][:40]!r} does not stand alone: name what it is of")
        before_is_comment = is_comment
    return problems


def story_problems(text: str, neighbours: Iterable[str]) -> list[str]:
    """A package whose docstring is missing, too short for a story, or says nothing of the packages beside it."""
    told = ast.get_docstring(ast.parse(text)) or ""
    if len(told.splitlines()) < 3:
        return ["a package says its story and its neighbours in a docstring of some lines"]
    if not any(name.rpartition(".")[2] in told for name in neighbours):
        return [f"its docstring names none of its neighbours: {', '.join(neighbours)}"]
    return []


#: Where a path that a document names may begin: in the root, and where the documents' readers are said to be.
_ROOTS = ("", "node", "gossip", "kernels", "kernels/src", "tests", "docs", "scripts")
_PATH = re.compile(r"[A-Za-z0-9_.*{},-]+(?:/[A-Za-z0-9_.*{},-]+)*/?")
_SUFFIXES = (".py", ".cpp", ".hpp", ".md", ".toml", ".cmake", ".sh", ".c", ".pyi", ".tsv", ".svg")
_OURS = ("node", "gossip", "kernels", "scripts", "tests", "docs", *MAY_INCLUDE)


def _alternatives(pattern: str) -> list[str]:
    found = re.search(r"\{([^{}]*)\}", pattern)
    if found is None:
        return [pattern]
    return [
        one
        for choice in found[1].split(",")
        for one in _alternatives(pattern[: found.start()] + choice.strip() + pattern[found.end() :])
    ]


def path_exists(root: Path, named: str) -> bool:
    """Whether a document's name of a path means something: with ``*`` and ``{a,b}``, with or without a suffix."""
    for one in _alternatives(named.rstrip("/")):
        places = [f"{place}/{one}".lstrip("/") for place in _ROOTS]
        if not any(any(root.glob(p)) or any(root.glob(f"{p}.*")) for p in places):
            return False
    return True


def path_problems(root: Path, text: str) -> list[str]:
    """Paths between backticks, and targets of links, that are not in the repository."""
    problems = []
    packages = {path.name for folder in ("node", "gossip", "kernels/src") for path in (root / folder).iterdir()}
    for number, line in prose_lines(text):
        named = set()
        for quoted in re.findall(r"`([^`]+)`", line):
            word = quoted.split(" ")[0].rstrip(":,;")
            if _PATH.fullmatch(word) is None or word.startswith((".", "-")):
                continue
            first = word.split("/")[0]
            is_ours = "/" in word and (first in _OURS or first in packages)
            if is_ours or (word.endswith(_SUFFIXES) and not word.startswith("*")):
                named.add(word)
        problems += [f"line {number}: there is no {word}" for word in sorted(named) if not path_exists(root, word)]
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", line):
            if not any((root / place / target).exists() for place in ("", "docs")):
                problems.append(f"line {number}: the link to {target} leads nowhere")
    return problems


def command_problems(root: Path, text: str, subcommands: dict[str, set[str]]) -> list[str]:
    """Commands of ours that a document names, in prose or code, and that do not exist.

    ``subcommands``: of swarm-node, each with its flags; "" has the flags of the program itself.
    """
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        for name in re.findall(r"(?:^|[\s`(])scripts/([a-z][a-z0-9_.-]*[a-z0-9])", line):
            if not (root / "scripts" / name).exists():
                problems.append(f"line {number}: there is no scripts/{name}")
        for module in re.findall(r"python3? (?:-[A-Z] )*-m ((?:node|gossip|kernels|scripts)[a-z_.]*)", line):
            path = root / module.rstrip(".").replace(".", "/")
            if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
                problems.append(f"line {number}: there is no module {module} to run")
        for quoted in re.findall(r"`swarm-node ([^`]*)`", line):
            problems += [f"line {number}: {p}" for p in usage_problems(quoted.split(), subcommands, strict=True)]
        if line.lstrip(" $").startswith("swarm-node "):
            words = line.lstrip(" $").split("#")[0].split()[1:]
            problems += [f"line {number}: {p}" for p in usage_problems(words, subcommands, strict=False)]
    return problems


def usage_problems(words: list[str], subcommands: dict[str, set[str]], *, strict: bool) -> list[str]:
    """``words`` follow swarm-node. ``strict``: the first one is a subcommand or a flag, and no prose."""
    command = ""
    for number, word in enumerate(words):
        if word.startswith("--"):
            flag = word.split("=")[0].rstrip(",.;")
            if flag not in subcommands.get(command, set()):
                return [f"swarm-node {command} has no flag {flag}".replace("  ", " ")]
        elif f"{command} {word}".strip() in subcommands:
            command = f"{command} {word}".strip()
        elif strict and number == 0 and re.fullmatch("[a-z-]+", word) and not word.startswith("-"):
            return [f"swarm-node has no command {word}"]
    return []
