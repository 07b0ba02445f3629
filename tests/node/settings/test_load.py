"""Settings: the table and swarm.toml agree, four sources in their order, and errors that say where and what instead."""

import argparse
import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.errors import ConfigError
from node.settings.load import Config, add_flags, load_config, node_name
from node.settings.table import SECTIONS, SETTINGS, Setting, documented_file
from node.settings.toml_text import key_lines, toml_text
from node.swarm_key import SwarmKey
from rigs import ROOT

KEY = SwarmKey(bytes(range(32))).text()

# A value other than the default for every setting: as Python has it, and as a flag or variable spells it.
SAMPLES: dict[str, tuple[Any, str]] = {
    "node.name": ("alpha", "alpha"),
    "node.state_folder": ("/var/lib/swarm", "/var/lib/swarm"),
    "node.host": ("loopback", "loopback"),
    "node.port": (5000, "5000"),
    "node.expert_port": (6000, "6000"),
    "node.poll_us": (0, "0"),
    "swarm.name": ("lab", "lab"),
    "swarm.key": (KEY, KEY),
    "swarm.seeds": (("10.0.0.1:4100", "[fe80::1]:7"), "10.0.0.1:4100, [fe80::1]:7"),
    "swarm.interfaces": (("eth0",), "eth0"),
    "swarm.exclude_interfaces": (("tun0", "wg0"), "tun0,wg0"),
    "model.path": ("/models/a.gguf", "/models/a.gguf"),
    "model.context_tokens": (8192, "8192"),
    "model.parallel": (2, "2"),
    "model.ubatch_tokens": (64, "64"),
    "model.prompt_cache_mib": (0, "0"),
    "model.cache_gib": (40, "40"),
    "model.transfer_mbit_s": (300, "300"),
    "model.reduce": ("rows", "rows"),
    "model.dtype": ("bf16", "bf16"),
    "experts.enabled": (False, "false"),
    "experts.device": ("CUDA0", "CUDA0"),
    "experts.threads": (3, "3"),
    "experts.memory_mib": (1000, "1000"),
    "router.enabled": (False, "False"),
    "router.threads": (4, "4"),
    "router.extra_arguments": (("--flash-attn", "on", "--temp", "0,5"), "--flash-attn on --temp '0,5'"),
    "api.key": ("hunter2-hunter2", "hunter2-hunter2"),
    "api.allowed_hosts": (("chat.example", "proxy:8080"), "chat.example,proxy:8080"),
    "api.allowed_origins": (("https://chat.example",), "https://chat.example"),
    "log.format": ("json", "json"),
    "log.level": ("debug", "debug"),
}


def load(
    arguments: list[str] | None = None, environ: dict[str, str] | None = None, file: Path | str | None = None
) -> Config:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    flags = [*(["--config", str(file)] if file else []), *(arguments or [])]
    return load_config(parser.parse_args(flags), {"HOME": "/nonexistent", **(environ or {})}, host_name="host1.lan")


def problems(
    arguments: list[str] | None = None, environ: dict[str, str] | None = None, file: Path | None = None
) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(arguments, environ, file)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return list(caught.value.problems)


def value(config: Config, setting: Setting) -> Any:
    return getattr(getattr(config, setting.section), setting.name)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The project's own swarm.toml is not in the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.toml"
    path.touch(0o600)
    return path


@pytest.mark.parametrize(
    ("host", "listen", "expert", "url"),
    [
        ("lan", ("0.0.0.0", "::"), "*", "127.0.0.1"),
        ("loopback", ("127.0.0.1",), "127.0.0.1", "127.0.0.1"),
        ("192.168.1.5", ("192.168.1.5",), "192.168.1.5", "192.168.1.5"),
        ("fd00::5", ("fd00::5",), "fd00::5", "[fd00::5]"),
    ],
)
def test_where_a_node_listens_and_is_reached(host: str, listen: tuple[str, ...], expert: str, url: str) -> None:
    node = load(environ={"SWARM_NODE_HOST": host}).node
    assert (node.listen_hosts, node.expert_host, node.local_url_host) == (listen, expert, url)


# The table and its document


