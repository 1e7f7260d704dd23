"""The connection, its sessions and links, without a socket: bytes in, calls and bytes out."""

from __future__ import annotations

import pytest
from amqpwire import Wire, names

from aztask.emulator.amqp import AmqpError, encode
from aztask.emulator.amqp.connection import ConnectionState
from aztask.emulator.amqp.decode import decode
from aztask.emulator.amqp.outgoing import (
    HEADER_AMQP,
    HEADER_SASL,
    HEADER_TLS,
    TYPE_SASL,
    frame,
)


def test_headers_and_sasl():
    wire = Wire().feed(HEADER_SASL)
    assert wire.headers() == [HEADER_SASL]
    kind, _, mechanisms = wire._splitter.frame()
    assert kind == TYPE_SASL
    assert "ANONYMOUS" in decode(mechanisms)[0].value[0]
    init = encode.fields(0x41, [encode.symbol("ANONYMOUS")])
    wire.feed(frame(0, init, TYPE_SASL), HEADER_AMQP)
    assert decode(_next_sasl(wire))[0].value == [0]
    assert wire.connection.state is ConnectionState.OPENING


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
    assert wire.connection.state is (ConnectionState.CLOSED if code else ConnectionState.HEADER)


def test_an_unsupported_header_is_answered_with_ours():
    wire = Wire().feed(HEADER_TLS)
    assert wire.headers() == [HEADER_SASL]
    assert wire.connection.state is ConnectionState.CLOSED


def test_bytes_may_come_one_at_a_time():
    wire = Wire()
    opened = frame(0, encode.fields(0x10, [encode.string("c")]))
    for byte in HEADER_AMQP + opened:
        wire.feed(bytes([byte]))
    assert wire.connection.state is ConnectionState.OPEN
    assert wire.handler.peer.container_id == "c"


@pytest.mark.parametrize("kind", [0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18])
def test_only_open_comes_first(kind):
    items = [encode.NULL, encode.uint(0), encode.uint(0), encode.uint(0)]
    wire = Wire().feed(HEADER_AMQP, frame(0, encode.fields(kind, items)))
    wire.headers()
    assert names(wire.frames())[-1] == "Close"
    assert wire.connection.state is ConnectionState.CLOSING


def test_after_our_close_only_the_peers_close_counts():
    wire = Wire().started()
    wire.connection.close(AmqpError("amqp:internal-error", "over"))
    assert wire.frames()[0].error.value == ["amqp:internal-error", "over", None]
    wire.feed(frame(0, encode.fields(0x12, [])), frame(0, b"\x00"))
    assert wire.connection.state is ConnectionState.CLOSING
    wire.feed(frame(0, encode.fields(0x18, [])))
    assert wire.connection.state is ConnectionState.CLOSED


def test_incomplete_messages_of_a_connection_are_limited():
    wire = Wire(partial_bytes=1500).started()
    for handle in range(2):
        wire.attach(receive=False, handle=handle)
        wire.transfer(handle, bytes(800), handle=handle, more=True)
    assert wire.frames()[-1].error.value[0] == "amqp:resource-limit-exceeded"
    assert len(wire.handler.detached_) == 2


def test_partial_bytes_are_released_when_the_link_ends():
    wire = Wire(partial_bytes=1000).started()
    for turn in range(5):
        wire.attach(receive=False)
        wire.transfer(turn, bytes(800), more=True)
        wire.feed(frame(0, encode.fields(0x16, [encode.uint(0), encode.TRUE])))
        assert names(wire.frames())[-1] == "Detach"
    assert wire.connection.state is ConnectionState.OPEN


def test_output_wakes_its_owner_once():
    wire = Wire()
    calls = []
    wire.connection.wake = lambda: calls.append(1)
    wire.feed(HEADER_AMQP, frame(0, encode.fields(0x10, [encode.string("c")])))
    assert calls == [1]
    wire.connection.output()
    wire.connection.keep_alive()
    assert calls == [1, 1]
