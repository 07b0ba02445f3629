"""Runs `gossip.discovery` as a process of its own, for test_discovery.py: one JSON object per event on stdout.

run_discovery.py node '{"node_id": …, "port": …}'    a node, until SIGTERM
run_discovery.py sniff                               every record of a response that is multicast on eth0
run_discovery.py find SWARM SECONDS                  what `find` gives
run_discovery.py garbage SEED                        packets that are no DNS, or hostile DNS, then ends
run_discovery.py hold                                keeps UDP port 5353 to itself
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import random
import signal
import socket
import struct
import sys
import time
from typing import Any

import zeroconf.asyncio
from zeroconf import DNSIncoming, DNSOutgoing, DNSPointer, DNSService, DNSText

from gossip.discovery.dns_sd import Discovery, Found, find
from gossip.discovery.interface_watch import watch_interfaces
from gossip.discovery.interfaces import InterfaceRules
from gossip.discovery.multicast_dns import SERVICE_TYPE

GROUP = ("224.0.0.251", 5353)


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


class SayLog(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(log=record.levelname, logger=record.name, text=record.getMessage())


def found_fields(found: Found) -> dict[str, Any]:
    hosts = [address.host for address in found.addresses]
    return {"id": found.node_id, "port": found.addresses[0].port, "version": found.version, "hosts": hosts} | {
        "name": found.name.removesuffix(f".{SERVICE_TYPE}"),
        "swarm": found.swarm,
    }


class FailingSocket:
    """Makes the first ``count`` multicasts of this process fail, each sending as the system would fail it."""

    def __init__(self, count: int, number: int) -> None:
        self.count, self.number = count, number
        self.sendto = socket.socket.sendto
        socket.socket.sendto = lambda sock, *args: self(sock, *args)  # type: ignore[assignment,method-assign]

    def __call__(self, sock: socket.socket, *arguments: Any) -> int:
        if self.count and arguments[-1][1] == 5353:
            self.count -= 1
            raise OSError(self.number, os.strerror(self.number))
        return self.sendto(sock, *arguments)


async def node(
    node_id: str,
    port: int,
    swarm: str = "default",
    failing: int = 0,
    error: str = "EHOSTUNREACH",
    reopen: bool = False,
    rules: dict[str, Any] | None = None,
) -> None:
    logging.getLogger().addHandler(SayLog())
    logging.getLogger("gossip").setLevel(logging.INFO)
    if failing:
        FailingSocket(failing, getattr(errno, error))
    if reopen:  # as before zeroconf 0.150
        del zeroconf.asyncio.AsyncZeroconf.async_update_interfaces
    interfaces = InterfaceRules(**(rules or {}))
    discovery = Discovery(
        node_id=node_id,
        swarm=swarm,
        port=port,
        version=7,
        on_found=lambda found: say(found=found_fields(found)),
        on_lost=lambda lost: say(lost=lost),
        interfaces=interfaces,
    )

    def changed(addresses: Any) -> None:
        say(addresses=[local.address for local in addresses])
        discovery.set_addresses(addresses)

    async def both() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(discovery.run())
            tasks.create_task(watch_interfaces(interfaces, changed))

    running = asyncio.create_task(both())
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    say(started=True)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([running, stopped], return_when=asyncio.FIRST_COMPLETED)
    began_s = time.monotonic()
    running.cancel()
    stopped.cancel()
    await asyncio.wait([running, stopped])
    say(closed_s=time.monotonic() - began_s)
    left = [str(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    say(tasks_left=left)
    if not running.cancelled():
        await running  # what it raised


def sniff() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(GROUP)
        index = socket.if_nametoindex("eth0")
        sock.setsockopt(
            socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(GROUP[0]) + struct.pack("@ii", 0, index)
        )
        say(started=True)
        while True:
            data, sender = sock.recvfrom(9000)
            message = DNSIncoming(data)
            if message.is_query():
                continue
            records = [[type(record).__name__, record.name, record.ttl] for record in message.answers()]
            say(response=records, sender=sender[0], size_bytes=len(data))


async def find_all(swarm: str, seconds: float) -> None:
    began_s = time.monotonic()
    async for found in find(swarm, seconds):
        say(found=found_fields(found))
    say(took_s=time.monotonic() - began_s)


def garbage(seed: int) -> None:
    rng = random.Random(seed)
    answers = 0x8400
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        here = struct.pack("@iii", 0, 0, socket.if_nametoindex("eth0"))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, here)

        def send(data: bytes) -> None:
            sock.sendto(data, GROUP)

        for number in range(400):
            # Nobody stands behind these.
            name = f"{rng.getrandbits(64):016x}.{SERVICE_TYPE}"
            out = DNSOutgoing(answers)
            out.add_answer_at_time(DNSPointer(SERVICE_TYPE, 12, 1, 4500, name), 0)
            if number % 2:
                server = f"{'x' * 60}.{'y' * 60}.local."
                out.add_answer_at_time(DNSService(name, 33, 0x8001, 120, 0, 0, rng.randrange(65536), server), 0)
                out.add_answer_at_time(DNSText(name, 16, 0x8001, 4500, rng.randbytes(200)), 0)
            packet = out.packets()[0]
            send(packet)
            send(packet[: rng.randrange(len(packet))])
            broken = bytearray(packet)
            for _ in range(3):
                broken[rng.randrange(len(broken))] = rng.randrange(256)
            send(bytes(broken))
            send(rng.randbytes(rng.randrange(1, 1400)))
            time.sleep(0.001)
    say(sent=True)


def hold() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("", GROUP[1]))
        say(started=True)
        signal.pause()


def main() -> None:
    what, *arguments = sys.argv[1:]
    if what == "node":
        asyncio.run(node(**json.loads(arguments[0])))
    elif what == "sniff":
        sniff()
    elif what == "find":
        asyncio.run(find_all(arguments[0], float(arguments[1])))
    elif what == "garbage":
        garbage(int(arguments[0]))
    else:
        hold()


if __name__ == "__main__":
    main()
