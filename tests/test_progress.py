"""What scripts/progress.py makes of the output of pip and ninja, and of a command that fails."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import progress


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("[212/396] Building CXX object llama.cpp/common/arg.cpp.o", (212, 396)),
        ("  [1/2] Linking CXX shared library bin/libswarm-llama.so", (1, 2)),
        ("[notice] A new release of pip is available", None),
        ("  [1/x] Building", None),
        ("-- Configuring done (6.9s)", None),
        ("text [3/4] in a line", None),
    ],
)
def test_steps_of_ninja(line: str, step: tuple[int, int] | None) -> None:
    assert progress.step(line) == step


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("Collecting numpy>=1.26 (from gguf>=0.17)", "collecting numpy"),
        ("Collecting scikit-build-core>=0.11", "collecting scikit-build-core"),
        ("  Downloading msgspec-0.23.0-cp311-cp311-manylinux2014_x86_64.whl (232 kB)", "downloading msgspec"),
        ("Installing collected packages: ninja, cmake", "unpacking packages"),
        ("  *** Configuring CMake...", "configuring"),
        ("  -- Fetching the llama.cpp source (x 0.3.36, 76 MB) into /a", "fetching the source of llama.cpp (76 MB)"),
        ("Requirement already satisfied: numpy", None),
        ("", None),
    ],
)
def test_phases(line: str, phase: str | None) -> None:
    assert progress.phase(line) == phase


def test_a_build_says_its_steps_and_then_what_is_left() -> None:
    seen = progress.Progress("building", 100.0)
    assert seen.line(103.0) == "swarm-node: building, 3 s"
    seen.read("  *** Configuring CMake...", 104.0)
    assert seen.line(110.0) == "swarm-node: building, configuring, 10 s"
    seen.read("[1/50] Building C object a.o", 120.0)
    assert seen.line(121.0) == "swarm-node: [1/50]"
    seen.read("[10/50] Building C object b.o", 150.0)
    assert seen.line(150.0) == "swarm-node: [10/50], about 2 min left"
    seen.read("[49/50] Building C object c.o", 300.0)
    assert seen.line(300.0) == "swarm-node: [49/50], less than a minute left"
    seen.read("  *** Installing project into wheel...", 301.0)
    assert seen.line(302.0) == "swarm-node: building, installing, 202 s"


def test_what_is_left_of_a_build_from_nothing() -> None:
    # A tenth of the work is done, with a fifth of the steps.
    assert progress.time_left(40, 200, 45.0) == "about 8 min left"
    assert progress.time_left(100, 200, 315.0) == "about 4 min left"
    assert progress.time_left(200, 200, 500.0) == "less than a minute left"
    assert progress.time_left(0, 200, 500.0) == progress.time_left(1, 200, 1.0) == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_and_a_pipe_has_one_seldom() -> None:
    for out, seconds, written in (
        (Terminal(), progress.TERMINAL_SECONDS, "\r\x1b[Ka\r\x1b[Kb\r\x1b[Kend\n"),
        (io.StringIO(), progress.PLAIN_SECONDS, "a\nb\nend\n"),
    ):
        screen = progress.Screen(out, 0.0)
        screen.show("early", seconds / 2)
        screen.show("a", seconds)
        screen.show("too soon", seconds * 1.5)
        screen.show("b", seconds * 2)
        screen.say("end")
        assert out.getvalue() == written


def test_a_failure_shows_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("of another command\n")
    script = "import sys; print(*range(1000), sep='\\n'); print('bad', file=sys.stderr); sys.exit(7)"
    command = [sys.executable, progress.__file__, "--log", str(log), "trying", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 7
    lines = done.stderr.splitlines()
    assert lines[0] == "swarm-node: trying"
    assert len(lines) == 1 + progress.TAIL_LINES + 1
    assert "999" in lines and "bad" in lines and "of another command" not in lines
    assert lines[-1].startswith(f"swarm-node: failed: {sys.executable} -c ")
    assert lines[-1].endswith(f"(whole log: {log})")
    assert log.read_text().splitlines()[:2] == ["of another command", "0"]