def test_swarm_toml_is_the_tables() -> None:
    text = (ROOT / "swarm.toml").read_text()
    assert text == documented_file(), (
        "write it with: python -c \"from node.settings.table import *; print(documented_file(), end='')\""
    )


def test_swarm_toml_holds_every_setting_with_its_default() -> None:
    text = (ROOT / "swarm.toml").read_text()
    assert all(table == {} for table in tomllib.loads(text).values())
    tables = tomllib.loads(re.sub(r"(?m)^#(?=[a-z_]+ = )", "", text))
    assert {(section, name) for section, table in tables.items() for name in table} == {
        (setting.section, setting.name) for setting in SETTINGS
    }
    for setting in SETTINGS:
        assert setting.kind.from_toml(tables[setting.section][setting.name]) == setting.default
        assert setting.doc.endswith(".") and setting.doc[0].isupper()


def test_sections_are_the_configs() -> None:
    fields = {one.name: one.type for one in dataclasses.fields(Config)}
    assert {name: settings.__name__ for name, settings in SECTIONS.items()} == {
        name: kind for name, kind in fields.items() if name not in ("path", "warnings")
    }


def test_defaults() -> None:
    config = load()
    filled_in = {"node.name": "host1", "node.expert_port": 4101}
    for setting in SETTINGS:
        assert value(config, setting) == filled_in.get(f"{setting.section}.{setting.name}", setting.default)
    assert config.path is None and config.warnings == ()
    assert config.model.context_total_tokens == 4 * 4096
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.node.port = 1  # type: ignore[misc]


# Sources


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_every_setting_from_every_source(setting: Setting, file: Path) -> None:
    wanted, text = SAMPLES[f"{setting.section}.{setting.name}"]
    file.write_text(f"[{setting.section}]\n{setting.name} = {toml_text(wanted)}\n")
    flags = [setting.flag, *([setting.alias] if setting.alias else [])]
    if isinstance(wanted, bool):
        arguments = [[flag.replace("--", "--no-", 1)] for flag in flags]
    else:
        arguments = [[f"{flag}={text}"] for flag in flags]
    configs = [load(file=file), load(environ={setting.variable: text}), *(load(one) for one in arguments)]
    for config in configs:
        assert value(config, setting) == wanted != setting.default
        changed = {str(one) for one in SETTINGS if value(config, one) != value(load(), one)}
        assert changed - {"[node] expert_port"} == {str(setting)} - {"[node] expert_port"}


def test_flags_before_environment_before_file_before_default(file: Path) -> None:
    file.write_text("[model]\nparallel = 5\nubatch_tokens = 5\ncontext_tokens = 555\n")
    environ = {"SWARM_MODEL_PARALLEL": "6", "SWARM_MODEL_UBATCH_TOKENS": "6", "SWARM_NODE_PORT": ""}
    config = load(["--model-parallel", "7"], environ, file)
    assert (config.model.parallel, config.model.ubatch_tokens, config.model.context_tokens) == (7, 6, 555)
    assert config.node.port == 4100 and config.path == file


def test_a_list_flag_adds_up_and_replaces_what_others_say() -> None:
    config = load(["--seed", "a", "--seed", "b:1,c"], {"SWARM_SWARM_SEEDS": "z"})
    assert config.swarm.seeds == ("a:4100", "b:1", "c:4100")
    assert load(["--swarm-seeds", ""], {"SWARM_SWARM_SEEDS": "z"}).swarm.seeds == ()


def test_seeds_get_the_port() -> None:
    seeds = load(["--seed", "fe80::1,[fe80::2],[::1]:5,10.0.0.1,alpha.lan:9"]).swarm.seeds
    assert seeds == ("[fe80::1]:4100", "[fe80::2]:4100", "[::1]:5", "10.0.0.1:4100", "alpha.lan:9")


