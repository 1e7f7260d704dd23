"""Performatives: types, defaults, and the short cut for usual dispositions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.emulator.amqp import AmqpError, encode, outgoing, performatives
from aztask.emulator.amqp.performatives import parse

STATES = [
    b"\x00\x53\x24\x45",
    b"\x00\x53\x24\xc0\x01\x00",
    b"\x00\x53\x26\x45",
    b"\x00\x53\x27\x45",
]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("first", [0, 5, 255, 256, 2**32 - 1])
@pytest.mark.parametrize("settled", [True, False])
def test_the_short_cut_for_dispositions_agrees_with_the_decoder(state, first, settled):
    numbers = [b"\x70" + first.to_bytes(4), encode.uint(first)]
    for number in numbers:
        for rest in ([], [encode.FALSE], [encode.TRUE], [encode.NULL]):
            items = [encode.TRUE, number, encode.NULL, encode.boolean(settled), state, *rest]
            body = encode.described(0x15, encode.list_of(items))
            quick, careful = parse(body), performatives._parse(body, performatives._KINDS)
            careful.batchable = quick.batchable
            assert quick == careful


@given(st.binary(max_size=30))
def test_the_short_cut_accepts_no_malformed_disposition(tail):
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


def test_our_dispositions_of_one_delivery_can_be_read():
    for state in STATES:
        for number in (0, 5, 300, 2**32 - 1):
            got = parse(outgoing.disposition(False, number, number, state))
            assert (got.role, got.first, got.last, got.settled) == (False, number, None, True)
    long = outgoing.rejected("amqp:not-found", "x" * 500)
    assert parse(outgoing.disposition(True, 7, 7, long)).state.descriptor == 0x25


def test_absent_fields_have_the_standards_defaults():
    opened = parse(encode.fields(0x10, [encode.string("c")]))
    assert (opened.max_frame_size, opened.channel_max, opened.idle_timeout) == (
        2**32 - 1,
        65535,
        None,
    )
    flow = parse(encode.fields(0x13, [encode.NULL, encode.uint(1), encode.uint(2), encode.uint(3)]))
    assert (flow.next_incoming_id, flow.handle, flow.drain) == (None, None, False)


def test_symbolic_descriptors_are_understood():
    body = b"\x00" + encode.symbol("amqp:end:list") + encode.list_of([])
    assert type(parse(body)).__name__ == "End"
    init = b"\x00" + encode.symbol("amqp:sasl-init:list") + encode.list_of([encode.symbol("PLAIN")])
    assert performatives.parse_sasl(init).mechanism == "PLAIN"


@pytest.mark.parametrize(
    ("body", "condition"),
    [
        (encode.NULL, "amqp:decode-error"),
        (encode.described(0x10, encode.NULL), "amqp:decode-error"),
        (encode.fields(0x19, []), "amqp:not-implemented"),
        (encode.fields(0x10, []), "amqp:invalid-field"),
        (encode.fields(0x10, [encode.uint(5)]), "amqp:invalid-field"),
        (encode.fields(0x18, [encode.TRUE, encode.TRUE]), "amqp:decode-error"),
        (encode.fields(0x16, [encode.int32(-1)]), "amqp:invalid-field"),
    ],
)
def test_violations_are_refused(body, condition):
    with pytest.raises(AmqpError) as caught:
        parse(body)
    assert caught.value.condition == condition
