"""Swarm keys, and how nodes prove to each other that they have one. Without I/O or a clock.

The key is never sent. docs/security.md says, to the byte, what is computed, and what it protects against.

    client                                        server
    request                                 ->
                                            <-    401, WWW-Authenticate: Swarm nonce="…"
    request, Authorization: Swarm nonce=…,
        cnonce=…, body=…, mac=…             ->
                                            <-    reply, Authentication-Info: mac="…"

A nonce is good for one request. A server may send the next one with any reply, in the same header.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field
from typing import Final, Literal

from node.errors import NotAuthenticated, SwarmKeyError

Purpose = Literal["call", "control", "gossip"]

EMPTY_SHA256: Final = hashlib.sha256().hexdigest()
# Stands in a reply's proof for a body that is streamed, whose hash nobody knows when the headers go out.
STREAMED: Final = "-"

_KEY_PREFIX: Final = "swarm1"
_KEY_CHARS: Final = 56  # 32 bytes of key and 3 of checksum, in base32
_SECRET_BYTES: Final = 32
_HEADER_CHARS_MAX: Final = 1024


# Keys


def hkdf_sha256(key: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    """HKDF of RFC 5869 with SHA-256; `length` up to 8,160 bytes."""
    pseudo_random_key = hmac.digest(salt, key, "sha256")
    block = output = b""
    for counter in range(1, -(-length // 32) + 1):
        block = hmac.digest(pseudo_random_key, block + info + bytes([counter]), "sha256")
        output += block
    return output[:length]


@dataclass(frozen=True)
class SwarmKey:
    """The secret that the nodes of a swarm share: 32 bytes."""

    secret: bytes = field(repr=False)

    @staticmethod
    def generate() -> SwarmKey:
        """A new key from the system's random source."""
        return SwarmKey(secrets.token_bytes(_SECRET_BYTES))

    @staticmethod
    def parse(text: str) -> SwarmKey:
        """The key that `text` spells; case, spaces and hyphens do not matter. Raises SwarmKeyError."""
        prefix, _, rest = text.strip().lower().partition("-")
        letters = re.sub(r"[\s-]", "", rest)
        if prefix != _KEY_PREFIX:
            raise SwarmKeyError(f'must be a key made by "swarm-node keygen", which begins with {_KEY_PREFIX}-')
        wrong = re.search(r"[^a-z2-7]", letters)
        if wrong:
            raise SwarmKeyError(f"is no swarm key: {wrong[0]!r} does not occur in one (they have a to z and 2 to 7)")
        if len(letters) != _KEY_CHARS:
            raise SwarmKeyError(
                f"is no whole swarm key: {len(letters)} characters after {_KEY_PREFIX}-, and a key has {_KEY_CHARS}"
            )
        data = base64.b32decode(letters.upper())
        if not hmac.compare_digest(_checksum(data[:_SECRET_BYTES]), data[_SECRET_BYTES:]):
            raise SwarmKeyError("is no swarm key: its checksum is wrong, so a character was mistyped or swapped")
        return SwarmKey(data[:_SECRET_BYTES])

    def text(self) -> str:
        """The key as people copy it: swarm1- and eight groups of seven characters."""
        letters = base64.b32encode(self.secret + _checksum(self.secret)).decode().lower()
        return "-".join([_KEY_PREFIX, *(letters[i : i + 7] for i in range(0, _KEY_CHARS, 7))])

    def derive(self, purpose: Purpose) -> bytes:
        """The 32-byte key for one purpose: what is proved for one proves nothing for another."""
        return hkdf_sha256(self.secret, b"swarm-node 1", purpose.encode(), 32)


def _checksum(secret: bytes) -> bytes:
    return hashlib.sha256(b"swarm-node key checksum" + secret).digest()[:3]


# Proofs: the client's side


@dataclass(frozen=True)
class Proof:
    """What a client sends to prove its key, and compares the server's answer with. Made by `prove`."""

    header: str
    _key: bytes = field(repr=False)
    _mac: str

    def check_reply(self, header: str | None, status: int, body_sha256: str) -> None:
        """Checks a reply's Authentication-Info, which proves that the server has the key and meant this reply.

        `body_sha256` is that of the reply's body, or STREAMED where the client does not ask for more. Raises
        NotAuthenticated.
        """
        found = re.fullmatch(r'mac="([0-9a-f]{64})"', header or "")
        if not found or not hmac.compare_digest(found[1], _reply_mac(self._key, self._mac, status, body_sha256)):
            raise NotAuthenticated("the other side does not prove the swarm key: it has none, or another")


def nonce_of(challenge: str | None) -> str | None:
    """The nonce in a WWW-Authenticate header; None when there is none of ours."""
    found = re.match(r'Swarm nonce="([A-Za-z0-9_-]{1,128})"', (challenge or "")[:_HEADER_CHARS_MAX])
    return found[1] if found else None


def is_stale(challenge: str | None) -> bool:
    """Whether a WWW-Authenticate header says that only the nonce was at fault, and not the key."""
    return bool(re.search(r"[, ]stale=true\b", (challenge or "")[:_HEADER_CHARS_MAX]))


def prove(
    key: bytes, *, method: str, target: str, host: str, nonce: str, body_sha256: str = EMPTY_SHA256, cnonce: str = ""
) -> Proof:
    """The proof of a derived `key` for one request.

    `target` and `host` are what the request line and the Host header carry; `cnonce`: 16 to 64 characters that were
    never used before, made here when left out.
    """
    cnonce = cnonce or secrets.token_urlsafe(18)
    mac = _request_mac(key, method, target, host, nonce, cnonce, body_sha256)
    return Proof(f'Swarm nonce="{nonce}", cnonce="{cnonce}", body="{body_sha256}", mac="{mac}"', key, mac)


