"""What is around every packet: a version, which swarm it is of and, with a key, AES-256-GCM.

Bytes (docs/protocol.md, "Gossip")::

    0   2  "SG"
    2   1  version
    3   1  0: plain, 1: sealed
    4   8  SHA-256 of the swarm's name, its beginning
    12  -  the packet
    or
    12  8  salt: random, of the sending process
    20  8  number of the packet, big-endian: with the salt, the nonce
    28  -  the packet, sealed; the 28 bytes before are authenticated with it

Each process seals with a key of its own, HMAC-SHA-256(swarm's key, "swarm-node gossip" ‖ salt), so that counters can
be nonces however long the swarm lives (NIST SP 800-38D, 8.2.1).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gossip.errors import GossipError, NotForUs, UnknownVersion, WrongKey
from gossip.messages import PROTOCOL_VERSION

_MAGIC = b"SG"
_HEADER_BYTES = 12
_SEALED_HEADER_BYTES = 28
_SEAL_BYTES = 16
OVERHEAD_BYTES = _SEALED_HEADER_BYTES + _SEAL_BYTES
# Each process that sends needs a cipher: enough for MEMBERS_MAX nodes that are restarted now and then.
_CIPHERS_MAX = 4096


class Envelope:
    """Seals and opens the packets of one swarm. ``key``: 32 bytes, or None for a swarm without one."""

    def __init__(self, swarm: str, key: bytes | None = None) -> None:
        self._tag = hashlib.sha256(swarm.encode()).digest()[:8]
        self._key = key
        self._header = _MAGIC + bytes([PROTOCOL_VERSION, key is not None]) + self._tag
        self._salt = secrets.token_bytes(8)
        self._count = 0
        self._ciphers: OrderedDict[bytes, AESGCM] = OrderedDict()

    def seal(self, packet: bytes) -> bytes:
        """The datagram for a packet."""
        if self._key is None:
            return self._header + packet
        number = self._count.to_bytes(8, "big")
        self._count += 1
        header = self._header + self._salt + number
        cipher = self._ciphers.get(self._salt) or self._derived(self._salt)
        self._remember(self._salt, cipher)
        return header + cipher.encrypt(b"\0\0\0\0" + number, packet, header)

    def open(self, datagram: bytes) -> bytes:
        """The packet in a datagram. Raises NotForUs, WrongKey, UnknownVersion or GossipError."""
        if len(datagram) < _HEADER_BYTES or datagram[:2] != _MAGIC:
            raise GossipError("not a gossip packet")
        if datagram[4:_HEADER_BYTES] != self._tag:
            raise NotForUs("a packet of a swarm of another name")
        if datagram[2] != PROTOCOL_VERSION:
            raise UnknownVersion(datagram[2])
        if datagram[3] != (self._key is not None):
            raise WrongKey(
                "it has a key, and this node none" if self._key is None else "it has no key, and this node one"
            )
        if self._key is None:
            return datagram[_HEADER_BYTES:]
        if len(datagram) < _SEALED_HEADER_BYTES + _SEAL_BYTES:
            raise GossipError("a truncated packet")
        header, sealed = datagram[:_SEALED_HEADER_BYTES], datagram[_SEALED_HEADER_BYTES:]
        salt = header[12:20]
        cipher = self._ciphers.get(salt) or self._derived(salt)
        try:
            packet = cipher.decrypt(b"\0\0\0\0" + header[20:28], sealed, header)
        except InvalidTag:
            raise WrongKey("it has another key") from None
        self._remember(salt, cipher)  # only now: who has no key must not push the others' ciphers out
        return packet

    def _derived(self, salt: bytes) -> AESGCM:
        assert self._key is not None
        return AESGCM(hmac.digest(self._key, b"swarm-node gossip" + salt, "sha256"))

    def _remember(self, salt: bytes, cipher: AESGCM) -> None:
        self._ciphers[salt] = cipher
        self._ciphers.move_to_end(salt)
        if len(self._ciphers) > _CIPHERS_MAX:
            self._ciphers.popitem(last=False)
