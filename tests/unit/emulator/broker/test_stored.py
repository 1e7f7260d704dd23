"""Messages as they are stored and delivered."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.emulator.amqp import encode, sections
from aztask.emulator.amqp.sections import cut
from aztask.emulator.broker import stored

BODY = encode.described(sections.DATA, encode.binary(b"body"))
KEY = bytes(range(16))


def annotations(**pairs):
    items = [(encode.symbol(key.replace("_", "-")), encode.long(v)) for key, v in pairs.items()]
    return encode.described(sections.MESSAGE_ANNOTATIONS, encode.map_of(items))


def delivered(raw, **options):
    payload = stored.to_stored(cut(raw)).pack()
    return cut(stored.deliver(payload, sequence=5, enqueued_ms=1000, delivery_count=2, **options))


def test_the_header_carries_the_count_and_keeps_the_rest():
    header = encode.fields(
        sections.HEADER,
        [encode.TRUE, encode.ubyte(7), encode.uint(5000), encode.TRUE, encode.uint(9)],
    )
    assert delivered(header + BODY).header == [True, 7, 5000, None, 2]
    assert delivered(BODY).header == [None, None, None, None, 2]
    assert delivered(header + BODY, dead=("r", "d")).header == [True, 7, None, None, 2]


def test_annotations_of_the_sender_and_of_the_broker():
    raw = annotations(x_mine=1, x_opt_sequence_number=99, x_opt_locked_until=98) + BODY
    got = delivered(raw, lock_token=KEY, locked_until_ms=77)
    expected = {"x-mine": 1, "x-opt-sequence-number": 5, "x-opt-enqueued-time": 1000}
    assert got.annotations == {**expected, "x-opt-locked-until": 77}
    assert KEY in got.raw
    peeked = delivered(raw, state=stored.STATE_DEFERRED)
    assert peeked.annotations == {
        **expected,
        "x-opt-enqueue-sequence-number": 5,
        "x-opt-message-state": 1,
    }


@given(st.binary(max_size=300))
def test_the_bare_message_is_the_senders_own(body):
    bare = encode.fields(sections.PROPERTIES, [encode.string("id")]) + encode.described(
        sections.DATA, encode.binary(body)
    )
    got = delivered(annotations(a=1) + bare)
    assert got.raw[got.bare :] == bare


def test_dead_letters_say_why():
    properties = encode.described(
        sections.APPLICATION_PROPERTIES,
        encode.map_of(
            [
                (encode.string("kept"), encode.ubyte(1)),
                (encode.string("DeadLetterReason"), encode.string("old")),
            ]
        ),
    )
    got = delivered(properties + BODY, dead=("new", "text"))
    assert got.application_properties == {
        "kept": 1,
        "DeadLetterReason": "new",
        "DeadLetterErrorDescription": "text",
    }
    assert delivered(BODY, dead=("", "")).application_properties == {}
    assert delivered(
        encode.fields(sections.PROPERTIES, [encode.string("id")]) + BODY, dead=("r", "")
    ).application_properties == {"DeadLetterReason": "r"}


def test_changed_properties_of_simple_types_only():
    bare = stored.with_properties(BODY, {"a": 1, "b": None, "c": [1], "d": 2**64})
    assert cut(bare).application_properties == {"a": 1, "b": None}
    assert stored.with_properties(BODY, {"c": [1]}) == BODY


def test_a_missing_id_is_added_in_place():
    properties = encode.fields(sections.PROPERTIES, [encode.NULL, encode.binary(b"user")])
    for bare, expected in ((BODY, ["id"]), (properties + BODY, ["id", b"user"])):
        kept = stored.with_fields(stored.to_stored(cut(bare)), {0: encode.string("id")})
        assert cut(kept.bare).properties == expected


def test_hops_and_sources_of_forwarded_messages():
    kept = stored.to_stored(cut(annotations(a=1) + BODY)).forwarded("queue")
    again = stored.unpack(kept.forwarded().pack())
    assert again.hops == 2
    raw = stored.deliver(again.pack(), sequence=1, enqueued_ms=1, delivery_count=0)
    assert cut(raw).annotations["x-opt-deadletter-source"] == "queue"


def test_another_layout_is_refused():
    with pytest.raises(ValueError, match="version 9"):
        stored.unpack(b"\x09" + bytes(40))


LATE = encode.described(
    sections.DELIVERY_ANNOTATIONS,
    encode.map_of([(encode.symbol("x-opt-lock-token"), encode.uuid(UUID(int=7)))]),
)
FOOTER = encode.described(sections.FOOTER, encode.map_of([(encode.symbol("f"), encode.long(1))]))
PROPERTIES = encode.fields(sections.PROPERTIES, [encode.string("id")])


@pytest.mark.parametrize(
    ("raw", "bare"),
    [
        (LATE + PROPERTIES + BODY, PROPERTIES + BODY),
        (annotations(a=1) + LATE + PROPERTIES + BODY, PROPERTIES + BODY),
        (PROPERTIES + LATE + BODY, PROPERTIES + BODY),
        (BODY + BODY + LATE, BODY + BODY),
        (BODY + LATE + FOOTER, BODY + FOOTER),
        (BODY + FOOTER + LATE, BODY + FOOTER),
        (PROPERTIES + LATE, PROPERTIES),
        (annotations(a=1) + LATE, b""),
        (annotations(a=1), b""),
        (LATE, b""),
        (b"", b""),
    ],
    ids=range(11),
)
def test_delivery_annotations_anywhere_and_no_body(raw, bare):
    assert stored.to_stored(cut(raw)).bare == bare
    got = delivered(raw, lock_token=KEY)
    assert got.raw[got.bare :] == bare
    assert UUID(int=7).bytes not in got.raw


def token_of(message):
    return dict(sections.pairs_of(message.delivery_items)).get("x-opt-lock-token", b"")[-16:]


def test_delivery_annotations_of_the_sender_are_delivered_with_our_lock_token():
    pairs = [
        (encode.symbol("mine"), encode.long(1)),
        (encode.symbol("x-opt-lock-token"), encode.uuid(UUID(int=7))),
        (encode.string("yours"), encode.string("snow \u2603")),
    ]
    sent = encode.described(sections.DELIVERY_ANNOTATIONS, encode.map_of(pairs)) + BODY
    kept = stored.to_stored(cut(sent))
    assert stored.unpack(kept.pack()) == kept
    for options in ({"lock_token": KEY, "locked_until_ms": 1}, {}, {"dead": ("r", "d")}):
        got = delivered(sent, **options)
        names = {"mine", "yours"} | ({"x-opt-lock-token"} if "lock_token" in options else set())
        assert dict(sections.pairs_of(got.delivery_items)).keys() == names
        assert token_of(got) == options.get("lock_token", b"")
        assert got.data_items
    moved = stored.unpack(stored.with_fields(kept.forwarded(), {0: encode.string("id")}).pack())
    assert (moved.delivery, moved.hops) == (kept.delivery, 1)


def test_a_message_has_delivery_annotations_always():
    """Empty ones without a lock, as the service writes them."""
    assert encode.described(sections.DELIVERY_ANNOTATIONS, encode.map_of([])) in delivered(BODY).raw
    assert token_of(delivered(BODY, lock_token=KEY)) == KEY


@pytest.mark.parametrize(
    "descriptor",
    [b"\x53\x73", b"\x80" + (0x73).to_bytes(8), encode.symbol("amqp:properties:list")],
    ids=["usual", "long", "symbol"],
)
def test_fields_are_set_whatever_descriptor_the_properties_have(descriptor):
    fields = encode.list_of([encode.NULL, encode.NULL, encode.string("to")])
    body = encode.described(sections.DATA, encode.binary(b"x"))
    kept = stored.to_stored(cut(b"\x00" + descriptor + fields + body))
    changed = stored.with_fields(kept, {0: encode.string("id"), 3: encode.string("label")})
    assert cut(changed.bare).properties == ["id", None, "to", "label"]
    bare = stored.with_properties(kept.bare, {"a": 1})
    assert cut(bare).properties == [None, None, "to"]
    assert cut(bare).application_properties == {"a": 1}
