"""Building: what is asked for is built or refused with the reason, and the expert-only package works."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rigs import ROOT, native_process

# Where the source is, if it is not the pinned one in the cache.
SOURCE = [word for word in shlex.split(os.environ.get("CMAKE_ARGS", "")) if word.startswith("-DSWARM_LLAMA_CPP_DIR=")]


def tool(name: str) -> Path:
    """A build tool of this environment, else of the machine."""
    beside = Path(sys.executable).parent / name
    found = beside if beside.exists() else shutil.which(name)
    assert found, f"{name} is not installed"
    return Path(found)


def configure(folder: Path, *switches: str) -> subprocess.CompletedProcess[str]:
    pybind11 = subprocess.run(
        [sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return subprocess.run(
        [
            *(tool("cmake"), "-S", ROOT, "-B", folder, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"),
            *(f"-Dpybind11_DIR={pybind11}", f"-DPython_EXECUTABLE={sys.executable}", "-DSWARM_ROUTER=OFF"),
            *(*SOURCE, *switches),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def words(text: str) -> str:
    """CMake wraps its messages."""
    return " ".join(text.split())


def without_cuda() -> str:
    """The switch that hides a CUDA toolkit which this machine may have: on the path, or where CMake looks by itself."""
    path = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    folders = [folder for folder in path if (folder / "nvcc").exists()]
    for variable in ("CUDA_PATH", "CUDAToolkit_ROOT", "CUDA_HOME"):
        if os.environ.get(variable):
            folders.append(Path(os.environ[variable]) / "bin")
    for parent in (Path("/usr/local"), Path("/opt")):
        folders += [folder / "bin" for folder in parent.glob("cuda*")]
    return "-DCMAKE_IGNORE_PATH=" + ";".join(map(str, folders))


def test_cuda_without_a_toolkit_fails_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = without_cuda()
    monkeypatch.delenv("CUDACXX", raising=False)
    done = configure(tmp_path / "cuda", "-DGGML_CUDA=ON", hidden)
    assert done.returncode != 0
    assert "CUDA Toolkit not found" in words(done.stderr)
    assert not (tmp_path / "cuda" / "build.ninja").exists()
    # It is the toolkit that was missing, and nothing else.
    done = configure(tmp_path / "cpu", "-DGGML_CUDA=OFF", hidden)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cpu" / "build.ninja").exists()


@pytest.mark.parametrize(
    ("backend", "package", "message"),
    [
        ("VULKAN", "Vulkan", "find_package for module Vulkan called with REQUIRED"),
        ("OPENCL", "OpenCL", "find_package for module OpenCL called with REQUIRED"),
        ("BLAS", "BLAS", "BLAS not found"),
    ],
)
def test_a_backend_that_cannot_be_built_fails(backend: str, package: str, message: str, tmp_path: Path) -> None:
    """Never a build without the backend that was asked for, which computes on the CPU in its place."""
    done = configure(tmp_path, f"-DGGML_{backend}=ON", f"-DCMAKE_DISABLE_FIND_PACKAGE_{package}=ON")
    assert done.returncode != 0
    assert message in words(done.stderr)
    assert not (tmp_path / "build.ninja").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("build-x86", "avx1024"), "there is no avx1024; name one of baseline, sse42, avx2"),
        (("build-x86",), "name one of baseline, sse42, avx2"),
        (("build-native", "../elsewhere"), "../elsewhere is no name"),
        (("build-arm64", "--arch"), "unknown argument --arch, or one without a value"),
        (("build-vulkan", "--sweet", "trixie"), "unknown arguments --sweet trixie"),
        (("build-cuda", "--toolkit-from-pipp"), "unknown argument --toolkit-from-pipp"),
        (("equivalence", "x87"), "there is no backend x87"),
        (("verify-gpu", "--gpu-only"), "unknown arguments --gpu-only"),
    ],
)
def test_build_scripts_refuse_what_they_do_not_know(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    def run(folder: Path) -> subprocess.CompletedProcess[str]:
        script, *others = arguments
        return subprocess.run(
            [ROOT / "scripts" / script, *others, "--folder", folder],
            env={**os.environ, "SWARM_CACHE_DIR": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    done = run(tmp_path / "builds")
    assert done.returncode == 1
    assert done.stderr.startswith(f"swarm-node: {message}")
    # Nothing was fetched or built for it, and nothing ever is in the repository.
    assert list((tmp_path / "builds").iterdir()) == []
    done = run(ROOT / "builds-of-a-test")
    assert done.returncode == 1
    assert "builds-of-a-test is in the repository" in done.stderr
    assert not (ROOT / "builds-of-a-test").exists()


@pytest.mark.parametrize(
    ("switch", "similar"),
    [
        ("-DGGML_CUDAA=ON", "GGML_CUDAA; the most similar are: GGML_CUDA, "),
        ("-DGGML_VULCAN=ON", "GGML_VULCAN; the most similar are: GGML_VULKAN, "),
        ("-DGGML_cuda:BOOL=ON", "GGML_cuda; the most similar are: "),
        ("-DSWARM_ROUTR=OFF", "SWARM_ROUTR; the most similar are: SWARM_ROUTER"),
    ],
)
def test_a_switch_that_does_not_exist_is_refused(switch: str, similar: str, tmp_path: Path) -> None:
    done = configure(tmp_path, switch)
    assert done.returncode != 0
    assert f"neither swarm-node nor this llama.cpp has a build switch {similar}" in words(done.stderr)


def test_switches_that_exist_are_taken(tmp_path: Path) -> None:
    switches = ("-DGGML_NATIVE=OFF", "-DGGML_CUDA_GRAPHS=OFF", "-DGGML_CPU_ARM_ARCH=armv8-a", "-DSWARM_CCACHE=OFF")
    for _ in range(2):
        done = configure(tmp_path, *switches)
        assert done.returncode == 0, done.stderr
    cache = (tmp_path / "CMakeCache.txt").read_text()
    assert "GGML_NATIVE:BOOL=OFF" in cache
    assert "SWARM_BUILD_ID" in cache


def test_builds_for_different_processors_have_different_ids(tmp_path: Path) -> None:
    def build_id(*switches: str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        done = configure(folder, "-DGGML_NATIVE=OFF", *switches)
        assert done.returncode == 0, done.stderr
        lines = (folder / "CMakeCache.txt").read_text().splitlines()
        return next(line for line in lines if line.startswith("SWARM_BUILD_ID"))

    plain = build_id()
    assert build_id() == plain
    assert len({plain, build_id("-DGGML_SSE42=OFF"), build_id("-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod")}) == 3


def test_a_folder_that_is_not_llama_cpp_is_refused(tmp_path: Path) -> None:
    done = configure(tmp_path / "build", f"-DSWARM_LLAMA_CPP_DIR={tmp_path}")
    assert done.returncode != 0
    assert f"SWARM_LLAMA_CPP_DIR={tmp_path} is not a llama.cpp source folder" in words(done.stderr)


@pytest.fixture(scope="module")
def expert_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with the expert-only package, built in isolation from this working tree."""
    folder = tmp_path_factory.mktemp("expert-only")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["CMAKE_ARGS"] = shlex.join(["-DSWARM_ROUTER=OFF", *SOURCE])
    # Not the folder of the editable install's build, which the configuration would turn into another one.
    done = subprocess.run(
        [python, "-m", "pip", "install", "-v", f"--config-settings=build-dir={folder / 'build'}", ROOT],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return python


@pytest.mark.slow
def test_expert_only_package(expert_only: Path, tmp_path: Path) -> None:
    def run(*arguments: str | Path) -> str:
        done = subprocess.run(
            [expert_only, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    installed = Path(run("-c", "import kernels; print(kernels.__path__[0])").strip())
    assert installed.is_relative_to(expert_only.parent.parent)
    files = {path.name for path in (installed / "_native").iterdir()}
    assert files == {"libswarm-ggml.so", "libswarm-ggml-base.so", "libswarm-ggml-cpu.so"}
    assert not (installed / "src").exists()

    found = json.loads(run(native_process.__file__, "kernels"))
    own = subprocess.run(
        [sys.executable, native_process.__file__, "kernels"], capture_output=True, text=True, check=True
    )
    assert found["ffn"] == json.loads(own.stdout)["ffn"]
    assert {Path(name).parent for name in found["ggml"]} == {installed / "_native"}

    script = """
import kernels
try:
    kernels.native_path("llama-server")
except FileNotFoundError as error:
    print(error)
"""
    message = run("-c", script)
    assert "this build of swarm-node has no llama-server" in message
    assert str(installed / "_native" / "llama-server") in message
    assert "SWARM_ROUTER=OFF" in message
