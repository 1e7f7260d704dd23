"""Frames as readable lines."""

from __future__ import annotations

from aztask.emulator.amqp import AmqpError, encode, outgoing
from aztask.emulator.amqp.encode import Described
from aztask.emulator.amqp.performatives import Attach
from aztask.emulator.view import shown, tracer


def test_frames_in_words():
    lines = []
    trace = tracer(lines.append)
    source = Described(0x28, ["queue", None])
    trace("client", "->", 1, Attach("name", 0, True, source=source))
    trace("client", "<-", 1, outgoing.detach(0, True, AmqpError("amqp:not-found", "gone")))
    trace("client", "<-", 0, b"\x00garbage")
    assert "attach name='name' handle=0 role=True source=source('queue', -)" in lines[0]
    assert "detach 0 True error('amqp:not-found', 'gone', -)" in lines[1]
    assert "amqp:decode-error" in lines[2]
    assert shown("\x1b[31m") == "'\\x1b[31m'"
    assert len(shown("x" * 1000)) == 200
    assert shown({"k": b"\x01"}) == "{k: 01}"
    assert encode.NULL == b"\x40"
