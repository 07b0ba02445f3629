"""Who may talk to a node: swarm keys, proofs of them, private addresses, Host and Origin."""

import hashlib
import ipaddress
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.access import api_key_matches, host_allowed, is_json, is_private, origin_allowed, origin_listed
from node.errors import NotAuthenticated, SwarmKeyError
from node.swarm_key import (
    EMPTY_SHA256,
    STREAMED,
    Accepted,
    Challenges,
    Proof,
    SwarmKey,
    hkdf_sha256,
    is_stale,
    nonce_of,
    prove,
)
from rigs import ROOT

KEY = SwarmKey(bytes(range(32)))
CALL = KEY.derive("call")
REQUEST: dict[str, Any] = {"method": "POST", "target": "/v1/ffn?x=1", "host": "10.0.0.2:4101"}
BODY = hashlib.sha256(b"body").hexdigest()
SECRETS = st.binary(min_size=32, max_size=32)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# Keys


@given(SECRETS)
def test_a_key_survives_being_copied(secret: bytes) -> None:
    key = SwarmKey(secret)
    text = key.text()
    assert re.fullmatch(r"swarm1(-[a-z2-7]{7}){8}", text)
    for spelled in (text, text.upper(), f"  {text}\n", "swarm1-" + text[7:].replace("-", ""), text.replace("-", "- ")):
        assert SwarmKey.parse(spelled) == key
    assert secret.hex() not in repr(key) and text not in repr(key)


@given(SECRETS, st.data())
def test_a_mistyped_key_is_noticed(secret: bytes, data: st.DataObject) -> None:
    text = SwarmKey(secret).text()
    place = data.draw(st.integers(7, len(text) - 1).filter(lambda at: text[at] != "-"))
    letter = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz234567").filter(lambda one: one != text[place]))
    with pytest.raises(SwarmKeyError, match="mistyped"):
        SwarmKey.parse(text[:place] + letter + text[place + 1 :])


def test_swapped_letters_are_noticed() -> None:
    text = KEY.text()
    for at in range(7, len(text) - 1):
        swapped = text[:at] + text[at + 1] + text[at] + text[at + 2 :]
        if swapped.replace("-", "") != text.replace("-", ""):
            with pytest.raises(SwarmKeyError):
                SwarmKey.parse(swapped)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "begins with swarm1-"),
        ("hunter2", "begins with swarm1-"),
        (KEY.text()[7:], "begins with swarm1-"),
        ("swarm1-", "no whole swarm key: 0 characters after swarm1-, and a key has 56"),
        (KEY.text()[:-1], "no whole swarm key: 55 characters"),
        (KEY.text() + "a", "no whole swarm key: 57 characters"),
        (KEY.text()[:-1] + "1", "'1' does not occur in one"),
        (KEY.text()[:-1] + "ä", "'ä' does not occur in one"),
        (KEY.text().replace("swarm1", "swarm2"), "begins with swarm1-"),
    ],
)
def test_what_is_no_key(text: str, message: str) -> None:
    with pytest.raises(SwarmKeyError) as caught:
        SwarmKey.parse(text)
    assert message in str(caught.value)
    assert not text[7:] or text[7:] not in str(caught.value)


@given(st.text())
def test_any_text_is_a_key_or_an_error(text: str) -> None:
    for one in (text, "swarm1-" + text):
        with pytest.raises(SwarmKeyError):
            SwarmKey.parse(one)


def test_new_keys_differ() -> None:
    keys = {SwarmKey.generate().secret for _ in range(50)}
    assert len(keys) == 50 and {len(key) for key in keys} == {32}


@pytest.mark.parametrize(
    ("ikm", "salt", "info", "length", "okm"),
    [  # RFC 5869, A.1 to A.3
        ("0b" * 22, "000102030405060708090a0b0c", "f0f1f2f3f4f5f6f7f8f9", 42,
         "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"),
        (bytes(range(0x50)).hex(), bytes(range(0x60, 0xB0)).hex(), bytes(range(0xB0, 0x100)).hex(), 82,
         "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c"
         "59045a99cac7827271cb41c65e590e09da3275600c2f09b8"
         "367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87"),
        ("0b" * 22, "", "", 42, "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"),
    ],
)  # fmt: skip
def test_hkdf(ikm: str, salt: str, info: str, length: int, okm: str) -> None:
    made = hkdf_sha256(bytes.fromhex(ikm), bytes.fromhex(salt), bytes.fromhex(info), length)
    assert made.hex() == okm


