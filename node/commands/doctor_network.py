"""``swarm-node doctor``: ports, addresses, multicast, firewalls and peers. Changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import socket
import struct
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from gossip.discovery import find, local_addresses
from node.access import is_private
from node.commands.doctor_check import Check
from node.peers.peering import interface_rules
from node.settings.load import Config

# Multicast DNS answers within a second; one lost packet is asked again after another.
FIND_S = 3.0
_MDNS_GROUP, _MDNS_PORT = "224.0.0.251", 5353


async def check_port(session: aiohttp.ClientSession, config: Config, name: str, port: int) -> Check:
    """A port is free, or used by this machine's own node."""
    if port == 0:
        return Check(name, "ok", "any free one, chosen at each start")
    if name == "expert port" and not config.experts.enabled:
        return Check(name, "ok", f"{port} is not used: [experts] enabled is false")
    setting = "[node] expert_port (--node-expert-port)" if name == "expert port" else "[node] port (--port)"
    problem = await asyncio.to_thread(_bind_problem, config.node.listen_hosts[0], port)
    if problem is None:
        return Check(name, "ok", f"{port} is free")
    if problem.errno != errno.EADDRINUSE:
        advice = "Set [node] host to an address of this machine" if problem.errno == errno.EADDRNOTAVAIL else ""
        advice = advice or f"Set another {setting}"
        return Check(name, "failed", f"{port} on {config.node.host} cannot be used: {problem.strerror}", advice)
    url = f"http://{config.node.local_url_host}:{port}"
    health = await _get(session, f"{url}/health")
    if health is not None and name == "agent port":
        health = await _get(session, f"{url}/status")
    if health is None or "name" not in health:
        return Check(
            name, "failed", f"{port} is used by another program", f"End that program, or set another {setting}"
        )
    if health["name"] == config.node.name:
        return Check(name, "ok", f"{port} is used by this machine's node, which runs")
    advice = f"A second node on one machine needs --name and another {setting}"
    return Check(name, "failed", f"{port} is used by another node, {str(health['name'])[:63]!r}", advice)


def _bind_problem(host: str, port: int) -> OSError | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            # As the servers do it: what is left of closed connections does not count.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen()
    except OSError as error:
        return error
    return None


def check_addresses(config: Config) -> Check:
    """The addresses that would be announced, and those left out."""
    if config.node.host == "loopback":
        return Check("addresses", "warning", "[node] host is loopback: no other machine reaches this node")
    usable, left_out = local_addresses(interface_rules(config))
    announced = [entry.address for entry in usable]
    used = ", ".join(f"{entry.address} ({entry.interface})" for entry in usable) or "none"
    others = ", ".join(f"{entry.address} ({entry.interface}: {entry.reason})" for entry in left_out) or "none"
    found = f"announced: {used}; left out: {others}"
    unknown = {*config.swarm.interfaces, *config.swarm.exclude_interfaces} - set(psutil.net_if_addrs())
    if not announced:
        return Check(
            "addresses", "failed", found, "Connect to a network; look at [swarm] interfaces and exclude_interfaces"
        )
    if unknown:
        return Check("addresses", "warning", found, f"There is no interface {', '.join(sorted(unknown))}: see [swarm]")
    public = [address for address in announced if not is_private(address)]
    if public and not config.swarm.key:
        advice = "Without a key only private addresses are served: make a key with `swarm-node keygen`"
        return Check("addresses", "warning", f"{found}; public: {', '.join(public)}", advice)
    return Check("addresses", "ok", found)


def check_multicast(config: Config) -> Check:
    """A packet to the group of multicast DNS comes back, on every interface that would be announced."""
    if config.node.host == "loopback":
        return Check("multicast", "ok", "not needed: [node] host is loopback")
    advice = "Nodes may not find each other by themselves: name one with --seed HOST:PORT"
    addresses = [address for address in _announced(config) if ":" not in address][:8]
    problems = [f"{a}: {problem}" for a in addresses if (problem := multicast_problem(a)) is not None]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            _share_port(sock)
            sock.bind(("", _MDNS_PORT))
    except OSError as error:
        problems.append(f"UDP port {_MDNS_PORT}: {error.strerror}")
    if problems:
        return Check("multicast", "warning", "; ".join(problems), advice)
    if not addresses:
        return Check("multicast", "warning", "no IPv4 address to send from", advice)
    return Check("multicast", "ok", f"{_MDNS_GROUP} takes and gives packets on {', '.join(addresses)}")


