"""Sessions: windows, handles, delivery ids."""

from __future__ import annotations

import pytest
from amqpwire import TAG, Wire, dispose, names, sending

from aztask.emulator.amqp import encode, session
from aztask.emulator.amqp.connection import ConnectionState
from aztask.emulator.amqp.outgoing import (
    frame,
)
from aztask.emulator.amqp.performatives import Disposition


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


def test_dispositions_of_ranges_and_of_unknown_ids():
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
    assert wire.connection.state is ConnectionState.OPEN
    assert len(wire.handler.detached_) == 1
    wire.feed(frame(0, encode.fields(0x16, [encode.uint(0)])))  # frames after the end are dropped
    assert wire.connection.state is ConnectionState.OPEN


def test_the_window_is_renewed_and_kept():
    wire = Wire().started()
    wire.attach(receive=False)
    for number in range(3000):
        wire.transfer(number, b"x")
    flows = [one for one in wire.frames() if one.handle is None]
    assert flows[0].incoming_window == 5000


def test_a_session_whose_window_stays_closed_ends_without_an_exception(monkeypatch):
    """The code that sends serves the other clients, too."""
    monkeypatch.setattr(session, "MAX_WAITING", 1000)
    wire = Wire().started(window=0)
    link = sending(wire)
    wire.flow(50, window=0)
    for _ in range(50):
        link.send(bytes(100), TAG, "context")
    (end,) = wire.frames()
    assert end.error.value[0] == "amqp:resource-limit-exceeded"
    assert wire.connection.waiting_bytes == 0
    assert wire.handler.detached_ == [link]


def test_what_waits_in_one_session_keeps_messages_from_the_others(monkeypatch):
    monkeypatch.setattr(session, "READY_BYTES", 1000)
    link = sending(wire := Wire().started())
    assert link.session.ready
    wire.connection.waiting_bytes = 1001
    assert not link.session.ready
