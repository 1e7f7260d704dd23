"""Protocol headers and frames in a stream of bytes."""

from __future__ import annotations

import pytest

from aztask.emulator.amqp import AmqpError
from aztask.emulator.amqp.outgoing import (
    EMPTY_FRAME,
    HEADER_AMQP,
    TYPE_AMQP,
    TYPE_SASL,
    Splitter,
    frame,
)


def test_headers_and_frames_come_out_as_they_went_in():
    splitter = Splitter(512)
    splitter.feed(HEADER_AMQP + frame(3, b"body") + frame(0, b"", TYPE_SASL) + EMPTY_FRAME)
    assert splitter.header() == HEADER_AMQP
    assert splitter.frame() == (TYPE_AMQP, 3, b"body")
    assert splitter.frame() == (TYPE_SASL, 0, b"")
    assert splitter.frame() == (TYPE_AMQP, 0, b"")
    assert splitter.frame() is None
    assert splitter.header() is None


def test_an_incomplete_frame_waits_for_its_last_byte():
    splitter = Splitter(512)
    for byte in frame(1, b"body"):
        assert splitter.frame() is None
        splitter.feed(bytes([byte]))
    assert splitter.frame() == (TYPE_AMQP, 1, b"body")


def test_an_extended_header_is_skipped():
    splitter = Splitter(512)
    splitter.feed(b"\x00\x00\x00\x0e\x03\x00\x00\x01" + b"more" + b"ok")
    assert splitter.frame() == (TYPE_AMQP, 1, b"ok")


@pytest.mark.parametrize(
    "head",
    [
        b"\x00\x00\x00\x07\x02\x00\x00\x00",  # shorter than its own header
        b"\x00\x00\x02\x01\x02\x00\x00\x00",  # one byte over the limit
        b"\xff\xff\xff\xff\x02\x00\x00\x00",
        b"\x00\x00\x00\x10\x01\x00\x00\x00",  # the body would begin inside the header
        b"\x00\x00\x00\x10\x05\x00\x00\x00",  # the body would begin behind the frame
    ],
)
def test_a_bad_size_is_refused_before_the_body_is_there(head):
    splitter = Splitter(512)
    splitter.feed(head)
    with pytest.raises(AmqpError) as caught:
        splitter.frame()
    assert caught.value.condition == "amqp:connection:framing-error"
