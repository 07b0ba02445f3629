"""What is logged, for people or for machines, always without keys.

Text: time, level, message, then the extra fields as key=value; in colour on a terminal. JSON: one object a line with
ts, level, logger, msg, the extra fields, and `exception` where there is one. One of the extra fields is `request`, the
id of the client's request that a line was written for (node/request_id.py).
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import re
import sys
from collections.abc import Collection, Mapping
from typing import Any, Final, TextIO
from urllib.parse import quote

from node.log_levels import apply_levels, parse_levels
from node.request_id import RequestIdFilter

REDACTED: Final = "[redacted]"

_ON_SCREEN: Final = "on_screen"
#: As `extra` of what the user is shown in another way: it goes into the file only.
SHOWN: Final = {_ON_SCREEN: True}
# What a record has besides the extra fields.
_STANDARD: Final = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {
    "message",
    "asctime",
    "taskName",
    _ON_SCREEN,
}
_COLOURS: Final = {"DEBUG": "2", "WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}
# A message may hold what a peer sent: no terminal commands, and no text that runs backwards.
_CONTROLS: Final = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_CREDENTIALS: Final = re.compile(r"(?i)\b(bearer\s+|x-api-key['\"]?\s*[:=]\s*b?['\"]?)[^\s'\",]+")


def configure(format: str, level: str, *, secrets: Collection[str] = (), stream: TextIO | None = None) -> None:
    """Sends every logger's records to `stream` (stderr), as [log] format and level say; replaces an earlier call's.

    `level` is what `node.log_levels.parse_levels` reads. None of `secrets` appears in what is written, neither as it is
    nor as a URL or a string literal has it. Raises ValueError.
    """
    levels = parse_levels(level)
    stream = stream or sys.stderr
    redactor = Redactor(secrets)
    formatter: logging.Formatter
    if format == "json":
        formatter = JsonFormatter(redactor)
    elif format == "text":
        formatter = TextFormatter(redactor, colour=_wants_colour(stream, os.environ))
    else:
        raise ValueError(f"log format {format!r}")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    handler.addFilter(RequestIdFilter())
    handler.addFilter(lambda record: not hasattr(record, _ON_SCREEN))
    root = logging.getLogger()
    for old in [one for one in root.handlers if isinstance(one.formatter, TextFormatter | JsonFormatter)]:
        root.removeHandler(old)
        if isinstance(old, logging.FileHandler):
            old.close()
    root.addHandler(handler)
    apply_levels(levels)
    logging.captureWarnings(True)


def add_file(handler: logging.FileHandler, secrets: Collection[str]) -> None:
    """Sends what `configure` sends to a file as well, as text with dates, until it is called again."""
    handler.setFormatter(TextFormatter(Redactor(secrets), dated=True))
    handler.addFilter(RequestIdFilter())
    logging.getLogger().addHandler(handler)


class Redactor:
    """Takes secrets out of texts."""

    def __init__(self, secrets: Collection[str]) -> None:
        forms = {form for secret in secrets if secret for form in _forms(secret)}
        # The longest first: one secret may be a part of another.
        self._pattern = re.compile(
            "|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True)) or r"(?!)"
        )

    def text(self, text: str) -> str:
        """`text` without the secrets and without what stands behind "Bearer" or "x-api-key"."""
        return _CREDENTIALS.sub(rf"\g<1>{REDACTED}", self._pattern.sub(REDACTED, text))

    def value(self, value: object) -> Any:
        """`value` as JSON can hold it, every text in it redacted."""
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.value(one) for key, one in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self.value(one) for one in value]
        return self.text(str(value))


class TextFormatter(logging.Formatter):
    """Lines for people. All but a record's first are indented, so that no message can look like two records."""

    def __init__(self, redactor: Redactor, *, colour: bool = False, dated: bool = False) -> None:
        super().__init__()
        self._redactor = redactor
        self._time_format = "%Y-%m-%d %H:%M:%S" if dated else "%H:%M:%S"
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created).strftime(self._time_format)
        text = _plain(self._redactor.text(_message(record)))
        for name, value in _extra(record).items():
            shown = self._redactor.value(value)
            text += " " + _plain(f"{name}={shown if isinstance(shown, str) else json.dumps(shown, default=str)}")
        trace = _trace(self, record)
        if trace:
            text += "\n" + _plain(self._redactor.text(trace))
        level = f"{record.levelname.lower():<7}"
        if self._colour:
            level = f"\x1b[{_COLOURS[record.levelname]}m{level}\x1b[0m" if record.levelname in _COLOURS else level
            time = f"\x1b[2m{time}\x1b[0m"
        return f"{time} {level} " + text.replace("\n", "\n    ")


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__()
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        created = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        fields: dict[str, Any] = {
            "ts": created.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": self._redactor.text(_message(record)),
        }
        for name, value in _extra(record).items():
            fields.setdefault(name, self._redactor.value(value))
        trace = _trace(self, record)
        if trace:
            fields["exception"] = self._redactor.text(trace)
        return json.dumps(_finite(fields), allow_nan=False)


def _forms(secret: str) -> tuple[str, ...]:
    """A secret as it is, as a URL has it, as Python prints it, and as JSON has it."""
    return secret, quote(secret, safe=""), repr(secret)[1:-1], json.dumps(secret)[1:-1]


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # of any argument's own formatting; logging itself would print all of it, keys included
        return f"{record.msg} {record.args!r}"


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = []
    if record.exc_info and record.exc_info[0] is not None:
        parts.append(formatter.formatException(record.exc_info))
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts)


def _plain(text: str) -> str:
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not abs(value) < float("inf") else value


def _wants_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
