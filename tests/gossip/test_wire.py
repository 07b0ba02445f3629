"""Gossip's bytes: golden ones for every message and envelope, and that nothing else changes anything but a counter."""

import hashlib
import hmac
import random
import re

import msgpack
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from gossip import envelope as envelope_module
from gossip.address import Address
from gossip.envelope import OVERHEAD_BYTES, Envelope
from gossip.errors import GossipError, NotForUs, UnknownVersion, WrongKey
from gossip.limits import ADDRESSES_MAX, COUNTER_MAX, MEMBERS_MAX, PACKET_BYTES_MAX, RECORD_BYTES_MAX
from gossip.messages import (
    ACCUSERS_MAX,
    PROTOCOL_VERSION,
    REPLY_BYTES_MAX,
    REQUEST_BYTES_MAX,
    UPDATES_MAX,
    Kind,
    Packet,
    PingReply,
    PingRequest,
    PullReply,
    PullRequest,
    Record,
    SyncReply,
    SyncRequest,
    Update,
    decode_packet,
    decode_record,
    decode_reply,
    decode_request,
    encode,
)
from gossip.simulate.run import Options, Run
from gossip.simulate.simulation import Node
from gossip.state import NodeId, Status
from gossip.swim.core import Gossip
from gossip.swim.events import Received
from rigs import ROOT
from rigs.gossip_core import ALICE, BOB, CAROL, SELF, Core, address, state_of

A, B, C = (bytes(range(first, first + 8)) for first in (0x01, 0x11, 0x21))
HASH = bytes(range(0xF0, 0x100))
KEY = bytes(range(32))
ALIVE, SUSPECT, DEAD, LEFT = (int(status) for status in Status)

PING = Packet(int(Kind.PING), A, 1048577, 1050000, 7, B)
ACK = Packet(int(Kind.ACK), B, 2097152, 2097200, 7, B, None, (Update(A, 1048577, SUSPECT, 1050000, (B, C)),))
RECORD = Record(A, 1050000, ("192.168.1.10", "fe80::10"), 4100, b"{}")
DIGEST = (Update(A, 1048577, ALIVE, 1050000), Update(C, 1048576, DEAD, 1048600))
#: The golden bytes of docs/protocol.md, in its order.
GOLDEN: dict[str, tuple[object, object]] = {
    "Ping": (PING, decode_packet),
    "Acknowledgement": (ACK, decode_packet),
    "Ping request": (Packet(int(Kind.PING_REQUEST), A, 1048577, 1050000, 7, B, ("192.168.1.11", 4100)), decode_packet),
    "No answer": (Packet(int(Kind.NACK), C, 1048576, 1048600, 7, B), decode_packet),
    "News": (
        Packet(int(Kind.NEWS), A, 1048577, 1050000, 0, None, None, (*DIGEST, Update(B, 2097152, LEFT, 2097200))),
        decode_packet,
    ),
    "Record": (RECORD, decode_record),
    "Ping over TCP": (PingRequest(PING), decode_request),
    "Its reply": (PingReply(ACK), decode_reply),
    "Comparison": (SyncRequest(A, 1048577, 1050000, HASH), decode_request),
    "Comparison with a digest": (SyncRequest(A, 1048577, 1050000, HASH, DIGEST), decode_request),
    "Reply to a comparison": (SyncReply(B, 2097152, 2097200, HASH, DIGEST), decode_reply),
    "Request for a record": (PullRequest(A, 1050000), decode_request),
    "Reply with it": (PullReply(RECORD), decode_reply),
    "Reply without it": (PullReply(None), decode_reply),
}


def documented() -> dict[str, bytes]:
    """The bytes in docs/protocol.md, by what they are."""
    text = (ROOT / "docs" / "protocol.md").read_text()
    section = text.split("### Bytes of gossip", 1)[1].split("\n## ", 1)[0]
    blocks = re.findall(r"^([A-Z][^\n]*?)(?: \([^\n]*)?:\n\n((?:^ {4}[0-9a-f]+$\n?)+)", section, re.MULTILINE)
    return {name: bytes.fromhex(block) for name, block in blocks}


