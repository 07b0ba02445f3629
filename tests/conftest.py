from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# So that a failed assertion in them shows its values, as one in a test does.
pytest.register_assert_rewrite("rigs.api_cases")

# Both measure the machine, which may be busy.
settings.register_profile("swarm-node", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("swarm-node")

# Folders are by what their tests need: nothing, this build, processes of it, root, compilers. These take minutes.
_SLOW = ("swarm", "lan", "build")
# Nobody should wonder for longer whether anything goes on.
_SILENT_S = 10.0
# Not for the nodes that tests start: they refuse variables that they do not know.
_PROGRESS = os.environ.pop("SWARM_TEST_PROGRESS_FD", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``slow`` is what ``scripts/test --fast`` leaves out."""
    tests = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(tests).parts[0] if item.path.is_relative_to(tests) else ""
        if folder in _SLOW:
            item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that takes long says so while it runs, past pytest's capture: on the descriptor named by scripts/test."""
    if not _PROGRESS.isdecimal():
        return (yield)
    ended = threading.Event()
    thread = threading.Thread(target=_tell, args=(item.nodeid, int(_PROGRESS), ended), daemon=True)
    thread.start()
    try:
        return (yield)
    finally:
        ended.set()
        thread.join()


def _tell(name: str, progress: int, ended: threading.Event) -> None:
    started_s = time.monotonic()
    while not ended.wait(_SILENT_S):
        os.write(progress, f"\n{name} has run for {time.monotonic() - started_s:.0f} s\n".encode())
