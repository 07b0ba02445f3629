"""``swarm-node run``: one node, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from node.agent.agent import Agent, open_agent
from node.agent.http_server import HttpServer
from node.agent.machine import Machine, this_machine
from node.agent.view import View
from node.log_files import AGENT_LOG, EXPERTS_LOG, ROUTER_LOG, AgentLogHandler, keep_bounded, log_folder
from node.log_levels import parse_levels
from node.logs import SHOWN, add_file, configure
from node.models.known import KnownModels
from node.peers.identity import hold_identity, state_root
from node.settings.load import Config, load_config
from node.version import version

log = logging.getLogger(__name__)


async def run_node(options: argparse.Namespace) -> int:
    """Runs a node with the settings of file, environment and flags. Raises SwarmError."""
    config = load_config(options, os.environ)
    if options.verbose:
        level = str(parse_levels(config.log.level).with_default("debug"))
        config = dataclasses.replace(config, log=dataclasses.replace(config.log, level=level))
    secrets = [secret for secret in (config.swarm.key, config.api.key) if secret]
    configure(config.log.format, config.log.level, secrets=secrets)
    for warning in config.warnings:
        log.warning("%s", warning)
    root = state_root(config.node.state_folder, os.environ)
    with hold_identity(root, config.node.name) as identity:
        logs = log_folder(identity.folder)
        try:
            add_file(AgentLogHandler(logs / AGENT_LOG), secrets)
        except OSError as error:
            log.warning("no log is kept in %s: %s", logs / AGENT_LOG, error.strerror)
        log.info("swarm-node %s starts, process %d", version(), os.getpid(), extra=SHOWN)
        for warning in identity.warnings:
            log.warning("%s", warning)
        log.debug("settings from %s", config.path or "defaults, environment and flags")
        log.debug("node %s, start %d, state in %s", identity.node_id, identity.boot, identity.folder)
        try:
            machine = this_machine(config)
            async with open_agent(config, identity, machine, logs) as agent:
                await _run(agent, config, machine, logs)
        except asyncio.CancelledError:
            log.info("the node is stopped", extra=SHOWN)
            raise
        except BaseException:  # said on the screen by the command; the file would not have it
            log.error("the node ends", exc_info=True, extra=SHOWN)
            raise
    return 0


async def _run(agent: Agent, config: Config, machine: Machine, logs: Path) -> None:
    """Runs the node, and beside it what is for people."""
    next_round = agent.supervisor.next_round
    asides = [
        asyncio.create_task(_greet(config, machine, agent.server, agent.models, agent.view, next_round)),
        asyncio.create_task(keep_bounded([logs / EXPERTS_LOG, logs / ROUTER_LOG])),
    ]
    try:
        await agent.run()
    finally:
        for aside in asides:
            aside.cancel()


async def _show_hashing(models: KnownModels, console: Console) -> None:
    """A bar for as long as a model is hashed, if that takes more than a moment."""
    await asyncio.sleep(1.0)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("hashing", total=None, visible=False)
        while models.progress is not None:
            name, done, total = models.progress
            bar.update(task, description=f"hashing {name}", completed=done, total=total, visible=True)
            await asyncio.sleep(0.2)


async def _greet(
    config: Config,
    machine: Machine,
    server: HttpServer,
    models: KnownModels,
    look: Callable[[], View],
    may_change: Callable[[], Awaitable[None]],
) -> None:
    """Says where the node answers, and from then on what the swarm is waiting for, whenever that changes."""
    await server.listening.wait()
    console = Console(stderr=True, highlight=False)
    if config.log.format == "text":
        url = f"http://{config.node.local_url_host}:{server.port}/v1"
        console.print(
            f"[bold]{config.node.name}[/] of swarm {config.swarm.name!r} answers at [bold]{url}[/]"
            f" and offers {machine.memory_bytes / 2**30:.1f} GiB for experts. Ctrl-C ends it."
        )
        if not config.swarm.key:
            console.print(
                "[yellow]No swarm key:[/] every machine with a private or link-local address can join and ask. "
                "`swarm-node keygen` makes one."
            )
    on_screen = config.log.format == "text" and sys.stderr.isatty()
    shown = ""
    while True:
        if models.progress is not None and on_screen:
            await _show_hashing(models, console)
        text = look().summary()
        if text != shown:
            shown = text
            if on_screen:
                console.print(text)
                log.info("%s", text, extra=SHOWN)
            else:
                log.info("%s", text)
        await may_change()