def test_where_the_file_is_looked_for(tmp_path: Path) -> None:
    def write(path: Path, parallel: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"[model]\nparallel = {parallel}\n")

    environ = {"HOME": str(tmp_path / "home")}
    assert load(environ=environ).model.parallel == 4
    write(tmp_path / "home/.config/swarm-node/swarm.toml", 10)
    assert load(environ=environ).model.parallel == 10
    write(tmp_path / "xdg/swarm-node/swarm.toml", 11)
    assert load(environ={**environ, "XDG_CONFIG_HOME": str(tmp_path / "xdg")}).model.parallel == 11
    write(tmp_path / "swarm.toml", 12)
    assert load(environ=environ).model.parallel == 12
    write(tmp_path / "named.toml", 13)
    environ["SWARM_CONFIG"] = str(tmp_path / "named.toml")
    assert load(environ=environ).model.parallel == 13
    write(tmp_path / "flag.toml", 14)
    assert load(environ=environ, file="flag.toml").model.parallel == 14
    assert problems(environ={"SWARM_CONFIG": "/nowhere/a.toml"}) == ["/nowhere/a.toml: there is no such file"]


def test_paths_become_absolute(tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "s.toml").write_text('[model]\npath = "m/a.gguf"\n[node]\nstate_folder = "~/state"\n')
    config = load(environ={"HOME": "/home/u"}, file="etc/s.toml")
    assert config.model.path == str(folder / "m/a.gguf") and config.node.state_folder == "/home/u/state"
    assert load(["--model", "../a.gguf"]).model.path == str(tmp_path.parent / "a.gguf")


@pytest.mark.parametrize(
    ("host", "name"),
    [("alpha.lan", "alpha"), ("Büro PC", "B-ro-PC"), ("", "node"), ("...", "node"), ("-x_", "x"), ("a" * 99, "a" * 63)],
)
def test_node_name(host: str, name: str) -> None:
    assert node_name(host) == name


# Errors


WRONG = [
    ("prot = 4100", "[node] prot: unknown setting; did you mean port?"),
    ('port = "4100"', '[node] port = "4100": must be an integer from 0 to 65535, without quotes'),
    ("port = 65536", "[node] port = 65536: must be an integer from 0 to 65535"),
    ("port = -1", "[node] port = -1: must be an integer from 0 to 65535"),
    ("port = true", "[node] port = true: must be an integer from 0 to 65535"),
    ("port = 4100.0", "[node] port = 4100.0: must be an integer from 0 to 65535"),
    ("port = 2024-01-01", "[node] port = 2024-01-01: must be an integer from 0 to 65535"),
    ("port = 65535", "[node] port = 65535: there is no port after it; set [node] expert_port"),
    ("expert_port = 4100", "[node] expert_port = 4100: is the same port as [node] port"),
    (
        "name = 7",
        "[node] name = 7: must be 1 to 63 letters, digits, dots, hyphens and underscores, a letter or digit first, "
        "in quotes",
    ),
    (
        'name = "../x"',
        '[node] name = "../x": must be 1 to 63 letters, digits, dots, hyphens and underscores, a letter or digit first',
    ),
    ('host = "localhost"', '[node] host = "localhost": must be "lan", "loopback" or an IP address of this machine'),
    ("seeds = []", "[node] seeds: unknown setting; did you mean [swarm] seeds?"),
    (
        "frobnicate = 1",
        "[node] frobnicate: unknown setting; [node] has name, state_folder, host, port, expert_port, poll_us",
    ),
    ("Port = 1", "[node] Port: unknown setting; did you mean port?"),
    (
        "[swarm]\nseeds = 'a'",
        '[swarm] seeds = "a": must be a list of host, host:port or [IPv6 address]:port, each in quotes, '
        "within square brackets",
    ),
    (
        "[swarm]\nseeds = ['a', 'b:70000']",
        '[swarm] seeds = ["a", "b:70000"]: "b:70000" must be host, host:port or [IPv6 address]:port',
    ),
    (
        "[swarm]\ninterfaces = ['eth0', 'lo']\nexclude_interfaces = ['lo']",
        "[swarm] exclude_interfaces: lo is in [swarm] interfaces too",
    ),
    ("[model]\nreduce = 'max'", '[model] reduce = "max": must be "sum" or "rows"'),
    ("[model]\ndtype = 'f64'", '[model] dtype = "f64": must be "f32", "bf16" or "f16"'),
    ("[experts]\nenabled = 'yes'", '[experts] enabled = "yes": must be true or false, without quotes'),
    ("[experts]\nenabled = 1", "[experts] enabled = 1: must be true or false"),
    (
        "[router]\nextra_arguments = ['--host', '0.0.0.0']",
        '[router] extra_arguments = ["--host", "0.0.0.0"]: "--host" is set by swarm-node itself',
    ),
    (
        "[router]\nextra_arguments = ['--api_key=x']",
        '[router] extra_arguments = ["--api_key=x"]: "--api_key=x" is set by swarm-node itself',
    ),
    (
        "[router]\nextra_arguments = ['-c', '9']",
        '[router] extra_arguments = ["-c", "9"]: "-c" is the setting [model] context_tokens',
    ),
    (
        "[api]\nallowed_origins = ['*']",
        '[api] allowed_origins = ["*"]: "*" is every page of the internet; name the origins that may use this node',
    ),
    (
        "[api]\nallowed_origins = ['http://a/']",
        '[api] allowed_origins = ["http://a/"]: "http://a/" must be http://host, https://host or the same '
        "with :port, as browsers send it",
    ),
    (
        "[api]\nallowed_hosts = ['*.lan']",
        '[api] allowed_hosts = ["*.lan"]: "*.lan" must be host, host:port or [IPv6 address]:port',
    ),
    ("[api]\nkey = 'short'", "[api] key = (not shown): must be 8 to 256 visible ASCII characters"),
    (
        "[swarm]\nkey = 'hunter2-hunter2'",
        '[swarm] key = (not shown): must be a key made by "swarm-node keygen", which begins with swarm1-',
    ),
    ("[nodes]\nport = 1", "[nodes]: unknown section; did you mean [node]?"),
    (
        "[database]",
        "[database]: unknown section; there are [node], [swarm], [model], [experts], [router], [api], [log]",
    ),
]


