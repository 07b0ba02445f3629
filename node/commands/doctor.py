"""``swarm-node doctor``: looks at everything a node needs on this machine, and says what to do about what is wrong.

Changes nothing. Every check runs, whatever becomes of the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict

import aiohttp
from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.commands.doctor_check import Check
from node.commands.doctor_machine import (
    check_build,
    check_cpu,
    check_devices,
    check_ffn,
    check_memory,
    check_state_folder,
)
from node.commands.doctor_network import check_addresses, check_firewall, check_multicast, check_peers, check_port
from node.errors import ConfigError
from node.settings.load import Config, load_config


async def run_doctor(options: argparse.Namespace) -> int:
    """Runs every check and prints what they found; 0 when none failed, else 1. ``options.json``: as JSON."""
    checks = await examine(options)
    failed = any(check.state == "failed" for check in checks)
    if options.json:
        print(json.dumps({"ok": not failed, "checks": [asdict(check) for check in checks]}, indent=1))
    else:
        _print(checks, Console(file=sys.stdout, highlight=False))
    return int(failed)


async def examine(options: argparse.Namespace) -> list[Check]:
    """All checks, with the settings that `swarm-node run` would use; with the defaults if those are wrong."""
    try:
        config = load_config(options, os.environ)
        settings = _settings(config)
    except ConfigError as error:
        config = load_config(argparse.Namespace(config=os.devnull), {})
        settings = Check(
            "settings", "failed", "; ".join(str(error).splitlines()), "Correct them; the defaults are used here"
        )
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3)) as session:
        results = await asyncio.gather(
            _run("build", lambda: asyncio.to_thread(check_build, config)),
            _run("devices", lambda: asyncio.to_thread(check_devices, config)),
            _run("test FFN", lambda: check_ffn(config)),
            _run("CPU", lambda: asyncio.to_thread(check_cpu, config)),
            _run("memory", lambda: asyncio.to_thread(check_memory, config)),
            _run("state folder", lambda: asyncio.to_thread(check_state_folder, config)),
            _run("agent port", lambda: check_port(session, config, "agent port", config.node.port)),
            _run("expert port", lambda: check_port(session, config, "expert port", config.node.expert_port)),
            _run("addresses", lambda: asyncio.to_thread(check_addresses, config)),
            _run("multicast", lambda: asyncio.to_thread(check_multicast, config)),
            _run("firewall", lambda: asyncio.to_thread(check_firewall, config)),
            _run("peers", lambda: check_peers(session, config)),
        )
    return [*results[:5], settings, *results[5:]]


async def _run(name: str, check: Callable[[], Awaitable[Check]]) -> Check:
    try:
        return await check()
    except Exception as error:  # a check that breaks is a finding, and the others still run
        return Check(name, "failed", f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def _settings(config: Config) -> Check:
    source = str(config.path) if config.path is not None else "defaults, environment and flags"
    key = "with a key" if config.swarm.key else "without a key"
    found = f"node {config.node.name!r} of swarm {config.swarm.name!r}, {key}, from {source}"
    if config.warnings:
        return Check("settings", "warning", found, "; ".join(config.warnings))
    return Check("settings", "ok", found)


def _print(checks: Sequence[Check], console: Console) -> None:
    table = Table()
    for heading in ("check", "state", "found"):
        table.add_column(heading, overflow="fold")
    colours = {"ok": "green", "warning": "yellow", "failed": "bold red"}
    for check in checks:
        # Text, not markup: names and errors come from elsewhere.
        found = Text(check.found)
        if check.advice:
            found.append(f"\n→ {check.advice}", "bold" if check.state != "ok" else "dim")
        table.add_row(Text(check.name), Text(check.state, colours[check.state]), found)
    console.print(table)
    n_failed = sum(check.state == "failed" for check in checks)
    n_warnings = sum(check.state == "warning" for check in checks)
    console.print(f"{n_failed} failed, {n_warnings} warning{'s' * (n_warnings != 1)}, of {len(checks)} checks")
