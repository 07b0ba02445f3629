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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``slow`` is what ``scripts/test --fast`` leaves out."""
    tests = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(tests).parts[0] if item.path.is_relative_to(tests) else ""
        if folder in _SLOW:
            item.add_marker("slow")