def plain() -> Envelope:
    return Envelope("golden")


def sealed(monkeypatch: pytest.MonkeyPatch) -> Envelope:
    monkeypatch.setattr(envelope_module.secrets, "token_bytes", lambda size: bytes(range(0xA0, 0xA0 + size)))
    return Envelope("golden", KEY)


# --- golden bytes


@pytest.mark.parametrize("name", GOLDEN)
def test_messages_have_the_golden_bytes(name: str) -> None:
    message, decode = GOLDEN[name]
    assert encode(message).hex() == documented()[name].hex()  # type: ignore[arg-type]
    assert decode(documented()[name]) == message  # type: ignore[operator]


def test_envelopes_have_the_golden_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    golden, envelope = documented(), sealed(monkeypatch)
    assert plain().seal(encode(PING)).hex() == golden["Ping in a plain envelope"].hex()
    assert envelope.seal(encode(PING)).hex() == golden["Ping in a sealed envelope"].hex()
    assert plain().open(golden["Ping in a plain envelope"]) == encode(PING)
    assert Envelope("golden", KEY).open(golden["Ping in a sealed envelope"]) == encode(PING)
    assert golden.keys() == {*GOLDEN, "Ping in a plain envelope", "Ping in a sealed envelope"}


def test_the_seal_is_as_documented() -> None:
    datagram = documented()["Ping in a sealed envelope"]
    key = hmac.digest(KEY, b"swarm-node gossip" + datagram[12:20], "sha256")
    opened = AESGCM(key).decrypt(bytes(4) + datagram[20:28], datagram[28:], datagram[:28])
    assert opened == encode(PING) and datagram[4:12] == hashlib.sha256(b"golden").digest()[:8]


def test_each_packet_is_sealed_with_a_nonce_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    envelope = sealed(monkeypatch)
    first, second = envelope.seal(b"the same"), envelope.seal(b"the same")
    assert first[12:20] == second[12:20] and (first[20:28], second[20:28]) == (bytes(8), bytes(7) + b"\1")
    assert first[28:] != second[28:] and len(first) == len(b"the same") + OVERHEAD_BYTES
    monkeypatch.undo()
    assert Envelope("golden", KEY).seal(b"the same")[12:20] != first[12:20]  # another process


# --- versions and swarms


def test_another_version_is_named_whatever_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for envelope in (plain(), sealed(monkeypatch)):
        datagram = bytearray(envelope.seal(encode(PING)))
        datagram[2] = PROTOCOL_VERSION + 1
        with pytest.raises(UnknownVersion, match=f"version {PROTOCOL_VERSION + 1}") as error:
            envelope.open(bytes(datagram))
        assert error.value.version == PROTOCOL_VERSION + 1
        with pytest.raises(UnknownVersion):
            envelope.open(bytes(datagram[:12]) + b"what may be there in ten years")


def test_other_swarms_are_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    keyed = sealed(monkeypatch)
    for there, here, error in [
        (Envelope("other"), plain(), NotForUs),
        (Envelope("other", KEY), keyed, NotForUs),
        (Envelope("golden", bytes(32)), keyed, WrongKey),
        (Envelope("golden"), keyed, WrongKey),
        (Envelope("golden", KEY), plain(), WrongKey),
    ]:
        with pytest.raises(error):
            here.open(there.seal(encode(PING)))


def test_who_has_no_key_does_not_push_out_the_ciphers_of_those_who_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envelope_module, "_CIPHERS_MAX", 3)
    here, friend = Envelope("golden", KEY), Envelope("golden", KEY)
    here.open(friend.seal(b"x"))
    for _ in range(20):
        with pytest.raises(WrongKey):
            here.open(Envelope("golden", bytes(32)).seal(b"x"))
    assert list(here._ciphers) == [friend._salt]
    for _ in range(20):
        assert here.open(Envelope("golden", KEY).seal(b"x")) == b"x"
    assert len(here._ciphers) == 3 and here.open(friend.seal(b"y")) == b"y"


