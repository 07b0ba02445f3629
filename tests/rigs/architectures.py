"""llama.cpp's tiny random models, one of each Mixture-of-Experts architecture."""

from __future__ import annotations

import subprocess
from pathlib import Path

from rigs import random_models
from rigs.oracle import native_program

# These architectures of llama.cpp's generator have no routed experts in the graph that llama.cpp builds for their "MoE"
# model (refact has the tensors, unused): nothing to serve. docs/architectures.md lists them.
WITHOUT_EXPERTS = {"ernie4_5", "paddleocr", "refact"}


def architecture_models() -> dict[str, Path]:
    """llama.cpp's tiny random model of every MoE architecture, 8 experts of which 3 are used, by architecture."""
    folder = random_models.cache_folder() / "architectures"
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [native_program("test-llama-archs"), "-o", str(folder), "-s", "1"], check=True, capture_output=True
        )
        (folder / "complete").touch()
    found = {path.name.removesuffix("-moe.gguf"): path for path in sorted(folder.glob("*-moe.gguf"))}
    assert len(found) >= 55
    return found