def test_purposes_have_keys_of_their_own() -> None:
    assert len({KEY.derive("call"), KEY.derive("control"), KEY.secret}) == 3


# Proofs

# Computed with hmac and hashlib alone, from the description in docs/security.md.
GOLDEN = {
    "key": "swarm1-aaaqeay-eaudaoc-ajbifqy-diob4ib-ceqtcqk-rmfyyde-nbwha5d-yp3g4rp",
    "call key": "5b60372e0536788936215756b0e6ec5a2bfa7733941ffb281d7251c2b21b3d7c",
    "mac": "5fc1cc04dbac590c5b5685f023c20bb51d651044950a4a21d55781d0074d06de",
    "reply mac": "c11a4e27780ab18a5b6ea55e8a7ae1115b1917ad349a74132ddb93da88d67ab1",
}


def test_golden_bytes() -> None:
    """docs/security.md has these: another implementation of the client must make the same."""
    document = (ROOT / "docs/security.md").read_text()
    assert all(f"`{value}`" in document for value in GOLDEN.values())
    assert CALL.hex() == GOLDEN["call key"]
    proof = prove(
        CALL, method="POST", target="/v1/ffn", host="10.0.0.2:4101", nonce="n" * 48, cnonce="c" * 24, body_sha256=BODY
    )
    assert proof.header == f'Swarm nonce="{"n" * 48}", cnonce="{"c" * 24}", body="{BODY}", mac="{GOLDEN["mac"]}"'
    assert KEY.text() == GOLDEN["key"]
    proof.check_reply(f'mac="{GOLDEN["reply mac"]}"', 200, EMPTY_SHA256)


def exchange(challenges: Challenges, now_s: float = 1.0, **changes: Any) -> tuple[Proof, Accepted]:
    nonce = nonce_of(challenges.challenge(now_s))
    assert nonce is not None
    proof = prove(CALL, **REQUEST, nonce=nonce, body_sha256=BODY)
    return proof, challenges.check(proof.header, **{**REQUEST, **changes}, now_s=now_s)


def refusal(challenges: Challenges, header: str | None, now_s: float = 1.0, **changes: Any) -> NotAuthenticated:
    with pytest.raises(NotAuthenticated) as caught:
        challenges.check(header, **{**REQUEST, **changes}, now_s=now_s)
    return caught.value


def test_both_sides_prove_the_key() -> None:
    proof, accepted = exchange(Challenges(CALL))
    accepted.check_body(BODY)
    with pytest.raises(NotAuthenticated, match="body"):
        accepted.check_body(sha256(b"another"))
    header = accepted.reply_header(200, sha256(b"reply"))
    proof.check_reply(header, 200, sha256(b"reply"))
    for status, body in ((500, sha256(b"reply")), (200, sha256(b"other")), (200, STREAMED)):
        with pytest.raises(NotAuthenticated):
            proof.check_reply(header, status, body)
    for wrong in (None, "", "mac=x", header + " ", header.upper(), proof.header):
        with pytest.raises(NotAuthenticated, match="does not prove"):
            proof.check_reply(wrong, 200, sha256(b"reply"))
    proof.check_reply(accepted.reply_header(200, STREAMED), 200, STREAMED)


def test_a_replay_is_refused() -> None:
    challenges = Challenges(CALL)
    proof, _ = exchange(challenges)
    error = refusal(challenges, proof.header)
    assert "used before" in str(error) and error.fresh_nonce_helps
    assert is_stale(challenges.challenge(1.0, error)) and not is_stale(challenges.challenge(1.0))
    # By another server too: a proof is for the one that gave the nonce.
    assert "not of this node" in str(refusal(Challenges(CALL), proof.header))


@pytest.mark.parametrize(
    "changes",
    [{"method": "GET"}, {"target": "/v1/ffn"}, {"target": "/v1/ffn?x=1\n"}, {"host": "10.0.0.3:4101"}, {"host": ""}],
)
def test_a_proof_is_for_one_request(changes: dict[str, Any]) -> None:
    challenges = Challenges(CALL)
    nonce = challenges.issue(1.0)
    proof = prove(CALL, **REQUEST, nonce=nonce, body_sha256=BODY)
    error = refusal(challenges, proof.header, **changes)
    assert not error.fresh_nonce_helps
    # A forged request does not use up the nonce of a true one.
    challenges.check(proof.header, **REQUEST, now_s=1.0)


