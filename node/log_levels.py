"""How much is logged, by the names of packages and modules: ``info,node.api=debug``.

A word is a level, which holds for everything that no other word names, or NAME=LEVEL, which holds for the package or
module NAME and for all that is below it. The longer name counts where two cover the same logger.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

LEVELS = ("debug", "info", "warning", "error")
DEFAULT_LEVEL = "info"
FORM = (
    '"debug", "info", "warning" or "error"; after commas NAME=LEVEL for a package or module, as in '
    '"info,node.api=debug"'
)
#: The setting [log] level as a variable, by which a parent tells its expert server too.
VARIABLE = "SWARM_LOG_LEVEL"
# As many as there are packages; a text of more words is no setting but an accident.
_WORDS_MAX = 64
_SHOWN_MAX = 60
_ROOTS = ("node", "gossip", "kernels")
# Loggers of libraries that say at "info" what only developers want to know.
_TALKATIVE = ("aiohttp.access", "asyncio", "zeroconf")


@dataclass(frozen=True)
class LogLevels:
    """``default``: the level of all loggers besides those ``by_name``."""

    default: str = DEFAULT_LEVEL
    by_name: Mapping[str, str] = field(default_factory=dict)

    def with_default(self, level: str) -> LogLevels:
        """The same levels by name over another default."""
        return replace(self, default=level)

    def __str__(self) -> str:
        """The text that :func:`parse_levels` reads."""
        return ",".join([self.default, *(f"{name}={level}" for name, level in self.by_name.items())])


def parse_levels(text: str) -> LogLevels:
    """Raises ValueError, whose text names the word that is wrong and what it may be."""
    default = ""
    by_name: dict[str, str] = {}
    words = [word.strip() for word in text.split(",", _WORDS_MAX)]
    if len(words) > _WORDS_MAX:
        raise ValueError(f"has more than {_WORDS_MAX} words")
    for word in words:
        name, equals, level = (part.strip() for part in word.rpartition("="))
        level = level.lower()
        if level not in LEVELS:
            raise ValueError(_wrong_level(word, level, named=bool(equals), alone=len(words) == 1))
        if not equals:
            if default:
                raise ValueError(f"{_shown(word)} is a second level for everything; one of them needs a NAME=")
            default = level
        elif name not in known_names():
            raise ValueError(_wrong_name(word, name))
        elif name in by_name:
            raise ValueError(f"{_shown(word)} names {name} a second time")
        else:
            by_name[name] = level
    return LogLevels(default or DEFAULT_LEVEL, by_name)


@functools.cache
def known_names() -> frozenset[str]:
    """The names of this program's packages and modules, after which its loggers are named."""
    return frozenset(name for root in _ROOTS for name in _names_below(root))


def levels_from_environment(environ: Mapping[str, str] = os.environ) -> LogLevels:
    """What a parent's settings say; the default where they say nothing that can be read."""
    try:
        return parse_levels(environ.get(VARIABLE) or DEFAULT_LEVEL)
    except ValueError:
        return LogLevels()


def apply_levels(levels: LogLevels) -> None:
    """Sets the levels of this process's loggers; replaces an earlier call's."""
    logging.getLogger().setLevel(levels.default.upper())
    for name in known_names():
        if name in levels.by_name or name in logging.root.manager.loggerDict:
            logging.getLogger(name).setLevel(levels.by_name.get(name, "notset").upper())
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.NOTSET if levels.default == "debug" else logging.WARNING)


def _names_below(root: str) -> list[str]:
    spec = importlib.util.find_spec(root)  # which imports nothing
    names = [root]
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        for path in Path(folder).rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            names.append(".".join([root, *(parts[:-1] if parts[-1] == "__init__" else parts)]))
    return names


def _wrong_level(word: str, level: str, *, named: bool, alone: bool) -> str:
    near = difflib.get_close_matches(level[:_SHOWN_MAX], LEVELS, 1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    if not named and word in known_names():
        return f"{_shown(word)} needs a level: {word}=debug"
    if not word:
        return "has an empty word: there is a comma too many"
    quoted = [f'"{one}"' for one in LEVELS]
    must = f"must be {', '.join(quoted[:-1])} or {quoted[-1]}{hint}"
    # A value that is one word is shown before this text anyway.
    return must if alone and not named else f"{_shown(word)}: the level {must}"


def _wrong_name(word: str, name: str) -> str:
    near = difflib.get_close_matches(name[:_SHOWN_MAX], sorted(known_names()), 1, 0.7)
    packages = sorted({".".join(one.split(".")[:2]) for one in known_names() if one.count(".") > 1} | set(_ROOTS))
    known = f"did you mean {near[0]}?" if near else f"known are {', '.join(packages)} and the modules in them"
    return f"{_shown(word)}: there is no package or module of that name; {known}"


def _shown(word: str) -> str:
    return repr(word if len(word) <= _SHOWN_MAX else word[: _SHOWN_MAX - 1] + "…")
