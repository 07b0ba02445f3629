"""Where settings come from: swarm.toml, the environment, flags. node/settings/table.py is the table of them."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import socket
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from node import environment
from node.errors import ConfigError
from node.settings.checks import with_port
from node.settings.kinds import Boolean, Text, TextList, Wrong
from node.settings.table import (
    DEFAULT_PORT,
    SECTIONS,
    SETTINGS,
    ApiSettings,
    ExpertSettings,
    LogSettings,
    ModelSettings,
    NodeSettings,
    RouterSettings,
    Setting,
    SwarmSettings,
    section_doc,
)
from node.settings.toml_text import key_lines, toml_text

# A file of settings is a page; this is what a wrong --config may cost.
_FILE_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True)
class Config:
    """The settings, with everything filled in that follows from others.

    `node.name` is never empty, `node.expert_port` is 0 only if `node.port` is, every seed has a port, paths are
    absolute.
    `path`: the file that was read, if any; `warnings`: what the user should know about the settings.
    """

    node: NodeSettings
    swarm: SwarmSettings
    model: ModelSettings
    experts: ExpertSettings
    router: RouterSettings
    api: ApiSettings
    log: LogSettings
    path: Path | None = None
    warnings: tuple[str, ...] = ()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --config and a flag for every setting. The parser should have been made with allow_abbrev=False."""
    parser.add_argument("--config", metavar="PATH", help="file with settings, instead of swarm.toml")
    for section in SECTIONS:
        group = parser.add_argument_group(f"[{section}]", section_doc(section))
        for setting in SETTINGS:
            if setting.section == section:
                _add_flag(group, setting)


def load_config(namespace: argparse.Namespace, environ: Mapping[str, str], *, host_name: str | None = None) -> Config:
    """The settings from flags, environment, file and defaults, in this order of preference.

    `namespace` comes from a parser with `add_flags`; any other one means no flags. Relative paths in a file start at
    its folder. `host_name`: the machine's, asked for when left out. Raises ConfigError with everything that is wrong.
    """
    loading = _Loading()
    path = _find_file(namespace, environ)
    if path is not None:
        loading.read_file(path)
    loading.read_environment(environ)
    loading.read_flags(namespace)
    loading.check_together()
    if loading.problems:
        raise ConfigError(loading.problems)
    if path is not None and loading.file_holds_key:
        loading.warn_of_readers(path)
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for setting in SETTINGS:
        values[setting.section][setting.name] = loading.value(setting, environ)
    node, swarm = values["node"], values["swarm"]
    node["name"] = node["name"] or node_name(socket.gethostname() if host_name is None else host_name)
    node["expert_port"] = node["expert_port"] or (node["port"] and node["port"] + 1)
    swarm["seeds"] = tuple(with_port(seed, DEFAULT_PORT) for seed in swarm["seeds"])
    sections = {section: SECTIONS[section](**of_section) for section, of_section in values.items()}
    return Config(**sections, path=path, warnings=tuple(loading.warnings))


