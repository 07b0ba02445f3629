"""llama-perplexity over the swarm prints what stock prints."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.models.demo import demo_model
from rigs import ROOT, random_models
from rigs.expert_servers import OVERRIDE, Servers, native


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    running = Servers(2, tmp_path_factory.mktemp("servers"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prose of some 4,000 tokens, from this project's own documents."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    docs = ROOT / "docs"
    path.write_text((docs / "architecture.md").read_text() + (docs / "protocol.md").read_text())
    return path


def _perplexity(model: Path, text: Path, *arguments: str, env: dict[str, str] | None = None) -> list[str]:
    """The running estimate after each chunk of 512 tokens and the final line, as printed."""
    done = subprocess.run(
        [native("llama-perplexity"), "-m", model, "-f", text, "-c", "512", "--chunks", "4", "-t", "2", *arguments],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.findall(r"\[\d+\][\d.]+|Final estimate: PPL = [\d.]+ \+/- [\d.]+", done.stdout + done.stderr)
    assert len(found) == 5, done.stdout
    return found


@pytest.mark.parametrize("case", ["demo", "qwen3moe Q4_K_M"])
def test_perplexity_prints_the_same_digits(case: str, servers: Servers, text: Path) -> None:
    if case == "demo":
        model, settings = demo_model(), []
    else:
        model, settings = (
            random_models.moe_model(random_models.Shape(*case.split()[:1]), case.split()[1]),
            ["--no-repack"],
        )
    expected = _perplexity(model, text, *settings)
    with servers.holding(model) as held:
        result = _perplexity(model, text, *settings, "--poll", "0", "-ot", "=".join(OVERRIDE), env=held.environment())
        assert held.statistics()["calls"] > 0
    assert result == expected
    print(case, expected[-1])
