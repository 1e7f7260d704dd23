"""The connection, its sessions and links, without a socket: bytes in, calls and bytes out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.emulator.amqp import encode, outgoing, performatives
from aztask.emulator.amqp.connection import Connection, ConnectionLimits, State
from aztask.emulator.amqp.decode import decode
from aztask.emulator.amqp.errors import AmqpError
from aztask.emulator.amqp.frames import (
    HEADER_AMQP,
    HEADER_SASL,
    HEADER_TLS,
    TYPE_SASL,
    Splitter,
    frame,
)
from aztask.emulator.amqp.link import ReceivingLink, SendingLink
from aztask.emulator.amqp.performatives import Disposition, parse

TAG = bytes(16)


class Recorder:
    """A handler that accepts every link and remembers what it was told."""

    def __init__(self):
        self.links, self.received_, self.settled_, self.detached_ = [], [], [], []
        self.credited_ = 0

    def authenticated(self, user, password):
        return (user, password) == ("user", "right")

    def opened(self, peer):
        self.peer = peer

    def attached(self, link):
        self.links.append(link)
        if (link.source and link.source.address == "no") or (
            link.target and link.target.address == "no"
        ):
            link.refuse(AmqpError("amqp:not-found", "no such thing"))
            return
        link.accept(max_message_size=1000)
        if isinstance(link, ReceivingLink):
            link.max_message_size = 1000
            link.grant(10)

    def received(self, link, message):
        self.received_.append(message)

    def credited(self, link):
        self.credited_ += 1

    def settled(self, deliveries, disposition):
        self.settled_.append(([one.delivery_id for one in deliveries], disposition))
        for one in deliveries:
            one.link.session.settle(one)

    def detached(self, link):
        self.detached_.append(link)


class Wire:
    """A connection with its handler, and what it wrote, parsed."""

    def __init__(self, **limits):
        self.handler = Recorder()
        self.connection = Connection(self.handler, "server", ConnectionLimits(**limits))
        self._splitter = Splitter(2**31)

    def feed(self, *parts):
        for part in parts:
            self.connection.receive(part)
        return self

    def headers(self, count=1):
        self._splitter.feed(self.connection.output())
        return [self._splitter.header() for _ in range(count)]

    def frames(self):
        self._splitter.feed(self.connection.output())
        found = []
        while (part := self._splitter.frame()) is not None:
            found.append(parse(part[2]))
        return found

    def started(self, window=2**31 - 1, frame_size=2**32 - 1):
        opened = encode.fields(0x10, [encode.string("c"), encode.NULL, encode.uint(frame_size)])
        begun = encode.fields(
            0x11, [encode.NULL, encode.uint(0), encode.uint(window), encode.uint(5)]
        )
        self.feed(HEADER_AMQP, frame(0, opened), frame(0, begun))
        assert self.headers() == [HEADER_AMQP]
        assert [type(one).__name__ for one in self.frames()] == ["Open", "Begin"]
        return self

    def attach(self, *, receive, handle=0, settled=2, address="q", name="l"):
        here, there = (encode.list_of([encode.string(text)]) for text in ("here", address))
        source, target = (there, here) if receive else (here, there)
        self.feed(
            frame(
                0,
                encode.fields(
                    0x12,
                    [
                        *(encode.string(name), encode.uint(handle), encode.boolean(receive)),
                        *(encode.ubyte(settled), encode.ubyte(1)),
                        *(encode.described(0x28, source), encode.described(0x29, target)),
                        *(encode.NULL, encode.NULL, encode.uint(0)),
                    ],
                ),
            )
        )
        return self.frames()

    def flow(self, credit, *, handle=0, count=0, drain=False, incoming=0, window=2**31 - 1):
        numbers = [encode.uint(n) for n in (incoming, window, 0, 5, handle, count, credit, 0)]
        self.feed(frame(0, encode.fields(0x13, [*numbers, encode.boolean(drain)])))

    def transfer(self, delivery_id, payload, *, handle=0, more=False, **more_fields):
        items = [
            encode.uint(handle),
            encode.NULL if delivery_id is None else encode.uint(delivery_id),
            encode.NULL if delivery_id is None else encode.binary(b"tag"),
            encode.uint(more_fields.get("message_format", 0)),
            encode.boolean(more_fields.get("settled", False)),
            encode.boolean(more),
            *[encode.NULL] * 3,
            encode.boolean(more_fields.get("aborted", False)),
        ]
        self.feed(frame(0, encode.fields(0x14, items) + payload))


def names(performatives):
    return [type(one).__name__ for one in performatives]


def test_headers_and_sasl():
    wire = Wire().feed(HEADER_SASL)
    assert wire.headers() == [HEADER_SASL]
    kind, _, mechanisms = wire._splitter.frame()
    assert kind == TYPE_SASL
    assert "ANONYMOUS" in decode(mechanisms)[0].value[0]
    init = encode.fields(0x41, [encode.symbol("ANONYMOUS")])
    wire.feed(frame(0, init, TYPE_SASL), HEADER_AMQP)
    assert decode(_next_sasl(wire))[0].value == [0]
    assert wire.connection.state is State.OPENING


def _next_sasl(wire):
    wire._splitter.feed(wire.connection.output())
    return wire._splitter.frame()[2]


@pytest.mark.parametrize(
    ("mechanism", "response", "code", "trusted"),
    [
        ("PLAIN", b"\x00user\x00right", 0, True),
        ("PLAIN", b"\x00user\x00wrong", 1, False),
        ("PLAIN", b"garbage", 1, False),
        ("MSSBCBS", None, 0, False),
        ("EXTERNAL", b"", 0, False),
        ("SCRAM-SHA-1", None, 1, False),
    ],
)
def test_sasl_mechanisms(mechanism, response, code, trusted):
    wire = Wire().feed(HEADER_SASL)
    wire.headers()
    wire._splitter.frame()
    items = [encode.symbol(mechanism), encode.NULL if response is None else encode.binary(response)]
    wire.feed(frame(0, encode.fields(0x41, items), TYPE_SASL))
    assert decode(_next_sasl(wire))[0].value == [code]
    assert wire.connection.trusted is trusted
    assert wire.connection.state is (State.CLOSED if code else State.HEADER)


def test_an_unsupported_header_is_answered_with_ours():
    wire = Wire().feed(HEADER_TLS)
    assert wire.headers() == [HEADER_SASL]
    assert wire.connection.state is State.CLOSED


def test_bytes_may_come_one_at_a_time():
    wire = Wire()
    opened = frame(0, encode.fields(0x10, [encode.string("c")]))
    for byte in HEADER_AMQP + opened:
        wire.feed(bytes([byte]))
    assert wire.connection.state is State.OPEN
    assert wire.handler.peer.container_id == "c"


@pytest.mark.parametrize("kind", [0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18])
def test_only_open_comes_first(kind):
    items = [encode.NULL, encode.uint(0), encode.uint(0), encode.uint(0)]
    wire = Wire().feed(HEADER_AMQP, frame(0, encode.fields(kind, items)))
    wire.headers()
    assert names(wire.frames())[-1] == "Close"
    assert wire.connection.state is State.CLOSING


def test_after_our_close_only_the_peers_close_counts():
    wire = Wire().started()
    wire.connection.close(AmqpError("amqp:internal-error", "over"))
    assert wire.frames()[0].error.value == ["amqp:internal-error", "over", None]
    wire.feed(frame(0, encode.fields(0x12, [])), frame(0, b"\x00"))
    assert wire.connection.state is State.CLOSING
    wire.feed(frame(0, encode.fields(0x18, [])))
    assert wire.connection.state is State.CLOSED


def test_links_are_accepted_with_what_the_peer_wrote():
    wire = Wire().started()
    (answer, *_rest) = wire.attach(receive=True)
    assert answer.role is False
    assert answer.source.value[0] == "q"
    assert answer.target.value[0] == "here"
    assert answer.initial_delivery_count == 0
    assert answer.max_message_size == 1000


@pytest.mark.parametrize("receive", [True, False])
def test_a_refused_link_is_attached_without_its_end_then_detached(receive):
    wire = Wire().started()
    answer, detach = wire.attach(receive=receive, address="no")
    refused, kept = (answer.source, answer.target) if receive else (answer.target, answer.source)
    assert refused is None
    assert kept is not None
    assert detach.error.value == ["amqp:not-found", "no such thing", None]
    assert len(wire.handler.detached_) == 1


def test_messages_in_one_frame_and_in_many():
    wire = Wire().started()
    wire.attach(receive=False)
    wire.transfer(0, b"whole")
    wire.transfer(1, b"par", more=True)
    wire.transfer(1, b"t", more=True)
    wire.transfer(None, b"s", message_format=5)
    wire.transfer(2, b"lost", more=True)
    wire.transfer(2, b"", aborted=True)
    wire.transfer(3, b"settled", settled=True)
    got = [(one.delivery_id, one.payload, one.settled) for one in wire.handler.received_]
    assert got == [(0, b"whole", False), (1, b"parts", False), (3, b"settled", True)]


def test_a_message_over_the_limit_is_received_without_its_bytes():
    wire = Wire().started()
    wire.attach(receive=False)
    wire.transfer(0, bytes(900), more=True)
    wire.transfer(0, bytes(200), more=True)
    assert wire.handler.links[0].partial_size() == 0
    wire.transfer(0, bytes(1))
    wire.transfer(1, b"next")
    first, second = wire.handler.received_
    assert (first.too_large, first.payload) == (True, b"")
    assert (second.too_large, second.payload) == (False, b"next")


def test_incomplete_messages_of_a_connection_are_limited():
    wire = Wire(partial_bytes=1500).started()
    for handle in range(2):
        wire.attach(receive=False, handle=handle)
        wire.transfer(handle, bytes(800), handle=handle, more=True)
    assert wire.frames()[-1].error.value[0] == "amqp:resource-limit-exceeded"
    assert len(wire.handler.detached_) == 2


def test_what_a_link_held_is_given_back_when_it_ends():
    wire = Wire(partial_bytes=1000).started()
    for turn in range(5):
        wire.attach(receive=False)
        wire.transfer(turn, bytes(800), more=True)
        wire.feed(frame(0, encode.fields(0x16, [encode.uint(0), encode.TRUE])))
        assert names(wire.frames())[-1] == "Detach"
    assert wire.connection.state is State.OPEN


def test_credit_is_granted_again_when_half_is_used():
    wire = Wire().started()
    wire.attach(receive=False)
    for number in range(6):
        wire.transfer(number, b"x")
    (flow,) = wire.frames()
    assert (flow.delivery_count, flow.link_credit) == (6, 10)


def sending(wire, credit=5):
    wire.attach(receive=True)
    wire.flow(credit)
    link = wire.handler.links[0]
    assert isinstance(link, SendingLink)
    return link


def test_credit_is_absolute_against_the_delivery_count():
    wire = Wire().started()
    link = sending(wire, 5)
    link.send(b"a", TAG, "context")
    assert link.credit == 4
    wire.flow(5, count=0)
    assert link.credit == 4
    wire.flow(5, count=1)
    assert link.credit == 5
    wire.flow(0, count=3)
    assert link.credit == 2


def test_drain_uses_up_the_credit():
    wire = Wire().started()
    link = sending(wire)
    wire.flow(5, drain=True)
    assert link.draining
    wire.frames()
    link.drained()
    (flow,) = wire.frames()
    assert (flow.delivery_count, flow.link_credit, flow.drain) == (5, 0, True)


def test_large_messages_are_sent_in_the_peers_frames():
    wire = Wire().started(frame_size=512)
    link = sending(wire)
    payload = bytes(range(256)) * 5
    link.send(payload, TAG, "context")
    parts = wire.frames()
    assert len(parts) > 3
    assert b"".join(part.payload for part in parts) == payload
    assert [part.more for part in parts] == [True] * (len(parts) - 1) + [False]
    assert parts[0].delivery_tag == TAG


def test_transfers_wait_for_the_peers_window():
    wire = Wire().started(window=2)
    link = sending(wire)
    wire.flow(5, window=2)
    for _ in range(4):
        link.send(b"x", TAG, "context")
    assert names(wire.frames()) == ["Transfer", "Transfer"]
    assert not link.session.ready
    wire.flow(5, incoming=2, window=1)
    assert names(wire.frames()) == ["Transfer"]
    wire.flow(5, incoming=3, window=10)
    assert names(wire.frames()) == ["Transfer"]
    assert link.session.ready


def dispose(wire, first, last=None, role=True):
    items = [encode.boolean(role), encode.uint(first)]
    items.append(encode.NULL if last is None else encode.uint(last))
    wire.feed(frame(0, encode.fields(0x15, items)))


def test_dispositions_in_ranges_and_of_strangers():
    wire = Wire().started()
    link = sending(wire, 10)
    for _ in range(6):
        link.send(b"x", TAG, "context")
    dispose(wire, 1)
    dispose(wire, 2, 3)
    dispose(wire, 0, 2**32 - 1)
    dispose(wire, 77)
    dispose(wire, 5, 2)
    dispose(wire, 0, 5, role=False)
    assert [ids for ids, _ in wire.handler.settled_] == [[1], [2, 3], [0, 4, 5]]
    assert isinstance(wire.handler.settled_[0][1], Disposition)


def test_a_link_that_ended_forgets_its_deliveries():
    wire = Wire().started()
    link = sending(wire)
    link.send(b"x", TAG, "context")
    wire.feed(frame(0, encode.fields(0x16, [encode.uint(0), encode.TRUE])))
    dispose(wire, 0)
    assert wire.handler.settled_ == []


def test_settled_links_keep_nothing():
    wire = Wire().started()
    wire.attach(receive=True, settled=1)
    wire.flow(1)
    wire.handler.links[0].send(b"x", TAG, "context")
    assert wire.frames()[0].settled is True
    assert wire.handler.links[0].unsettled == {}


@pytest.mark.parametrize(
    ("breach", "condition"),
    [
        (lambda wire: wire.attach(receive=False), "amqp:session:handle-in-use"),
        (lambda wire: wire.transfer(0, b"x", handle=9), "amqp:session:unattached-handle"),
        (lambda wire: wire.flow(1, handle=9), "amqp:session:unattached-handle"),
    ],
)
def test_a_sessions_error_ends_the_session_only(breach, condition):
    wire = Wire().started()
    wire.attach(receive=False)
    answers = breach(wire) or wire.frames()
    assert answers[-1].error.value[0] == condition
    assert type(answers[-1]).__name__ == "End"
    assert wire.connection.state is State.OPEN
    assert len(wire.handler.detached_) == 1
    wire.feed(frame(0, encode.fields(0x16, [encode.uint(0)])))  # frames after the end are dropped
    assert wire.connection.state is State.OPEN


def test_the_window_is_renewed_and_kept():
    wire = Wire().started()
    wire.attach(receive=False)
    for number in range(3000):
        wire.transfer(number, b"x")
    flows = [one for one in wire.frames() if one.handle is None]
    assert flows[0].incoming_window == 5000


def test_output_wakes_its_owner_once():
    wire = Wire()
    calls = []
    wire.connection.wake = lambda: calls.append(1)
    wire.feed(HEADER_AMQP, frame(0, encode.fields(0x10, [encode.string("c")])))
    assert calls == [1]
    wire.connection.output()
    wire.connection.keep_alive()
    assert calls == [1, 1]


STATES = [
    b"\x00\x53\x24\x45",
    b"\x00\x53\x24\xc0\x01\x00",
    b"\x00\x53\x26\x45",
    b"\x00\x53\x27\x45",
]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("first", [0, 5, 255, 256, 2**32 - 1])
@pytest.mark.parametrize("settled", [True, False])
def test_the_quick_way_of_reading_dispositions_agrees_with_the_careful_one(state, first, settled):
    numbers = [b"\x70" + first.to_bytes(4), encode.uint(first)]
    for number in numbers:
        for rest in ([], [encode.FALSE], [encode.TRUE], [encode.NULL]):
            items = [encode.TRUE, number, encode.NULL, encode.boolean(settled), state, *rest]
            body = encode.described(0x15, encode.list_of(items))
            quick, careful = parse(body), performatives._parse(body, performatives._KINDS)
            careful.batchable = quick.batchable
            assert quick == careful


@given(st.binary(max_size=30))
def test_the_quick_way_lets_nothing_wrong_pass(tail):
    body = b"\x00\x53\x15\xc0" + tail
    try:
        expected = performatives._parse(body, performatives._KINDS)
    except AmqpError:
        assert performatives._small_disposition(body) is None
        return
    quick = performatives._small_disposition(body)
    if quick is not None:
        expected.batchable = False
        assert quick == expected


@given(
    st.sampled_from([encode.TRUE, b"\x56\x01"]),
    st.sampled_from([b"\x52\x07", b"\x52\x40", b"\x70\x00\x01\x02\x40"]),
    st.sampled_from([b"", encode.FALSE, b"\x56\x00"]),
    st.data(),
)
def test_a_small_disposition_with_a_byte_changed_added_or_lost(role, number, batchable, data):
    items = [role, number, encode.NULL, b"\x56\x00", b"\x00\x53\x24\x45", batchable]
    body = bytearray(encode.described(0x15, encode.list_of([item for item in items if item])))
    assert performatives._small_disposition(bytes(body)) is not None
    at = data.draw(st.integers(4, len(body) - 1))
    body[at : at + data.draw(st.integers(0, 1))] = data.draw(st.binary(max_size=1))
    quick = performatives._small_disposition(bytes(body))
    if quick is not None:
        expected = performatives._parse(bytes(body), performatives._KINDS)
        expected.batchable = False
        assert quick == expected


def test_what_is_written_of_one_delivery_is_read_back():
    for state in STATES:
        for number in (0, 5, 300, 2**32 - 1):
            got = parse(outgoing.disposition(False, number, number, state))
            assert (got.role, got.first, got.last, got.settled) == (False, number, None, True)
    long = outgoing.rejected("amqp:not-found", "x" * 500)
    assert parse(outgoing.disposition(True, 7, 7, long)).state.descriptor == 0x25