def node_name(host_name: str) -> str:
    """A host name as the name of a node: its first part, with hyphens for what a name cannot have."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", host_name.partition(".")[0]).strip("-_")
    return plain[:63] or "node"


@dataclass(frozen=True)
class _Given:
    """A value and where it stands, as an error names it. `base`: the folder of the file it stands in."""

    setting: Setting
    value: Any
    place: str
    base: Path | None = None


@dataclass
class _Loading:
    given: dict[Setting, _Given] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    file_holds_key: bool = False

    def read_file(self, path: Path) -> None:
        text = self._text(path)
        if text is None:
            return
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            self.problems.append(_syntax_problem(path, text, str(error)))
            return
        lines = key_lines(text)
        for section, table in tables.items():
            place = f"{path}:{lines[(section,)]}: "
            if section in SECTIONS and isinstance(table, dict):
                for name, value in table.items():
                    line = lines.get((section, name), lines[(section,)])
                    self._from_file(section, name, value, f"{path}:{line}: [{section}] {name}", path)
            elif section in SECTIONS:
                self.problems.append(f"{place}{section}: is a section: [{section}] on a line of its own")
            elif isinstance(table, dict):
                self.problems.append(f"{place}[{section}]: unknown section; {_known_sections(section)}")
            else:
                self.problems.append(f"{place}{section}: stands in no section; {_known_settings('', section)}")

    def read_environment(self, environ: Mapping[str, str]) -> None:
        variables = {setting.variable: setting for setting in SETTINGS}
        for variable, text in sorted(environ.items()):
            if variable in variables:
                # An empty one is what is left of a variable in many a start script.
                if text:
                    setting = variables[variable]
                    self._from_text(setting, text, variable, f"{variable}={_shown(setting, text)}")
            elif variable.startswith("SWARM_") and not environment.is_known(variable):
                self._unknown_variable(variable, list(variables))

    def read_flags(self, namespace: argparse.Namespace) -> None:
        for setting in SETTINGS:
            value = getattr(namespace, _destination(setting), None)
            if value is None:
                continue
            flag = setting.alias or setting.flag
            if isinstance(value, bool):
                value = "true" if value else "false"
            texts = value if isinstance(value, list) else [value]
            entries: list[Any] = []
            for text in texts:
                if not self._from_text(setting, text, flag, f"{flag} {_shown(setting, text)}"):
                    break
                entries.append(self.given[setting].value)
            if isinstance(setting.kind, TextList) and len(entries) == len(texts):
                self.given[setting] = _Given(setting, tuple(one for entry in entries for one in entry), flag)
            if setting.kind.secret and any(texts):
                self.warnings.append(
                    f"{flag}: other users of this machine can read it in the list of processes; use swarm.toml or "
                    f"{setting.variable}"
                )

    def check_together(self) -> None:
        """Settings that are right alone and wrong together."""
        node = {s.name: s for s in SETTINGS if s.section == "node"}
        swarm = {s.name: s for s in SETTINGS if s.section == "swarm"}
        port, expert_port = self._value(node["port"]), self._value(node["expert_port"])
        if port == expert_port != 0:
            self.problems.append(f"{self._place(node['expert_port'])} = {expert_port}: is the same port as [node] port")
        if port == 65535 and expert_port == 0:
            self.problems.append(
                f"{self._place(node['port'])} = 65535: there is no port after it; set [node] expert_port"
            )
        both = set(self._value(swarm["interfaces"])) & set(self._value(swarm["exclude_interfaces"]))
        if both:
            self.problems.append(
                f"{self._place(swarm['exclude_interfaces'])}: {', '.join(sorted(both))} is in [swarm] interfaces too"
            )

    def warn_of_readers(self, path: Path) -> None:
        try:
            mode = path.stat().st_mode
        except OSError:
            return
        if stat.S_ISREG(mode) and mode & 0o066:
            self.warnings.append(f"{path} holds a key, and other users of this machine may read it: chmod 600 {path}")

    def value(self, setting: Setting, environ: Mapping[str, str]) -> Any:
        """The value in force; paths are made absolute."""
        value = self._value(setting)
        if not (isinstance(setting.kind, Text) and setting.kind.is_path and value) or value in setting.kind.words:
            return value
        if value == "~" or value.startswith("~/"):
            value = str(_home(environ)) + value[1:]
        base = self.given[setting].base or Path.cwd()
        return os.path.normpath(base / value)

    def _text(self, path: Path) -> str | None:
        try:
            with path.open("rb") as file:
                data = file.read(_FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            self.problems.append(f"{path}: there is no such file")
            return None
        except OSError as error:
            self.problems.append(f"{path}: cannot be read: {error.strerror}")
            return None
        if len(data) > _FILE_BYTES_MAX:
            self.problems.append(f"{path}: is larger than 1 MiB, so it is no file of settings")
            return None
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            self.problems.append(f"{path}:{line}: is not UTF-8 text")
            return None

    def _from_file(self, section: str, name: str, value: object, place: str, path: Path) -> None:
        setting = next((s for s in SETTINGS if (s.section, s.name) == (section, name)), None)
        if setting is None:
            self.problems.append(f"{place}: unknown setting; {_known_settings(section, name)}")
            return
        try:
            self.given[setting] = _Given(setting, setting.kind.from_toml(value), place, path.absolute().parent)
        except Wrong as wrong:
            self.problems.append(f"{place} = {_shown(setting, value)}: {wrong}")
        self.file_holds_key |= setting.kind.secret and bool(value)

    def _from_text(self, setting: Setting, text: str, place: str, shown: str) -> bool:
        try:
            self.given[setting] = _Given(setting, setting.kind.from_text(text), place)
        except Wrong as wrong:
            self.problems.append(f"{shown}: {wrong}")
            return False
        return True

    def _unknown_variable(self, variable: str, known: list[str]) -> None:
        near = difflib.get_close_matches(variable, known, 1, 0.87)
        short = [
            s.variable
            for s in SETTINGS
            if variable == "SWARM_" + s.alias[2:].upper() or variable == f"SWARM_{s.name}".upper()
        ]
        if near or short:
            self.problems.append(f"{variable}: unknown setting; did you mean {(near or short)[0]}?")
        elif any(variable.startswith(f"SWARM_{section}_".upper()) for section in SECTIONS):
            section = next(s for s in SECTIONS if variable.startswith(f"SWARM_{s}_".upper()))
            self.problems.append(f"{variable}: unknown setting; {_known_settings(section, '')}")

    def _value(self, setting: Setting) -> Any:
        return self.given[setting].value if setting in self.given else setting.default

    def _place(self, setting: Setting) -> str:
        return self.given[setting].place if setting in self.given else str(setting)


def _destination(setting: Setting) -> str:
    return f"setting.{setting.section}.{setting.name}"


def _add_flag(group: argparse._ArgumentGroup, setting: Setting) -> None:
    names = [setting.alias, setting.flag] if setting.alias else [setting.flag]
    default = setting.default
    if isinstance(default, tuple):
        default = ",".join(default)
    text = f"{setting.doc} (default: {toml_text(setting.default) if default == '' else default})".replace("%", "%%")
    options: dict[str, Any] = {"dest": _destination(setting), "default": None, "help": text}
    if isinstance(setting.kind, Boolean):
        group.add_argument(*names, action=argparse.BooleanOptionalAction, **options)
    elif isinstance(setting.kind, TextList):
        group.add_argument(*names, action="append", metavar=setting.name.upper(), **options)
    else:
        group.add_argument(*names, metavar=setting.name.upper(), **options)


def _find_file(namespace: argparse.Namespace, environ: Mapping[str, str]) -> Path | None:
    named = getattr(namespace, "config", None) or environ.get(environment.CONFIG)
    if named:
        return Path(named)
    folder = environ.get("XDG_CONFIG_HOME")
    usual = (Path(folder) if folder else _home(environ) / ".config") / "swarm-node" / "swarm.toml"
    return next((path for path in (Path("swarm.toml"), usual) if path.is_file()), None)


def _home(environ: Mapping[str, str]) -> Path:
    return Path(environ["HOME"]) if environ.get("HOME") else Path.home()


def _shown(setting: Setting, value: object) -> str:
    if setting.kind.secret:
        return "(not shown)"
    text = toml_text(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _syntax_problem(path: Path, text: str, message: str) -> str:
    found = re.fullmatch(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", message, re.DOTALL)
    what = found[1] if found else message
    line = int(found[2]) if found and found[2] else len(text.rstrip().splitlines()) or 1
    hint = ""
    if what == "Invalid value":
        hint = '; text stands in quotes, as in name = "alpha", and true and false are lower case'
    elif "escape" in what or "\\" in what:
        hint = r"; within 'single quotes' a \ is an ordinary character"
    elif "overwrite" in what or "twice" in what:
        hint = "; it stands in the file before"
    return f"{path}:{line}: {what}{hint}"


def _known_sections(section: str) -> str:
    near = difflib.get_close_matches(section.lower(), SECTIONS, 1)
    return f"did you mean [{near[0]}]?" if near else f"there are {', '.join(f'[{one}]' for one in SECTIONS)}"


def _known_settings(section: str, name: str) -> str:
    """What the user may have meant by a name that is none of this section's."""
    here = [s.name for s in SETTINGS if s.section == section]
    near = difflib.get_close_matches(name.lower().replace("-", "_"), here, 1)
    if near:
        return f"did you mean {near[0]}?"
    everywhere = {s.name: s for s in reversed(SETTINGS)}
    elsewhere = difflib.get_close_matches(name.lower().replace("-", "_"), everywhere, 1, 0.8)
    if elsewhere:
        return f"did you mean {everywhere[elsewhere[0]]}?"
    return f"[{section}] has {', '.join(here)}" if here else "it belongs below a line such as [node]"
