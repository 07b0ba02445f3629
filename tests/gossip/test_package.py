"""What the package gives to programs, and what it costs to import."""

import importlib
import subprocess
import sys

import pytest

import gossip
import gossip.discovery
from rigs import ROOT

#: What a state machine without I/O and clock has no use for.
FORBIDDEN = ("asyncio", "socket", "selectors", "threading", "aiohttp", "zeroconf", "cryptography")


@pytest.mark.parametrize("package", [gossip, gossip.discovery])
def test_every_public_name_is_there(package: object) -> None:
    for name in package.__all__:  # type: ignore[attr-defined]
        assert getattr(package, name) is not None
    assert sorted(set(package.__all__)) == sorted(package.__all__)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="'Bogus'"):
        _ = gossip.Bogus


def test_the_service_comes_by_its_public_name() -> None:
    assert gossip.Service is importlib.import_module("gossip.service").Service


@pytest.mark.parametrize("module", ["gossip", "gossip.swim.core"])
def test_the_state_machine_comes_without_io(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {FORBIDDEN} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    "module",
    [
        "swim.members",
        "swim.events",
        "service",
        "discovery.interfaces",
        "discovery.dns_sd",
        "messages",
        "simulate.scenarios",
    ],
)
def test_each_module_can_be_the_first_that_is_imported(module: str) -> None:
    subprocess.run([sys.executable, "-c", f"import gossip.{module}"], capture_output=True, check=True, cwd=ROOT)