@pytest.mark.parametrize("name", GOLDEN)
def test_elements_that_a_later_version_adds_are_ignored(name: str) -> None:
    message, decode = GOLDEN[name]
    elements = msgpack.unpackb(encode(message), use_list=True)  # type: ignore[arg-type]
    assert decode(msgpack.packb([*elements, "later", {"more": [1]}])) == message  # type: ignore[operator]


def test_updates_with_more_elements_are_read_too() -> None:
    elements = msgpack.unpackb(encode(ACK))
    elements[7][0].append("later")
    assert decode_packet(msgpack.packb(elements)) == ACK


def test_a_kind_that_is_not_known_still_brings_news() -> None:
    core = Core()
    core.meet(ALICE, BOB)
    core.take(Received(Packet(99, ALICE, 1, 1, 7, SELF, None, (Update(BOB, 1, DEAD, 1),)), address(ALICE)))
    assert core.belief(BOB) == (1, "DEAD", 1)


# --- sizes


def test_the_largest_packet_fits() -> None:
    accusers = tuple(bytes([i]) * 8 for i in range(ACCUSERS_MAX))
    update = Update(A, COUNTER_MAX, SUSPECT, COUNTER_MAX, accusers)
    largest = Packet(255, A, COUNTER_MAX, COUNTER_MAX, COUNTER_MAX, B, ("f" * 64, 65535), (update,) * UPDATES_MAX)
    assert len(encode(largest)) + OVERHEAD_BYTES <= PACKET_BYTES_MAX
    assert decode_packet(encode(largest)) == largest


def test_the_largest_request_and_reply_fit() -> None:
    update = Update(A, COUNTER_MAX, SUSPECT, COUNTER_MAX, (A, B, C))
    digest = (update,) * (MEMBERS_MAX + 1)
    request = SyncRequest(A, COUNTER_MAX, COUNTER_MAX, HASH, digest)
    assert decode_request(encode(request)) == request
    big = Record(A, COUNTER_MAX, ("f" * 64,) * ADDRESSES_MAX, 65535, bytes(RECORD_BYTES_MAX))
    assert decode_reply(encode(PullReply(big))) == PullReply(big)
    for decode, size in ((decode_request, REQUEST_BYTES_MAX), (decode_reply, REPLY_BYTES_MAX)):
        with pytest.raises(GossipError, match="bytes"):
            decode(bytes(size + 1))


def changed(message: object, *path: int, to: object) -> bytes:
    elements = msgpack.unpackb(encode(message), use_list=True)  # type: ignore[arg-type]
    inner = elements
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = to
    return bytes(msgpack.packb(elements))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb({"kind": 0}),
        msgpack.packb([]),
        msgpack.packb([0, A, 1]),
        changed(ACK, 0, to=-1),
        changed(ACK, 1, to=A[:7]),
        changed(ACK, 1, to="12345678"),
        changed(ACK, 2, to=COUNTER_MAX + 1),
        changed(ACK, 3, to=-1),
        changed(ACK, 4, to=1.5),
        changed(ACK, 5, to=A + b"x"),
        changed(ACK, 6, to=["host"]),
        changed(ACK, 6, to=["", 1]),
        changed(ACK, 6, to=["f" * 65, 1]),
        changed(ACK, 6, to=["host", 0]),
        changed(ACK, 6, to=["host", 65536]),
        changed(ACK, 7, to=[msgpack.unpackb(encode(DIGEST[0]))] * 65),
        changed(ACK, 7, 0, 2, to=4),
        changed(ACK, 7, 0, 4, to=[A] * 9),
        changed(ACK, 7, 0, 4, to=[A[:3]]),
        encode(ACK)[:-1],
        encode(ACK) + b"\0",
        b"\x91" * 100_000,
    ],
    ids=repr,
)
def test_malformed_packets_are_refused(data: bytes) -> None:
    with pytest.raises(GossipError):
        decode_packet(data)


