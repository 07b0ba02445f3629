"""This build's ggml and no other, whatever else the machine, the environment or the process holds."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

import kernels
from kernels import native
from rigs import native_process, random_models
from rigs.oracle import Job, logits, native_program

NATIVE = kernels.native_path("libggml-swarm.so").parent
EXTENSION = Path(kernels._kernels.__file__)
OUR_GGML = [str(NATIVE / f"libswarm-{name}.so") for name in ("ggml", "ggml-base", "ggml-cpu")]
FOREIGN_NAMES = ("libggml.so", "libggml-base.so", "libggml-cpu.so", "libllama.so")


def run_process(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("LD_", "GGML_"))}
    return subprocess.run(
        [sys.executable, native_process.__file__, *arguments],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def outcome(*arguments: str | Path, **environment: str) -> dict[str, Any]:
    done = run_process(*arguments, **environment)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    return dict(json.loads(done.stdout.splitlines()[-1]))


def check_only_ours(found: dict[str, Any], foreign: Sequence[Path] = ()) -> None:
    """The process has this build's ggml, once, and of others exactly `foreign`."""
    assert set(OUR_GGML) <= set(found["ggml"])
    others = {name for name in found["ggml"] if Path(name).parent != NATIVE}
    assert others == {str(path.resolve()) for path in foreign}


@pytest.fixture(scope="module")
def expected_ffn() -> str:
    """The FFN's digest in a process that has nothing but kernels."""
    found = outcome("kernels")
    check_only_ours(found)
    return str(found["ffn"])


def dynamic_symbols(library: Path) -> list[str]:
    """The C functions that a library exports."""
    done = subprocess.run(["readelf", "--dyn-syms", "--wide", library], capture_output=True, text=True, check=True)
    rows = (line.split() for line in done.stdout.splitlines())
    functions = [
        row[7] for row in rows if len(row) == 8 and row[3] == "FUNC" and row[4] == "GLOBAL" and row[6] != "UND"
    ]
    return [name for name in functions if re.fullmatch(r"(ggml|gguf|quantize|dequantize)\w*", name)]


def build_library(source: str, path: Path, *options: str) -> Path:
    command = ["cc", "-shared", "-fPIC", "-O1", *options, "-x", "c", "-", "-o", path]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return path


FAKE_OPTIONS = ("-Wno-builtin-declaration-mismatch",)


def fake(functions: Iterable[str]) -> str:
    """These functions, each of which ends the process, and a commit of its own."""
    source = ["#include <stdio.h>", "#include <stdlib.h>", 'const char * ggml_commit(void) { return "fake-0000"; }']
    source += [
        f'void {name}(void) {{ fputs("the fake {name} was called\\n", stderr); abort(); }}'
        for name in sorted({*functions} - {"ggml_commit"})
    ]
    return "\n".join(source)


@pytest.fixture(scope="module")
def fake_source() -> str:
    """Every function of ggml."""
    names = {name for library in OUR_GGML for name in dynamic_symbols(Path(library))}
    assert {"ggml_init", "ggml_backend_dev_count", "ggml_backend_cpu_init", "ggml_mul_mat_id"} <= names
    return fake(names)


