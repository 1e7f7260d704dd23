"""Messages, split into their sections."""

from __future__ import annotations

from uuid import UUID

import pytest

from aztask.emulator.amqp import AmqpError, encode, sections
from aztask.emulator.amqp.sections import cut

BODY = encode.described(sections.DATA, encode.binary(b"body"))
LATE = encode.described(
    sections.DELIVERY_ANNOTATIONS,
    encode.map_of([(encode.symbol("x-opt-lock-token"), encode.uuid(UUID(int=7)))]),
)
FOOTER = encode.described(sections.FOOTER, encode.map_of([(encode.symbol("f"), encode.long(1))]))
PROPERTIES = encode.fields(sections.PROPERTIES, [encode.string("id")])


@pytest.mark.parametrize(
    "raw",
    [
        LATE + BODY + LATE,
        BODY + LATE * 1000,
        BODY + encode.fields(sections.DELIVERY_ANNOTATIONS, []),
        BODY + LATE[:-1],
        BODY + PROPERTIES,
        FOOTER + BODY,
    ],
    ids=range(6),
)
def test_sections_out_of_order_are_refused(raw):
    with pytest.raises(AmqpError):
        cut(raw)


def test_every_section_is_found():
    raw = (
        encode.fields(sections.HEADER, [encode.TRUE])
        + encode.described(
            sections.MESSAGE_ANNOTATIONS, encode.map_of([(encode.symbol("a"), encode.long(1))])
        )
        + PROPERTIES
        + encode.described(
            sections.APPLICATION_PROPERTIES, encode.map_of([(encode.string("k"), encode.long(2))])
        )
        + BODY
        + BODY
        + FOOTER
    )
    found = cut(raw)
    assert (found.header, found.properties) == ([True], ["id"])
    assert (found.annotations, found.annotation_count) == ({"a": 1}, 2)
    assert found.application_properties == {"k": 2}
    assert [raw[start:end] for start, end in found.data_items] == [b"body"] * 2
    assert found.footer == {"f": 1}
    assert raw[found.bare :].startswith(PROPERTIES)
    assert found.property(sections.MESSAGE_ID) == "id"
    assert found.property(sections.GROUP_ID) is None


def test_symbolic_descriptors_are_understood():
    named = b"\x00" + encode.symbol("amqp:amqp-value:*") + encode.string("x")
    assert sections.value_body(cut(named)) == "x"


def test_pairs_of_a_map_section():
    pairs = [(encode.string("k"), encode.long(2)), (encode.string("l"), encode.NULL)]
    raw = encode.described(sections.APPLICATION_PROPERTIES, encode.map_of(pairs))
    assert sections.pairs_of(sections.map_body(raw, 0)) == [
        ("k", encode.string("k") + encode.long(2)),
        ("l", encode.string("l") + encode.NULL),
    ]


@pytest.mark.parametrize(
    "raw",
    [
        b"body",
        encode.described(sections.DATA, encode.string("text")),
        encode.described(sections.DATA, b"\xa0\x05bod"),
        encode.described(sections.PROPERTIES, encode.map_of([])),
        encode.described(0x79, encode.NULL),
    ],
    ids=range(5),
)
def test_malformed_sections_are_refused(raw):
    with pytest.raises(AmqpError, match="decode-error"):
        cut(raw)


@pytest.mark.parametrize(
    "raw",
    [
        encode.described(0x74, encode.map_of([(encode.string("a"), encode.string("x" * 66_000))])),
        encode.described(0x72, encode.map_of([(encode.symbol("a"), encode.string("x" * 66_000))]))
        + encode.described(0x77, encode.NULL),
        encode.fields(0x73, [encode.NULL, encode.binary(b"x" * 66_000)])
        + encode.described(0x77, encode.string("body")),
    ],
    ids=["no body", "annotations", "the properties section"],
)
def test_a_message_has_at_most_64_kb_before_its_body(raw):
    with pytest.raises(AmqpError, match="bytes of properties"):
        sections.check_properties(cut(raw))


@pytest.mark.parametrize("count", [1, 3])
def test_a_body_may_be_larger(count):
    body = encode.described(0x75, encode.binary(bytes(70_000)))
    sections.check_properties(cut(body * count))
    sections.check_properties(cut(encode.described(0x77, encode.binary(bytes(70_000)))))