@pytest.mark.parametrize(
    "decode,data",
    [
        (decode_request, changed(PingRequest(PING), 0, to="pong")),
        (decode_request, changed(PingRequest(PING), 0, to="else")),
        (decode_request, encode(PullReply(None))),
        (decode_request, changed(SyncRequest(A, 1, 1, HASH), 4, to=bytes(17))),
        (decode_request, changed(PullRequest(A, 1), 2, to=-1)),
        (decode_reply, encode(PullRequest(A, 1))),
        (decode_reply, changed(PullReply(RECORD), 1, 2, to=["h"] * (ADDRESSES_MAX + 1))),
        (decode_reply, changed(PullReply(RECORD), 1, 3, to=0)),
        (decode_record, changed(RECORD, 4, to="text")),
        (decode_record, changed(RECORD, 4, to=bytes(RECORD_BYTES_MAX + 1))),
    ],
    ids=lambda value: value.__name__ if callable(value) else ascii(value[:40]),
)
def test_malformed_requests_and_replies_are_refused(decode: object, data: bytes) -> None:
    with pytest.raises(GossipError):
        decode(data)  # type: ignore[operator]


@given(st.binary(max_size=200))
def test_decoders_raise_nothing_else(data: bytes) -> None:
    for decode in (
        decode_packet,
        decode_request,
        decode_reply,
        decode_record,
        plain().open,
        Envelope("golden", KEY).open,
    ):
        try:
            decode(data)
        except GossipError:
            continue


# --- what strangers send


class Receiver:
    """What `gossip.service` does with a datagram: open, decode, hand on; everything else is only counted."""

    def __init__(self, core: Core, envelope: Envelope) -> None:
        self.core, self.envelope, self.refused = core, envelope, 0

    def receive(self, datagram: bytes) -> bool:
        try:
            received = decode_packet(self.envelope.open(datagram))
        except GossipError:
            self.refused += 1
            return False
        self.core.take(Received(received, Address("10.66.66.66", 666)))
        return True


def busy_core() -> Core:
    """A core that knows members alive, suspected and dead, has news to tell and a probe under way."""
    core = Core()
    core.meet(ALICE, BOB, CAROL)
    core.hear(BOB, updates=(Update(ALICE, 1, SUSPECT, 1, (BOB,)), Update(CAROL, 1, DEAD, 1)))
    core.wait_for_probe()
    return core


def test_states_are_compared_deeply() -> None:
    assert state_of(busy_core().gossip) == state_of(busy_core().gossip)
    before = state_of((core := busy_core()).gossip)
    core.hear(BOB)
    core.gossip.members.get(BOB).heard_s += 1e-9
    assert state_of(core.gossip) != before


@pytest.mark.parametrize("kind", ["random", "truncated", "changed", "of another key", "of no key"])
def test_100000_packets_of_strangers_change_nothing_but_a_counter(kind: str) -> None:
    draw = random.Random(kind)
    core = busy_core()
    receiver = Receiver(core, Envelope("golden", KEY))
    friend, stranger, keyless = Envelope("golden", KEY), Envelope("golden", bytes(32)), Envelope("golden")
    packets = [encode(message) for message, decode in GOLDEN.values() if decode is decode_packet]  # type: ignore[arg-type]
    before, times = state_of(core.gossip), 20_000 if kind != "random" else 100_000
    for _ in range(times):
        data = friend.seal(draw.choice(packets))
        if kind == "random":
            data = draw.randbytes(draw.randrange(200))
            if draw.random() < 0.5:  # as near to a real one as one without the key can make it
                data = friend.seal(b"")[: draw.randrange(29)] + data
        elif kind == "truncated":
            data = data[: draw.randrange(len(data))]
        elif kind == "changed":
            place = draw.randrange(len(data))
            data = data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]
        else:
            data = (stranger if kind == "of another key" else keyless).seal(draw.choice(packets))
        assert not receiver.receive(data)
    assert receiver.refused == times
    assert state_of(core.gossip) == before