def test_parts_cannot_move_into_each_other() -> None:
    with pytest.raises(NotAuthenticated, match="line feed"):
        prove(CALL, method="POST", target="/a\nb", host="h", nonce="n" * 48)


def test_host_is_compared_without_case() -> None:
    challenges = Challenges(CALL)
    proof = prove(CALL, method="GET", target="/", host="Alpha.LAN:4100", nonce=challenges.issue(1.0))
    challenges.check(proof.header, method="GET", target="/", host="alpha.lan:4100", now_s=1.0)


@pytest.mark.parametrize("key", [KEY.derive("control"), SwarmKey(bytes(32)).derive("call"), bytes(32), b""])
def test_another_key_is_refused_on_both_sides(key: bytes) -> None:
    challenges = Challenges(CALL)
    proof = prove(key, **REQUEST, nonce=challenges.issue(1.0))
    error = refusal(challenges, proof.header)
    assert "another swarm key" in str(error) and not error.fresh_nonce_helps
    others = Challenges(key, nonce_key=b"n")
    wanted = prove(CALL, **REQUEST, nonce=others.issue(1.0))
    answer = Accepted(EMPTY_SHA256, key, "0" * 64).reply_header(200, EMPTY_SHA256)
    with pytest.raises(NotAuthenticated):
        wanted.check_reply(answer, 200, EMPTY_SHA256)


def test_an_old_reply_proves_nothing() -> None:
    """A server without the key that gives out an old nonce again, to use the old reply."""
    challenges = Challenges(CALL)
    old, accepted = exchange(challenges)
    nonce = re.findall(r'nonce="([^"]*)"', old.header)[0]
    again = prove(CALL, **REQUEST, nonce=nonce, body_sha256=BODY)
    with pytest.raises(NotAuthenticated):
        again.check_reply(accepted.reply_header(200, EMPTY_SHA256), 200, EMPTY_SHA256)


def test_a_nonce_has_its_time() -> None:
    challenges = Challenges(CALL, max_age_s=30)
    proof = prove(CALL, **REQUEST, nonce=challenges.issue(100.0))
    for now_s in (99.0, 130.1, 1e9):
        assert refusal(challenges, proof.header, now_s).fresh_nonce_helps
    challenges.check(proof.header, **REQUEST, now_s=130.0)


@given(
    st.one_of(
        st.text(max_size=200), st.text(max_size=99).map(lambda text: f'Swarm nonce="{text}"'), st.binary().map(repr)
    )
)
def test_any_header_is_answered(text: str) -> None:
    challenges = Challenges(CALL)
    refusal(challenges, text)
    nonce_of(text)
    is_stale(text)


def test_a_missing_and_a_huge_header() -> None:
    challenges = Challenges(CALL)
    assert refusal(challenges, None).fresh_nonce_helps
    assert not refusal(challenges, "Swarm " + "x" * 10_000_000).fresh_nonce_helps
    assert nonce_of(None) is None and nonce_of('Basic realm="x"') is None and nonce_of('Swarm nonce="a b"') is None
    assert nonce_of("Swarm " + "x" * 10_000_000) is None


@given(st.integers(0, 47), st.sampled_from("abcXYZ019-_"))
def test_a_changed_nonce_is_not_ours(place: int, letter: str) -> None:
    challenges = Challenges(CALL)
    nonce = challenges.issue(1.0)
    changed = nonce[:place] + letter + nonce[place + 1 :]
    if changed != nonce:
        assert "not of this node" in str(refusal(challenges, prove(CALL, **REQUEST, nonce=changed).header))


def test_memory_is_bounded_and_replays_stay_refused() -> None:
    challenges = Challenges(CALL, max_used=8, max_age_s=1000)
    early = challenges.issue(1.0)
    proofs = [exchange(challenges, now_s=2.0 + number)[0] for number in range(40)]
    assert len(challenges._used) == 8
    for proof in proofs:
        refusal(challenges, proof.header, 50.0)
    # What makes that possible: nonces from before the forgotten ones are not taken any more.
    assert refusal(challenges, prove(CALL, **REQUEST, nonce=early).header, 50.0).fresh_nonce_helps
    exchange(challenges, now_s=51.0)
    exchange(challenges, now_s=5000.0)
    assert len(challenges._used) == 1


def test_asking_for_nonces_does_not_push_out_those_of_others() -> None:
    challenges = Challenges(CALL, max_used=8)
    nonce = challenges.issue(1.0)
    for _ in range(10_000):
        challenges.issue(1.0)
    challenges.check(prove(CALL, **REQUEST, nonce=nonce).header, **REQUEST, now_s=2.0)


