"""Packets that no node sends, for test_agents_discovery.py: run by Python in a machine's namespace.

run_packets.py capture SECONDS FILE        gossip packets that this machine sends and gets, one in hexadecimal a line
run_packets.py flood HOST FILE SEED COUNT  COUNT packets to a node: random ones, and what becomes of captured ones
run_packets.py future HOST SWARM           packets of the next version of the protocol, for a second
"""

from __future__ import annotations

import hashlib
import random
import socket
import sys
import time
from pathlib import Path

PORT = 4100
# A receiver on a busy machine reads as many before its socket's buffer is full.
_AT_ONCE = 50
_PAUSE_S = 0.01
# More than a node keeps addresses of another one.
_PORTS = 40


def capture(seconds: float, file: Path) -> None:
    every_protocol, ip_version_4, udp, udp_header_bytes = 3, 4, 17, 8
    seen: dict[bytes, None] = {}
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(every_protocol)) as sniffer:
        sniffer.settimeout(0.2)
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            try:
                data = sniffer.recv(65536)
            except TimeoutError:
                continue
            header_bytes = (data[0] & 15) * 4 if data and data[0] >> 4 == ip_version_4 else 0
            if not header_bytes or data[9] != udp:
                continue
            to_port = int.from_bytes(data[header_bytes + 2 : header_bytes + 4], "big")
            if to_port == PORT:
                seen[data[header_bytes + udp_header_bytes :]] = None
    file.write_text("\n".join(packet.hex() for packet in seen))


def flood(host: str, file: Path, seed: int, count: int) -> None:
    """Sends packets to a node; without captured ones (an empty file), only what nobody could have sent."""
    rng = random.Random(seed)
    captured = [bytes.fromhex(line) for line in file.read_text().split()]
    # Each of them looks like another node's.
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(_PORTS)]
    for number in range(count):
        sockets[number // _AT_ONCE % _PORTS].sendto(_packet(rng, captured, number), (host, PORT))
        if number % _AT_ONCE == 0:
            time.sleep(_PAUSE_S)


def _packet(rng: random.Random, captured: list[bytes], number: int) -> bytes:
    noise = rng.randbytes(rng.randrange(1401))
    if not captured or number % 4 == 0:
        return noise
    packet = rng.choice(captured)
    if number % 4 == 1:  # what every node sees is of its swarm, and then noise
        return packet[:12] + noise[:1388]
    if number % 4 == 2:
        broken = bytearray(packet)
        for _ in range(rng.randrange(1, 4)):
            # Not the version: a packet of another one is told of, and not of this swarm's.
            place = rng.choice([place for place in range(len(packet)) if place != 2])
            broken[place] ^= 1 << rng.randrange(8)
        return bytes(broken)
    return packet if number % 8 == 3 else packet[: rng.randrange(len(packet))]


def future(host: str, swarm: str) -> None:
    tag = hashlib.sha256(swarm.encode()).digest()[:8]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _ in range(10):
            sock.sendto(b"SG" + bytes([2, 0]) + tag + b"what version 2 has to say", (host, PORT))
            time.sleep(0.1)


def main() -> None:
    what, *arguments = sys.argv[1:]
    if what == "capture":
        capture(float(arguments[0]), Path(arguments[1]))
    elif what == "flood":
        flood(arguments[0], Path(arguments[1]), int(arguments[2]), int(arguments[3]))
    else:
        future(*arguments)


if __name__ == "__main__":
    main()