@pytest.mark.parametrize(("lines", "problem"), WRONG, ids=[problem.partition(":")[0] for _, problem in WRONG])
def test_wrong_files(lines: str, problem: str, file: Path) -> None:
    text = f"# settings\n\n[node]\n{lines}"
    file.write_text(text)
    # What is wrong stands on the last line, but for an unknown section with something in it.
    line = text.split("\n").index("[nodes]") + 1 if "[nodes]" in text else text.count("\n") + 1
    assert problems(file=file) == [f"{file}:{line}: {problem}"]


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("port = 4100\n", 1, "port: stands in no section; did you mean [node] port?"),
        ("foo = 1\n", 1, "foo: stands in no section; it belongs below a line such as [node]"),
        ("\nnode = 7\n", 2, "node: is a section: [node] on a line of its own"),
        ("[[node]]\nport = 1\n", 1, "node: is a section: [node] on a line of its own"),
        ("\n\nnode.prt = 7\n", 3, "[node] prt: unknown setting; did you mean port?"),
        ('node = { port = 1, "pört" = 2 }\n', 1, "[node] pört: unknown setting; did you mean port?"),
        (
            "[node]\r\nname = 'a'\r\n[log]\r\nlevel = 'loud'\r\n",
            4,
            '[log] level = "loud": must be "debug", "info", "warning" or "error"',
        ),
        (
            "[node]\nname = alpha\n",
            2,
            'Invalid value; text stands in quotes, as in name = "alpha", and true and false are lower case',
        ),
        ("[node]\nport = 1\nport = 2", 3, "Cannot overwrite a value; it stands in the file before"),
        (
            '[model]\npath = "C:\\models"\n',
            2,
            "Unescaped '\\' in a string; within 'single quotes' a \\ is an ordinary character",
        ),
    ],
)
def test_where_it_stands(text: str, line: int, problem: str, file: Path) -> None:
    file.write_bytes(text.encode())
    assert problems(file=file) == [f"{file}:{line}: {problem}"]


def test_what_is_no_text(file: Path, tmp_path: Path) -> None:
    file.write_bytes(b"[node]\nname = '\xff'\n")
    assert problems(file=file) == [f"{file}:2: is not UTF-8 text"]
    file.write_bytes(b"#" * (1 << 21))
    assert problems(file=file) == [f"{file}: is larger than 1 MiB, so it is no file of settings"]
    assert problems(file=tmp_path)[0].startswith(f"{tmp_path}: cannot be read: ")
    file.write_bytes("\ufeff[node]\nport = 1\n".encode())
    assert load(file=file).node.port == 1