# Each step: when a nonce is issued (offset into the past) and used again how often.
@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 3)), max_size=40), st.integers(1, 6))
def test_no_nonce_is_taken_twice(steps: list[tuple[float, int]], max_used: int) -> None:
    challenges = Challenges(CALL, max_used=max_used, max_age_s=10)
    headers: list[str] = []
    taken: list[str] = []
    now_s = 100.0
    for age, uses in steps:
        headers.append(prove(CALL, **REQUEST, nonce=challenges.issue(now_s - age)).header)
        for header in headers[-uses:] * 2:
            try:
                challenges.check(header, **REQUEST, now_s=now_s)
            except NotAuthenticated:
                continue
            taken.append(header)
        now_s += age / 4
    assert len(taken) == len(set(taken))
    assert len(challenges._used) <= max_used


# Addresses


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.255.0.9", "10.0.0.0", "10.255.255.255", "172.16.0.1", "172.31.255.255", "192.168.3.4",
     "169.254.1.1",
     "100.64.0.0", "100.127.255.255", "::1", "fe80::1", "fe80::1%eth0", "febf::1", "fc00::1", "fdff::1",
     "::ffff:10.1.2.3",
     "::ffff:127.0.0.1"],
)  # fmt: skip
def test_private(address: str) -> None:
    assert is_private(address) and is_private(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "9.255.255.255", "11.0.0.0", "172.15.255.255", "172.32.0.0", "192.167.255.255", "192.169.0.0",
     "100.63.255.255",
     "100.128.0.0", "169.253.0.0", "0.0.0.0", "255.255.255.255", "224.0.0.1", "192.0.2.1", "::", "::2",
     "2001:db8::1", "fec0::1",
     "fe00::1", "fbff::1", "fe7f::", "ff02::1", "::ffff:8.8.8.8", "64:ff9b::a00:1", "2002:a00:1::", "::10.0.0.1"],
)  # fmt: skip
def test_not_private(address: str) -> None:
    assert not is_private(address) and not is_private(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "text", ["", "localhost", "10.0.0", "10.0.0.1:80", "10.0.0.01", "0x7f.0.0.1", "2130706433", "1.2.3.4.5"]
)
def test_no_address_is_not_private(text: str) -> None:
    assert not is_private(text)


@given(st.ip_addresses(v=4))
def test_mapped_addresses_count_as_themselves(address: ipaddress.IPv4Address) -> None:
    assert is_private(f"::ffff:{address}") == is_private(address)
    # Python's own list is wider, ours is nowhere wider but for carriers' networks.
    assert not is_private(address) or address.is_private or address in ipaddress.ip_network("100.64.0.0/10")


# Host and Origin

OWN: dict[str, Any] = {
    "own_names": ["alpha", "alpha.local"],
    "own_addresses": ["192.168.1.5", "fe80::5%eth0", "2001:db8::5"],
    "allowed_hosts": ["chat.example", "proxy.example:8443", "10.9.9.9", "[fd00::9]:80", "fd00::8"],
}


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:4100", "LocalHost.:4100", "127.0.0.1:4100", "127.8.8.8", "[::1]:4100",
     "[::ffff:127.0.0.1]", "alpha:1",
     "ALPHA.local", "alpha.local.:4100", "192.168.1.5:4100", "[fe80::5]:4100", "[fe80::5%eth0]", "[2001:DB8:0::5]",
     "chat.example",
     "chat.example:99", "proxy.example:8443", "10.9.9.9:1", "[fd00::9]:80", "[fd00::8]:7", "[::ffff:192.168.1.5]:4100"],
)  # fmt: skip
def test_own_hosts(host: str) -> None:
    assert host_allowed(host, **OWN)


@pytest.mark.parametrize(
    "host",
    [None, "", "evil.example", "evil.example:4100", "alpha.evil.example", "evilalpha", "localhost.evil.example",
     "127.0.0.1.evil.example",
     "192.168.1.6", "proxy.example", "proxy.example:80", "[fd00::9]", "[fd00::9]:81", "alpha:", "alpha:x",
     "alpha:4100:1", "alpha alpha",
     "alpha,evil", "user@alpha", "alpha/", "[::1", "::1", "[alpha]", "[evil.example]", "http://alpha", "0.0.0.0",
     "[::]",
     "alpha\n", "alpha:４１００", "2130706433", "0x7f.0.0.1", "127.1", "alpha.local..", "localhost:999999"],
)  # fmt: skip
def test_other_hosts(host: str | None) -> None:
    assert not host_allowed(host, **OWN)


