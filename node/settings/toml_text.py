"""TOML beyond what `tomllib` does: on which line a key stands, and how a value is written."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator

_TOKEN = re.compile(
    r'"""(?:\\[\s\S]|[^\\])*?"{3,5}'
    r"|'''[\s\S]*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|[\[\]{}\n=]"
    r"|[^\"'#\[\]{}\n=]+"
)


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """The first line, from 1, of every key and table of `text`, which tomllib has accepted.

    What stands inside an inline table or an array of tables has no entry of its own.
    """
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for line, tokens in _statements(text):
        if tokens[0] == "[":
            table = path = _path("".join(tokens))
        else:
            path = table + _path("".join(tokens[: tokens.index("=")]) + " = 0")
        for length in range(1, len(path) + 1):
            lines.setdefault(path[:length], line)
    return lines


def toml_text(value: object) -> str:
    """`value` as it is written in a TOML file."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_text(key)} = {toml_text(one)}" for key, one in value.items()) + "}"
    return str(value)


def _statements(text: str) -> Iterator[tuple[int, list[str]]]:
    line = first_line = 1
    depth = 0
    tokens: list[str] = []
    for found in _TOKEN.finditer(text.replace("\r\n", "\n") + "\n"):
        token = found[0]
        if token == "\n" and depth == 0:
            if tokens:
                yield first_line, tokens
            tokens = []
        elif not token.startswith("#") and token.strip(" \t\n"):
            if not tokens:
                first_line = line
            tokens.append(token)
            depth += (token in "[{") - (token in "]}")
        line += token.count("\n")


def _path(statement: str) -> tuple[str, ...]:
    """The keys of a statement that holds nothing but one key or table."""
    path = []
    node: object = tomllib.loads(statement)
    while isinstance(node, dict | list) and node:
        if isinstance(node, dict):
            key, node = next(iter(node.items()))
            path.append(key)
        else:
            node = node[0]
    return tuple(path)