# Proofs: the server's side


@dataclass(frozen=True)
class Accepted:
    """A request that proved the key, before its body was read."""

    body_sha256: str
    _key: bytes = field(repr=False)
    _mac: str

    def check_body(self, sha256: str) -> None:
        """Compares the body's hash with the proven one. Raises NotAuthenticated."""
        if not hmac.compare_digest(sha256, self.body_sha256):
            raise NotAuthenticated("the body of the request is not the one that was proved")

    def reply_header(self, status: int, body_sha256: str) -> str:
        """The value of Authentication-Info for the reply; `body_sha256` as in `Proof.check_reply`."""
        return f'mac="{_reply_mac(self._key, self._mac, status, body_sha256)}"'


class Challenges:
    """Issues nonces for one derived key and checks proofs, each nonce once.

    A nonce carries its time and a MAC of its own, so that issuing one keeps nothing: whoever asks for many cannot push
    out those of others. Only used ones are kept, at most `max_used`; when more come within `max_age_s`, the nonces
    issued before the oldest kept one lose their validity early. Times are monotonic, in seconds.
    """

    def __init__(
        self, key: bytes, *, max_age_s: float = 30.0, max_used: int = 65536, nonce_key: bytes | None = None
    ) -> None:
        self._key = key
        self._nonce_key = nonce_key or secrets.token_bytes(32)
        self._max_age_ms = round(max_age_s * 1000)
        self._max_used = max_used
        # In the order of use: nonce and when it was issued. A nonce issued at or before the floor is refused.
        self._used: dict[str, int] = {}
        self._floor_ms = -1

    def issue(self, now_s: float) -> str:
        """A new nonce."""
        return self._sign(int(now_s * 1000).to_bytes(8, "big") + secrets.token_bytes(12))

    def challenge(self, now_s: float, refused: NotAuthenticated | None = None) -> str:
        """The value of WWW-Authenticate, with a new nonce; `refused`: why the last one did not do."""
        stale = refused is not None and refused.fresh_nonce_helps
        return f'Swarm nonce="{self.issue(now_s)}"' + (", stale=true" if stale else "")

    def check(self, header: str | None, *, method: str, target: str, host: str, now_s: float) -> Accepted:
        """Checks a request's Authorization header and uses up its nonce.

        `target` and `host` are what the request line and the Host header carry, unchanged. The Host must have been
        found to be this node's (`access.host_allowed`): that keeps a proof made for another node from being passed
        on. Raises NotAuthenticated; the nonce is not used up then.
        """
        if not header:
            raise NotAuthenticated("a proof of the swarm key is needed", fresh_nonce_helps=True)
        found = _AUTHORIZATION.fullmatch(header) if len(header) <= _HEADER_CHARS_MAX else None
        if not found:
            raise NotAuthenticated("the Authorization header is not of the form that docs/security.md describes")
        nonce, cnonce, body_sha256, mac = found.groups()
        issued_ms = self._issued_ms(nonce)
        now_ms = int(now_s * 1000)
        self._forget(now_ms)
        if issued_ms is None or not now_ms - self._max_age_ms <= issued_ms <= now_ms or issued_ms <= self._floor_ms:
            raise NotAuthenticated("the nonce is too old or not of this node", fresh_nonce_helps=True)
        if nonce in self._used:
            raise NotAuthenticated("the nonce was used before", fresh_nonce_helps=True)
        if not hmac.compare_digest(mac, _request_mac(self._key, method, target, host, nonce, cnonce, body_sha256)):
            raise NotAuthenticated("the proof is wrong: the other side has another swarm key")
        self._used[nonce] = issued_ms
        if len(self._used) > self._max_used:
            self._floor_ms = max(self._floor_ms, self._used.pop(next(iter(self._used))))
        return Accepted(body_sha256, self._key, mac)

    def _forget(self, now_ms: int) -> None:
        # In the order of use, not of issue: one that blocks older ones is itself gone within twice the age.
        while self._used and now_ms - (oldest := next(iter(self._used.items())))[1] > self._max_age_ms:
            del self._used[oldest[0]]

    def _sign(self, data: bytes) -> str:
        return _base64url(data + hmac.digest(self._nonce_key, data, "sha256")[:16])

    def _issued_ms(self, nonce: str) -> int | None:
        data = base64.urlsafe_b64decode(nonce)
        genuine = hmac.compare_digest(nonce, self._sign(data[:20]))
        return int.from_bytes(data[:8], "big") if genuine else None


_AUTHORIZATION: Final = re.compile(
    r'Swarm nonce="([A-Za-z0-9_-]{48})", cnonce="([A-Za-z0-9_-]{16,64})", body="([0-9a-f]{64})", mac="([0-9a-f]{64})"'
)


def _request_mac(key: bytes, method: str, target: str, host: str, nonce: str, cnonce: str, body_sha256: str) -> str:
    parts = ("swarm request 1", method, target, host.lower(), nonce, cnonce, body_sha256)
    if any("\n" in part for part in parts):
        # HTTP has none in these places; a target that was percent-decoded before could.
        raise NotAuthenticated("a line feed in the request's method, target or host")
    return hmac.digest(key, "\n".join(parts).encode("utf-8", "surrogateescape"), "sha256").hex()


def _reply_mac(key: bytes, request_mac: str, status: int, body_sha256: str) -> str:
    return hmac.digest(key, f"swarm reply 1\n{request_mac}\n{status}\n{body_sha256}".encode(), "sha256").hex()


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
