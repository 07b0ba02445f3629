"""The kinds of values that settings take: how they are read from TOML and from text, and what is said of wrong ones."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from node.settings.toml_text import toml_text

# A check returns what is wrong with a text ("must be …"), or None.
Check = Callable[[str], str | None]


class Wrong(ValueError):
    """A value that a setting cannot have. `str()` says what it must be."""


class Kind(Protocol):
    """What values a setting takes. The methods return the value or raise Wrong."""

    @property
    def form(self) -> str: ...
    @property
    def secret(self) -> bool: ...
    def from_toml(self, value: object) -> Any: ...
    def from_text(self, text: str) -> Any: ...


@dataclass(frozen=True)
class Integer:
    low: int
    high: int
    secret: ClassVar[bool] = False

    @property
    def form(self) -> str:
        return f"an integer from {self.low} to {self.high}"

    def from_toml(self, value: object) -> int:
        if type(value) is int and self.low <= value <= self.high:
            return value
        raise Wrong(f"must be {self.form}" + (", without quotes" if type(value) is str else ""))

    def from_text(self, text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,18}", text.strip()):
            raise Wrong(f"must be {self.form}")
        return self.from_toml(int(text))


@dataclass(frozen=True)
class Boolean:
    form: ClassVar[str] = "true or false"
    secret: ClassVar[bool] = False

    def from_toml(self, value: object) -> bool:
        if type(value) is bool:
            return value
        raise Wrong("must be true or false" + (", without quotes" if type(value) is str else ""))

    def from_text(self, text: str) -> bool:
        if text.strip().lower() not in ("true", "false"):
            raise Wrong("must be true or false")
        return text.strip().lower() == "true"


@dataclass(frozen=True)
class Text:
    form: str
    check: Check
    secret: bool = False
    is_path: bool = False
    words: tuple[str, ...] = ()  # values of a path setting that are no paths

    def from_toml(self, value: object) -> str:
        if type(value) is not str:
            raise Wrong(f"must be {self.form}, in quotes")
        return self.from_text(value)

    def from_text(self, text: str) -> str:
        problem = self.check(text)
        if problem is not None:
            raise Wrong(problem)
        return text


@dataclass(frozen=True)
class TextList:
    """`form` is that of one entry. As text: with commas between, or, with `shell_words`, as a shell splits it."""

    entry_form: str
    check: Check
    shell_words: bool = False
    secret: ClassVar[bool] = False

    @property
    def form(self) -> str:
        return f"a list of {self.entry_form}"

    def from_toml(self, value: object) -> tuple[str, ...]:
        if type(value) is not list or any(type(entry) is not str for entry in value):
            raise Wrong(f"must be {self.form}, each in quotes, within square brackets")
        for entry in value:
            problem = self.check(entry)
            if problem is not None:
                raise Wrong(f"{toml_text(entry)} {problem}")
        return tuple(value)

    def from_text(self, text: str) -> tuple[str, ...]:
        if not self.shell_words:
            return self.from_toml([entry.strip() for entry in text.split(",") if entry.strip()])
        try:
            return self.from_toml(shlex.split(text))
        except ValueError as error:
            raise error if isinstance(error, Wrong) else Wrong(f"cannot be split into words: {error}") from None
