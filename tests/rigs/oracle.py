"""Runs swarm-logits, the oracle: libllama's logits with stock buffers, or with the experts elsewhere."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from node.parent_death import NO_BACKTRACE

_MAGIC = b"SWLG"
_HEADER_BYTES = 28


class OracleError(AssertionError):
    """swarm-logits could not do a job; the message is its own."""


@dataclass(frozen=True)
class Job:
    """One model, one prompt. `overrides` are (tensor name pattern, buffer type name), the first match counts.
    `tokens` is the prompt; without it, `n_prompt` random tokens of `seed`."""

    model: Path
    tokens: Sequence[int] | None = None
    n_prompt: int = 40
    seed: int = 1
    n_generate: int = 64
    n_threads: int = 1
    n_ubatch: int = 512
    overrides: Sequence[tuple[str, str]] = ()
    repack: bool = True
    all_logits: bool = False
    load_mode: str = "auto"

    def arguments(self, folder: Path, number: int) -> list[str]:
        """The job's command line; its output goes to `folder`/`number`.bin."""
        arguments = ["-m", str(self.model), "-o", str(folder / f"{number}.bin"), "-n", str(self.n_generate)]
        arguments += ["-t", str(self.n_threads), "--ubatch", str(self.n_ubatch), "--load-mode", self.load_mode]
        if self.tokens is None:
            arguments += ["--n-prompt", str(self.n_prompt), "--seed", str(self.seed)]
        else:
            file = folder / f"{number}.tokens"
            file.write_text(" ".join(map(str, self.tokens)))
            arguments += ["--tokens-file", str(file)]
        for pattern, buffer_type in self.overrides:
            arguments += ["-ot", f"{pattern}={buffer_type}"]
        return arguments + ["--no-repack"] * (not self.repack) + ["--all-logits"] * self.all_logits


@dataclass(frozen=True)
class Logits:
    """What a job gave: `rows` float32 [n_rows, width], the prompt's last token (or all of them) and then one for each
    generated token; token ids int32. `kind` is "logits" (width: vocabulary) or "embeddings" (width: n_embd)."""

    kind: str
    rows: NDArray[np.float32]
    prompt: NDArray[np.int32]
    generated: NDArray[np.int32]


def native_program(name: str) -> Path:
    """A program of the build: in $SWARM_NATIVE_DIR, else beside the installed extension module."""
    if os.environ.get("SWARM_NATIVE_DIR"):
        folder = Path(os.environ["SWARM_NATIVE_DIR"])
    else:
        import kernels

        folder = Path(kernels.__path__[0]) / "_native"
    if not (folder / name).is_file():
        raise FileNotFoundError(f"{folder / name} is missing: build with -DSWARM_TOOLS=ON, or set SWARM_NATIVE_DIR")
    return folder / name


def evaluate(
    jobs: Sequence[Job], *, env: Mapping[str, str] | None = None, timeout_s: float = 600
) -> list[Logits | str]:
    """Runs jobs in one process, as far as it lives; each gives its logits or the reason why not.

    A job that kills the process costs itself alone: the ones after it run in a new process. `env` is added to the
    environment. Raises subprocess.TimeoutExpired after `timeout_s` seconds in one process.
    """
    results: list[Logits | str] = []
    with tempfile.TemporaryDirectory(prefix="swarm-logits-") as name:
        folder = Path(name)
        lines = ["\t".join(job.arguments(folder, number)) for number, job in enumerate(jobs)]
        while len(results) < len(jobs):
            (folder / "jobs").write_text("\n".join(lines[len(results) :]) + "\n")
            done = subprocess.run(
                [native_program("swarm-logits"), "--jobs", folder / "jobs"],
                env={**os.environ, **NO_BACKTRACE, **(env or {})},
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
            for line in done.stdout.splitlines():
                if line.startswith("ok "):
                    output = Path(line.removeprefix("ok "))
                    results.append(read_logits(output))
                    output.unlink()
                elif line.startswith("failed "):
                    results.append(line.partition(": ")[2])
            if len(results) < len(jobs):
                results.append(f"swarm-logits ended with status {done.returncode}: {done.stderr[-2000:]}")
    return results


def logits(job: Job, *, env: Mapping[str, str] | None = None, timeout_s: float = 600) -> Logits:
    """Runs one job. Raises OracleError when it fails."""
    result = evaluate([job], env=env, timeout_s=timeout_s)[0]
    if isinstance(result, str):
        raise OracleError(f"{job.model}: {result}")
    return result


def read_logits(path: Path) -> Logits:
    """Reads an output file of swarm-logits. Raises ValueError when it is not one."""
    data = path.read_bytes()
    if len(data) < _HEADER_BYTES or data[:4] != _MAGIC:
        raise ValueError(f"{path} is not an output of swarm-logits")
    version, kind, width, n_rows, n_prompt, n_generated = np.frombuffer(data, "<u4", 6, 4).tolist()
    if version != 1 or len(data) != _HEADER_BYTES + 4 * (width * n_rows + n_prompt + n_generated):
        raise ValueError(f"{path} is damaged, or of another version of swarm-logits")
    rows = np.frombuffer(data, "<f4", width * n_rows, _HEADER_BYTES).reshape(n_rows, width)
    ids = np.frombuffer(data, "<i4", n_prompt + n_generated, _HEADER_BYTES + 4 * width * n_rows)
    return Logits(("logits", "embeddings")[kind], rows, ids[:n_prompt], ids[n_prompt:])


def nmse(value: NDArray[np.floating], expected: NDArray[np.floating]) -> float:
    """Normalised mean squared error: |value - expected|² / |expected|², in float64."""
    a, b = value.astype(np.float64), expected.astype(np.float64)
    return float(np.sum((a - b) ** 2) / np.sum(b**2))
