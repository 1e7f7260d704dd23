"""What the server writes: clients that find fields by their positions find every field."""

from __future__ import annotations

import pytest

from aztask.emulator.amqp import AmqpError, encode, outgoing
from aztask.emulator.amqp.decode import decode
from aztask.emulator.amqp.performatives import (
    Attach,
    Begin,
    Close,
    Detach,
    Disposition,
    End,
    Flow,
    Open,
    Transfer,
    parse,
)

TAG = bytes(16)
WHOLE = outgoing.transfer_frame(1, 2, 3, TAG, settled=False, payload=b"payload")
REASON = AmqpError("amqp:not-found", "gone")
SOURCE = encode.described(0x28, encode.list_of([encode.string("q")]))


def attach(receiver):
    return outgoing.attach(
        "name",
        0,
        receiver=receiver,
        modes=(0, 1),
        source=SOURCE,
        target=encode.NULL,
        max_message_size=0,
    )


WRITTEN = [
    (Open, outgoing.open_("container", 512, 1, 1000)),
    (Begin, outgoing.begin(1, 0, 100, 7)),
    (Attach, attach(True)),
    (Attach, attach(False)),
    (Flow, outgoing.flow((0, 1, 2, 3))),
    (Flow, outgoing.flow((0, 1, 2, 3), (4, 5, 6), drain=True)),
    (Transfer, WHOLE[8:]),
    (Transfer, outgoing.transfer_frame(1, 2, 3, b"", settled=True, payload=b"")[8:]),
    (Transfer, outgoing.transfer_start(2, 3, TAG, True)),
    (Transfer, outgoing.transfer_continued(2, True)),
    (Disposition, outgoing.disposition(False, 1, 1, outgoing.ACCEPTED)),
    (Disposition, outgoing.disposition(False, 1, 5, outgoing.ACCEPTED)),
    (Disposition, outgoing.disposition(True, 1, 1, outgoing.rejected("x:y", "z" * 250))),
    (Detach, outgoing.detach(1, True)),
    (Detach, outgoing.detach(1, True, REASON)),
    (End, outgoing.end()),
    (End, outgoing.end(REASON)),
    (Close, outgoing.close()),
    (Close, outgoing.close(REASON)),
]


@pytest.mark.parametrize(("kind", "body"), WRITTEN, ids=[kind.__name__ for kind, _ in WRITTEN])
def test_every_field_is_written(kind, body):
    described, end = decode(body)
    assert len(described.value) == len(kind.TYPES)
    assert type(parse(body)) is kind
    assert body[end:] == (b"payload" if body == WHOLE[8:] else b"")


def test_written_performatives_have_the_given_values():
    assert parse(WHOLE[8:]) == Transfer(2, 3, TAG, 0, False, payload=b"payload")
    settled = outgoing.transfer_frame(1, 2, 300, TAG, settled=True, payload=b"")
    assert parse(settled[8:]) == Transfer(2, 300, TAG, 0, True)
    assert int.from_bytes(WHOLE[:4]) == len(WHOLE)
    untagged = outgoing.transfer_frame(1, 2, 300, b"", settled=True, payload=b"payload")
    assert parse(untagged[8:]) == Transfer(2, 300, b"", 0, True, payload=b"payload")
    assert int.from_bytes(untagged[:4]) == len(untagged)
    ranged = parse(outgoing.disposition(False, 1, 5, outgoing.ACCEPTED))
    assert (ranged.role, ranged.first, ranged.last, ranged.settled) == (False, 1, 5, True)
