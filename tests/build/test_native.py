"""The native code's own tests, built with the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess

import kernels
from rigs import ROOT, random_models


def _llama_cpp_source() -> str:
    """The source that the build under test was made from."""
    if os.environ.get("SWARM_LLAMA_CPP_SOURCE"):
        return os.environ["SWARM_LLAMA_CPP_SOURCE"]
    (cache,) = (ROOT / "build").glob("*/CMakeCache.txt")
    found = re.search(r"^SWARM_LLAMA_CPP_SOURCE:INTERNAL=(.*)$", cache.read_text(), re.MULTILINE)
    assert found is not None, cache
    return found[1]


def test_native_tests_pass_under_sanitizers() -> None:
    # CMake refuses a build folder made from another checkout, and the cache may outlive a checkout.
    checkout = hashlib.sha256(str(ROOT).encode()).hexdigest()[:12]
    folder = random_models.cache_folder() / f"native-tests-{checkout}"
    native = kernels.native_path("llama-server").parent
    configure = ["cmake", "-G", "Ninja", "-S", str(ROOT / "tests" / "native"), "-B", str(folder), "-DSWARM_SANITIZE=ON"]
    configure += [f"-DSWARM_LLAMA_CPP_SOURCE={_llama_cpp_source()}", f"-DSWARM_NATIVE_DIR={native}"]
    for command in (configure, ["cmake", "--build", str(folder), "--parallel", "2"]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    for program in ("test_transport", "test_store"):
        done = subprocess.run([folder / program], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        assert re.search(r"\d+ tests, 0 failed checks", done.stdout)