def test_all_problems_at_once(file: Path) -> None:
    file.write_text("[node]\nport = 'a'\nprot = 1\n[nope]\n[log]\nlevel = 1\n")
    found = problems(
        ["--device", "", "--no-router-enabled"], {"SWARM_MODEL_PARALLEL": "0", "SWARM_NODE_PROT": "1"}, file
    )
    assert [problem.partition(": ")[0] for problem in found] == [
        f"{file}:2",
        f"{file}:3",
        f"{file}:4",
        f"{file}:6",
        'SWARM_MODEL_PARALLEL="0"',
        "SWARM_NODE_PROT",
        '--device ""',
    ]


@pytest.mark.parametrize(
    ("arguments", "environ", "problem"),
    [
        ([], {"SWARM_NODE_PORT": "4_100"}, 'SWARM_NODE_PORT="4_100": must be an integer from 0 to 65535'),
        ([], {"SWARM_EXPERTS_ENABLED": "1"}, 'SWARM_EXPERTS_ENABLED="1": must be true or false'),
        (["--port", "99999"], {}, '--port "99999": must be an integer from 0 to 65535'),
        (
            ["--node-port", "4100", "--node-expert-port", "4100"],
            {},
            "--node-expert-port = 4100: is the same port as [node] port",
        ),
        (
            ["--seed", "ok", "--seed", "not ok"],
            {},
            '--seed "not ok": "not ok" must be host, host:port or [IPv6 address]:port',
        ),
        (
            ["--router-extra-arguments", "'open"],
            {},
            '--router-extra-arguments "\'open": cannot be split into words: No closing quotation',
        ),
        ([], {"SWARM_NODE_PROT": "1"}, "SWARM_NODE_PROT: unknown setting; did you mean SWARM_NODE_PORT?"),
        ([], {"SWARM_NODES_PORT": "1"}, "SWARM_NODES_PORT: unknown setting; did you mean SWARM_NODE_PORT?"),
        (
            [],
            {"SWARM_API_TOKENS": "1"},
            "SWARM_API_TOKENS: unknown setting; [api] has key, allowed_hosts, allowed_origins",
        ),
        ([], {"SWARM_KEY": "1"}, "SWARM_KEY: unknown setting; did you mean SWARM_SWARM_KEY?"),
        ([], {"SWARM_PORT": "1"}, "SWARM_PORT: unknown setting; did you mean SWARM_NODE_PORT?"),
    ],
)
def test_wrong_variables_and_flags(arguments: list[str], environ: dict[str, str], problem: str) -> None:
    assert problems(arguments, environ) == [problem]


def test_variables_of_other_parts_are_ignored() -> None:
    """Every SWARM_ variable that the sources mention and that is no setting."""
    sources = subprocess.run(
        [
            "git",
            "grep",
            "-hoE",
            r"\bSWARM_[A-Z][A-Z_]+[A-Z]\b",
            "--",
            "node/[!c]*",
            "kernels",
            "scripts",
            "CMakeLists.txt",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    named = set(sources) | {
        "SWARM_TABLE",
        "SWARM_PARENT_PID",
        "SWARM_DEBUG_SLEEP_S",
        "SWARM_ROUTER",
        "SWARM_TEST_CACHE",
    }
    others = named - {setting.variable for setting in SETTINGS} - {"SWARM_CONFIG"}
    assert len(others) > 5
    assert load(environ=dict.fromkeys([*others, "SWARM_OF_SOMETHING_ELSE", "NODE_PORT"], "x")) == load()


# Secrets


def test_keys_are_not_shown(file: Path) -> None:
    config = load(environ={"SWARM_SWARM_KEY": KEY, "SWARM_API_KEY": "a-secret-key"})
    assert config.swarm.key == KEY and KEY not in repr(config) and "a-secret" not in repr(config)
    file.write_text("[api]\nkey = 'äää-secret'\n[swarm]\nkey = 'secret'\n")
    wrong = {"SWARM_SWARM_KEY": "swarm1-secret", "SWARM_API_KEY": "secret"}
    for problem in problems(["--key", "secret", "--api-key", "secret"], wrong, file):
        assert "(not shown)" in problem and "secret" not in problem


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o600, 0o400])
def test_a_file_with_a_key_that_others_may_read(mode: int, file: Path) -> None:
    file.write_text(f"[swarm]\nkey = '{KEY}'\n")
    file.chmod(mode)
    wanted = (f"{file} holds a key, and other users of this machine may read it: chmod 600 {file}",)
    assert load(file=file).warnings == (wanted if mode & 0o066 else ())
    # It holds it even if another one is in force.
    assert load(environ={"SWARM_SWARM_KEY": KEY}, file=file).warnings == (wanted if mode & 0o066 else ())
    file.write_text("[swarm]\nkey = ''\n[node]\nname = 'a'\n")
    assert load(file=file).warnings == ()