def multicast_problem(address: str, timeout_s: float = 0.7) -> str | None:
    """Sends a packet to the group of multicast DNS on an interface, on a free port; None when it comes back."""
    token = os.urandom(16)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind(("", 0))
            member = struct.pack("4s4s", socket.inet_aton(_MDNS_GROUP), socket.inet_aton(address))
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
            # Not beyond this machine's own network.
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
            sock.settimeout(timeout_s)
            sock.sendto(token, (_MDNS_GROUP, sock.getsockname()[1]))
            for _ in range(16):
                if sock.recv(64) == token:
                    return None
    except TimeoutError:
        return "a multicast packet did not come back"
    except OSError as error:
        return f"multicast fails: {error.strerror or error}"
    return "other packets only"


def _share_port(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "SO_REUSEPORT"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def check_firewall(config: Config) -> Check:
    """Which firewalls are installed, and what to open. Reads no rules: that needs root."""
    path = os.pathsep.join(
        [os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin", "/usr/libexec/ApplicationFirewall"]
    )
    tools = [t for t in ("ufw", "firewall-cmd", "nft", "iptables", "socketfilterfw") if shutil.which(t, path=path)]
    ports = [port for port in (config.node.port, config.node.expert_port) if port]
    needed = (
        f"TCP {' and '.join(map(str, ports))}, UDP {_MDNS_PORT} from the LAN" if ports else "fixed ports, and UDP 5353"
    )
    if config.node.host == "loopback" or not tools:
        return Check("firewall", "ok", "none needed" if not tools else "not concerned: [node] host is loopback")
    found = (
        f"{', '.join(tools)} {'is' if len(tools) == 1 else 'are'} installed; whether rules are in force was not "
        "looked at"
    )
    if _ufw_enabled():
        commands = "; ".join([*(f"sudo ufw allow {port}/tcp" for port in ports), f"sudo ufw allow {_MDNS_PORT}/udp"])
        return Check("firewall", "warning", "ufw is enabled", f"A node needs {needed}. If not yet allowed: {commands}")
    return Check("firewall", "ok", found, f"If peers do not reach this node, let in {needed}")


def _ufw_enabled(path: Path = Path("/etc/ufw/ufw.conf")) -> bool:
    try:
        return any(line.strip().lower() == "enabled=yes" for line in path.read_text().splitlines())
    except (OSError, UnicodeDecodeError):
        return False


async def check_peers(session: aiohttp.ClientSession, config: Config) -> Check:
    """Seeds, and peers that multicast DNS finds; and whether they answer."""
    own = {_url(address, config.node.port) for address in [*_announced(config), "127.0.0.1"]}
    urls = {f"http://{seed}" for seed in config.swarm.seeds}
    if config.node.host != "loopback":
        async for node in find(config.swarm.name, FIND_S, interfaces=interface_rules(config)):
            urls.update(f"http://{address}" for address in node.addresses)
    others = sorted(urls - own)
    answers = await asyncio.gather(*(_get(session, f"{url}/health") for url in others))
    silent = [url for url, answer in zip(others, answers, strict=True) if answer is None]
    found = f"of swarm {config.swarm.name!r}: {', '.join(url for url in others if url not in silent) or 'none'}"
    if silent:
        advice = "Is the node there running, and does its firewall let this machine in?"
        return Check("peers", "warning", f"{found}; without answer: {', '.join(silent)}", advice)
    advice = "" if others else "Start nodes on other machines; if they are not found, name one with --seed HOST:PORT"
    return Check("peers", "ok", f"{found} (found within {FIND_S:.0f} s)", advice)


def _announced(config: Config) -> list[str]:
    return [entry.address for entry in local_addresses(interface_rules(config))[0]]


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _get(session: aiohttp.ClientSession, url: str) -> dict[str, Any] | None:
    """A JSON object of at most 1 MiB; None for anything else."""
    try:
        async with session.get(url, allow_redirects=False) as response:
            body = await response.content.read(1 << 20)
            while not response.content.at_eof() and len(body) < 1 << 20:
                body += await response.content.read(1 << 20)
            document = json.loads(body) if response.status == 200 else None
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