@pytest.fixture(scope="module")
def fake_ggml(fake_source: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(fake_source, tmp_path_factory.mktemp("fake") / "libfake-ggml.so", *FAKE_OPTIONS)


@pytest.fixture(scope="module")
def fake_folder(fake_ggml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake under the usual names of ggml's libraries and under ours."""
    folder = tmp_path_factory.mktemp("fakes")
    for name in (*FOREIGN_NAMES, *(path.name for path in NATIVE.glob("libswarm-*.so"))):
        (folder / name).write_bytes(fake_ggml.read_bytes())
    return folder


@pytest.fixture(scope="module")
def model() -> Path:
    return random_models.moe_model(random_models.QWEN3MOE)


@pytest.mark.parametrize("order", ["kernels first", "llama first"])
def test_one_ggml_for_the_extension_and_libllama(order: str, model: Path, expected_ffn: str) -> None:
    """(a): both in one process, in both orders, each computing what it computes alone."""
    actions = [["kernels"], ["llama", model]]
    found = outcome(*(word for action in (actions if order == "kernels first" else actions[::-1]) for word in action))
    check_only_ours(found)
    assert found["ffn"] == expected_ffn
    oracle = logits(Job(model, tokens=native_process.TOKENS, n_generate=0))
    assert found["logits"] == hashlib.sha256(oracle.rows[-1].tobytes()).hexdigest()


def test_library_path_of_another_ggml(fake_folder: Path, model: Path, expected_ffn: str) -> None:
    """(b), (d): other libraries on the search path, with the usual names and even with ours."""
    found = outcome("kernels", "llama", model, LD_LIBRARY_PATH=str(fake_folder))
    check_only_ours(found)
    assert found["ffn"] == expected_ffn


def test_library_path_does_not_reach_the_programs(fake_folder: Path, model: Path) -> None:
    job = Job(model, n_prompt=4, n_generate=2)
    expected = logits(job)
    assert logits(job, env={"LD_LIBRARY_PATH": str(fake_folder)}).rows.tobytes() == expected.rows.tobytes()
    environment = {**os.environ, "LD_LIBRARY_PATH": str(fake_folder)}
    for name in ("llama-server", "llama-bench", "swarm-programs"):
        done = subprocess.run(
            ["ldd", native_program(name)], env=environment, capture_output=True, text=True, check=True
        )
        assert str(NATIVE) in done.stdout
        assert str(fake_folder) not in done.stdout


def test_another_ggml_in_the_same_process(fake_ggml: Path, model: Path, expected_ffn: str) -> None:
    """(c), at its worst: visible to all and loaded first."""
    found = outcome("global", fake_ggml, "kernels")
    check_only_ours(found, [fake_ggml])
    assert found["ffn"] == expected_ffn


def test_another_build_of_ours_in_the_same_process(fake_source: str, tmp_path: Path) -> None:
    """The linker takes a library of the same soname for the same: refused at import, with both files named."""
    name = "libswarm-ggml-base.so"
    other = build_library(fake_source, tmp_path / name, *FAKE_OPTIONS, f"-Wl,-soname,{name}")
    done = run_process("global", other, "kernels")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert f"{EXTENSION} is of build swarm-{kernels.build_id()}" in last
    assert f"{other} of build fake-0000" in last


@pytest.fixture(scope="module")
def another_package(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Another package's ggml, with the usual file names and sonames, each with the functions that ours exports."""
    folder = tmp_path_factory.mktemp("another-package")
    libraries: list[Path] = []
    for name in ("ggml-base", "ggml-cpu", "ggml"):
        functions = dynamic_symbols(NATIVE / f"libswarm-{name}.so")
        assert functions, name
        options = (*FAKE_OPTIONS, f"-Wl,-soname,lib{name}.so", "-Wl,-rpath,$ORIGIN", *map(str, libraries))
        libraries.append(build_library(fake(functions), folder / f"lib{name}.so", "-Wl,--no-as-needed", *options))
    return libraries


def test_the_usual_ggml_in_the_same_process(another_package: list[Path], expected_ffn: str) -> None:
    """(c), as with llama-cpp-python: usual names, loaded first, visible to all, and on the search path."""
    loaded = [word for library in another_package for word in ("global", library)]
    found = outcome(*loaded, "kernels", LD_LIBRARY_PATH=str(another_package[0].parent))
    check_only_ours(found, another_package)
    assert found["ffn"] == expected_ffn


def test_the_usual_ggml_takes_over_who_has_its_names(another_package: list[Path], tmp_path: Path) -> None:
    """The last test can fail: these libraries do take over who is linked with usual names, even by a path."""
    base = build_library(
        'const char * ggml_commit(void) { return "own"; }', tmp_path / "libggml-base.so", "-Wl,-soname,libggml-base.so"
    )
    source = "const char * ggml_commit(void); const char * seen(void) { return ggml_commit(); }"
    options = ("-Wl,--no-as-needed", str(base), "-Wl,-rpath,$ORIGIN", "-Wl,--disable-new-dtags")
    user = build_library(source, tmp_path / "libuser.so", *options)
    assert outcome("seen", user)["seen"] == "own"
    assert outcome("global", another_package[0], "seen", user)["seen"] == "fake-0000"


def test_preloaded_ggml(fake_ggml: Path, expected_ffn: str) -> None:
    found = outcome("kernels", LD_PRELOAD=str(fake_ggml))
    check_only_ours(found, [fake_ggml])
    assert found["ffn"] == expected_ffn


def test_preloaded_ggml_without_deep_binding(fake_ggml: Path) -> None:
    """Where a preloaded library does win, it is found out at import, and both files are named."""
    done = run_process("no-deepbind", "kernels", LD_PRELOAD=str(fake_ggml))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("kernels.errors.BuildMismatch: two builds met in one process: ")
    assert f"{EXTENSION} is of build swarm-{kernels.build_id()}" in last
    assert f"{fake_ggml} of build fake-0000" in last


HOST = r"""
#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char ** argv) {
    void * library = dlopen(argv[1], RTLD_NOW);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    void * (*init)(void) = (void * (*)(void)) dlsym(library, "ggml_backend_init");
    puts(init() == NULL ? "refused" : "accepted");
    return argc - 2;
}
"""


def test_swarm_backend_refuses_a_host_of_another_build(tmp_path: Path) -> None:
    """(e): a host whose ggml says that it is of another build; the message names both files."""
    host = tmp_path / "host"
    subprocess.run(["cc", "-x", "c", "-", "-o", host, "-ldl"], input=HOST, text=True, check=True)
    other = build_library('const char * ggml_commit(void) { return "swarm-other"; }', tmp_path / "libother-ggml.so")
    backend = NATIVE / "libggml-swarm.so"

    def ask(**environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [host, backend], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=True
        )

    assert ask().stdout == "accepted\n"
    done = ask(LD_PRELOAD=str(other))
    assert done.stdout == "refused\n"
    assert f"the Swarm backend {backend} is of build swarm-{kernels.build_id()}" in done.stderr
    assert f"ggml in {other} is of build swarm-other" in done.stderr


def elf_files() -> list[Path]:
    files = [EXTENSION, *sorted(NATIVE.iterdir())]
    return [path for path in files if path.read_bytes()[:4] == b"\x7fELF"]


def test_every_file_looks_for_its_neighbours_first() -> None:
    """(f): DT_RPATH, which is searched before LD_LIBRARY_PATH, and names that no other package's libraries have."""
    files = elf_files()
    assert len(files) >= 12
    names = {path.name for path in files}
    for path in files:
        done = subprocess.run(["readelf", "--dynamic", "--wide", path], capture_output=True, text=True, check=True)
        entries = re.findall(r"\((\w+)\) .*\[(.*)\]", done.stdout)
        paths = [value for tag, value in entries if tag == "RPATH"]
        assert [value.split(":")[0] for value in paths] == ["$ORIGIN/_native" if path == EXTENSION else "$ORIGIN"], path
        assert all(part.startswith("$ORIGIN") for part in paths[0].split(":")), path
        assert "RUNPATH" not in dict(entries), path
        soname = dict(entries).get("SONAME")
        if path.name.startswith("libswarm-"):
            assert soname == path.name
        else:
            assert soname is None, path
        for needed in (value for tag, value in entries if tag == "NEEDED"):
            if "ggml" in needed or "llama" in needed or "mtmd" in needed:
                assert needed.startswith("libswarm-"), path
                assert needed in names, path
        assert not path.is_symlink(), path


def test_only_the_entry_point_of_the_backend_is_visible() -> None:
    done = subprocess.run(
        ["nm", "--dynamic", "--defined-only", "--extern-only", NATIVE / "libggml-swarm.so"],
        capture_output=True,
        text=True,
        check=True,
    )
    functions = [line.split()[2] for line in done.stdout.splitlines() if line.split()[1] == "T"]
    assert functions == ["ggml_backend_init"]


def test_native_path_explains_what_is_missing() -> None:
    with pytest.raises(FileNotFoundError, match=r"has no llama-nothing \(.*SWARM_ROUTER=OFF, .*-DSWARM_TOOLS=ON"):
        kernels.native_path("llama-nothing")


def test_the_check_at_import_names_both_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels._kernels, "ggml_commit", lambda: "unknown")
    with pytest.raises(kernels.BuildMismatch, match="two builds met in one process") as caught:
        native._check_build()
    assert str(EXTENSION) in str(caught.value)
    assert str(NATIVE / "libswarm-ggml-base.so") in str(caught.value)