def test_a_key_on_the_command_line() -> None:
    (warning,) = load(["--key", KEY]).warnings
    assert warning.startswith("--key: ") and "SWARM_SWARM_KEY" in warning and KEY not in warning
    assert load(["--key", ""]).warnings == ()


# Flags


def test_help_names_every_setting() -> None:
    parser = argparse.ArgumentParser(prog="swarm-node", allow_abbrev=False)
    add_flags(parser)
    text = parser.format_help()
    for setting in SETTINGS:
        assert setting.flag in text and (not setting.alias or f"{setting.alias} " in text)


def test_flags_of_a_subcommand_do_not_hide_what_another_lacks() -> None:
    assert load_config(argparse.Namespace(verbose=True), {"HOME": "/nonexistent"}).node.port == 4100


def test_reading_settings_is_quick() -> None:
    """`swarm-node ask` needs them: no extension, no aiohttp for that."""
    code = "import node.settings.load, sys; sys.exit(' '.join({'kernels', 'aiohttp', 'numpy'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False).stderr
        == "\n"
    )


# Lines


BARE = st.from_regex(r"[a-z0-9_-]{1,6}", fullmatch=True)
LITERAL = st.from_regex(r"[ a-z=\[\]#{}\"]{0,6}", fullmatch=True)


@st.composite
def keys(draw: st.DrawFn, prefix: str) -> tuple[str, tuple[str, ...]]:
    """How a key is written, and its path; the prefix makes it the only one of its name."""
    first = prefix + draw(BARE)
    rest = draw(st.lists(st.one_of(BARE, LITERAL.map(lambda text: f"'{text}'")), max_size=2))
    return " . ".join([first, *rest]) if draw(st.booleans()) else ".".join([first, *rest]), (
        first,
        *(part.strip("'") for part in rest),
    )


VALUES = st.one_of(
    st.sampled_from(["1", "true", "-0.5", "2024-01-01 10:00:00", "[]", "{ a = '}', b = [1, 2] }"]),
    LITERAL.map(lambda text: f"'{text}'"),
    st.text(max_size=6).map(toml_text),
    LITERAL.map(lambda text: f"'''\n{text}\n[x]\ny = 1\n'''"),
    LITERAL.map(lambda text: '"""\n' + text.replace('"', "") + '\\""" # z = 1\n"""'),
    LITERAL.map(lambda text: f"[ # one\n  1, # ]\n\n  2,\n[ '{text}' ],\n]"),
)


@given(st.data())
def test_key_lines(data: st.DataObject) -> None:
    text = ""
    wanted: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number in range(data.draw(st.integers(0, 6))):
        text += data.draw(st.sampled_from(["", "\n", "# [a]\n", "  # b = '''\n\n"]))
        written, path = data.draw(keys(f"k{number}-"))
        line = text.count("\n") + 1
        if data.draw(st.booleans()):
            text, table, path = f"{text}  [ {written} ] # c = 1\n", path, path
        else:
            text, path = f"{text} {written} = {data.draw(VALUES)} # ]\n", table + path
        for length in range(1, len(path) + 1):
            wanted.setdefault(path[:length], line)
    if data.draw(st.booleans()):
        text = text.replace("\n", "\r\n")
    tomllib.loads(text)
    assert key_lines(text) == wanted


JSON = st.recursive(st.one_of(st.booleans(), st.integers(-9, 9), st.text()), lambda of: st.lists(of, max_size=3))


@given(JSON)
def test_toml_text(wanted: object) -> None:
    assert tomllib.loads(f"x = {toml_text(wanted)}") == {"x": wanted}