def test_without_a_key_damaged_packets_may_be_believed_but_break_nothing() -> None:
    draw = random.Random(3)
    core = busy_core()
    receiver, envelope = Receiver(core, plain()), plain()
    packets = [encode(message) for message, decode in GOLDEN.values() if decode is decode_packet]  # type: ignore[arg-type]
    believed = 0
    for _ in range(100_000):
        data = bytearray(envelope.seal(draw.choice(packets)))
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(12, len(data))] = draw.randrange(256)
        believed += receiver.receive(bytes(data))
        core.now_s += 1e-4
    sizes = core.gossip.sizes
    assert believed > 10_000 and receiver.refused > 10_000
    assert sizes.members <= MEMBERS_MAX and sizes.timers < 8 * sizes.members + 300 and sizes.requests < 300


# --- replays


class Recorder(Run):
    """A run whose packets are kept."""

    def __init__(self) -> None:
        super().__init__("replays", Options(nodes=6, loss=0.1), seed=4)
        self.packets: list[Packet] = []
        on_step = self.simulation.on_step

        def keep(node: Node, cause: object, actions: list[object]) -> None:
            self.packets += [action.packet for action in actions if hasattr(action, "packet")]
            assert on_step is not None
            on_step(node, cause, actions)  # type: ignore[arg-type]

        self.simulation.on_step = keep  # type: ignore[assignment]


def turbulent_minutes() -> Recorder:
    """Crashes, restarts, false suspicions, goodbyes, changed records."""
    run = Recorder()
    simulation = run.simulation
    run.start_all()
    for round_ in range(6):
        node = simulation.nodes[round_ % 5]
        (simulation.crash if round_ % 2 else simulation.leave)(node)
        simulation.run(3.0 + 10 * (round_ % 3))
        run.restart(node, b"again %d" % round_)
        simulation.publish(simulation.nodes[(round_ + 2) % 5], b"changed %d" % round_)
        run.pause(simulation.nodes[(round_ + 3) % 5], 6.0)
        simulation.run(12.0)
    run.settle(60.0, "after turbulent minutes")
    return run


def beliefs(core: Gossip) -> dict[NodeId, tuple[object, ...]]:
    return {m.node: (m.incarnation, m.status, m.version, m.record, m.address) for m in core.members}


def test_100000_replayed_packets_change_no_belief() -> None:
    """What was said once and is no longer true is known to be old, with a key or without."""
    run = turbulent_minutes()
    simulation, draw = run.simulation, random.Random(5)
    assert len(run.packets) > 1000
    before = [
        (beliefs(node.core), node.core.own_update(), node.core.record, node.core.twin) for node in simulation.nodes
    ]  # type: ignore[union-attr]
    for i in range(100_000):
        node = simulation.nodes[i % 6]
        replayed = draw.choice(run.packets)
        # They come from the attacker's address, with the answer to whatever it was.
        actions = node.core.handle(simulation._clock(node), Received(replayed, Address("10.66.66.66", 666)))  # type: ignore[union-attr]
        assert len(actions) <= 12
    after = [
        (beliefs(node.core), node.core.own_update(), node.core.record, node.core.twin) for node in simulation.nodes
    ]  # type: ignore[union-attr]
    assert after == before
    # And the swarm goes on as if nothing had been.
    simulation.run(120.0)
    assert simulation.views_agree() and run.figures.false_deaths == 0


def test_replays_do_not_raise_the_dead() -> None:
    run = turbulent_minutes()
    simulation = run.simulation
    gone = simulation.nodes[5]
    simulation.crash(gone)
    simulation.run(simulation.settings.dead_s + 60)
    node = simulation.nodes[0]
    assert node.core is not None and node.core.members.get(gone.id) is None
    for replayed in run.packets:
        if replayed.sender == gone.id:
            node.core.handle(simulation._clock(node), Received(replayed, Address("10.66.66.66", 666)))
    assert node.core.members.get(gone.id) is None