@given(st.text(max_size=40))
def test_any_host_is_answered(host: str) -> None:
    assert not host_allowed(host) or re.match(r"(?i)localhost|127\.|\[", host)


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        (None, "alpha:4100"), (None, None), ("http://alpha:4100", "alpha:4100"), ("http://ALPHA:4100", "alpha.:4100"),
        ("http://alpha", "alpha"), ("http://alpha", "alpha:80"), ("http://alpha:80", "alpha"),
         ("https://chat.example", "chat.example"),
        ("https://chat.example", "chat.example:443"), ("http://[::1]:4100", "[::1]:4100"), ("http://[0::1]:4100",
         "[::1]:4100"),
        ("https://ui.example", "alpha:4100"), ("https://ui.example:443", "alpha:4100"), ("http://ui.example:3000",
         "alpha:4100"),
    ],
)  # fmt: skip
def test_own_and_allowed_origins(origin: str | None, host: str | None) -> None:
    assert origin_allowed(origin, host=host, allowed_origins=["https://ui.example", "http://ui.example:3000"])


@pytest.mark.parametrize(
    "origin",
    ["", "null", "*", "http://evil.example", "http://alpha:4101", "http://alpha", "https://alpha:80",
     "http://alpha:4100/",
     "http://alpha:4100.evil.example", "http://evil.example@alpha:4100", "http://alpha:4100 http://alpha:4100",
     "file://", "ftp://alpha:4100",
     "chrome-extension://alpha:4100", "http://ui.example", "https://ui.example:3000", "https://ui.example.evil.example",
     "https://ui.example\n", "http://", "alpha:4100", "http://alpha:4100#", "http://alpha:4100\\@evil.example",
     "http://localhost:4100"],
)  # fmt: skip
def test_other_origins(origin: str) -> None:
    assert not origin_allowed(
        origin, host="alpha:4100", allowed_origins=["https://ui.example", "http://ui.example:3000"]
    )


def test_only_listed_origins_may_read() -> None:
    """The node's own pages may ask, and need nobody's leave to read."""
    listed = ["https://ui.example", "http://ui.example:3000"]
    for origin in ("https://ui.example", "https://ui.example:443", "HTTP://UI.example:3000"):
        assert origin_listed(origin, listed)
    for origin in (
        "http://alpha:4100",
        "http://ui.example",
        "https://ui.example/",
        "null",
        "*",
        "",
        "https://ui.example.evil.example",
    ):
        assert not origin_listed(origin, listed)
    assert not origin_listed("https://ui.example", [])


@given(st.text(max_size=40), st.one_of(st.none(), st.text(max_size=40)))
def test_any_origin_is_answered(origin: str, host: str | None) -> None:
    assert not origin_allowed(origin, host=host) or origin.lower().startswith("http")


@pytest.mark.parametrize("origin", ["http://evil.example", "http://evil.example:4100"])
def test_dns_rebinding(origin: str) -> None:
    """The page's own name points at this node: same origin, by the browser's rule, and so it is the Host that must
    fail."""
    host = origin.removeprefix("http://")
    assert origin_allowed(origin, host=host) and not host_allowed(host, **OWN)


def test_content_types() -> None:
    for good in ("application/json", "Application/JSON; charset=utf-8", " application/json ;x=y"):
        assert is_json(good)
    for bad in (None, "", "text/plain", "application/jsonp", "text/plain;application/json",
    "application/x-www-form-urlencoded",
                "multipart/form-data; boundary=application/json", "application/json, text/plain",
                "text/json"):  # fmt: skip
        assert not is_json(bad)


def test_api_keys() -> None:
    def matches(authorization: str | None = None, x_api_key: str | None = None, key: str = "sk-12345678") -> bool:
        return api_key_matches(key, authorization=authorization, x_api_key=x_api_key)

    assert matches("Bearer sk-12345678") and matches("bearer  sk-12345678 ") and matches(None, "sk-12345678")
    assert matches("Bearer wrong", "sk-12345678")
    for authorization in (
        "",
        "Bearer",
        "Bearer ",
        "sk-12345678",
        "Basic sk-12345678",
        "Bearer sk-1234567",
        "Bearer sk-123456789",
        "Bearer ü",
    ):
        assert not matches(authorization)
    assert not matches() and not matches(None, "") and not matches(None, "\udcff")
    assert matches(key="") and matches("Bearer anything", key="")
