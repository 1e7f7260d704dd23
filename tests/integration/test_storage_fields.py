"""One field of one text of a Storage queue, of every kind: it harms no other message of its batch.

Each such message lies between two good ones. The good ones are shown, received, listed, replayed
and purged as if it were not there. It does the same, or ends as a dead letter that says why.
"""

from __future__ import annotations

import base64
import itertools
import time
from collections.abc import Iterator
from typing import Any, Final

import msgpack
import pytest
from azurite import Azurite
from ledger_app import work
from storage import broker_at

from aztask import App
from aztask.errors import CodecError
from aztask.message.message import TaskMessage
from aztask.operate.deadletters.view import DeadLetters, Selection
from aztask.queues.delivery import Delivery, Settled
from aztask.queues.storagequeue.broker import StorageQueueBroker
from aztask.queues.storagequeue.wire import TEXT_LIMIT, text_of
from aztask.settlement import DeadLetter

ALL = Selection(everything=True)
SECONDS = 30.0
_names = itertools.count(1)

VALUES: Final[tuple[Any, ...]] = (
    *(None, True, -(2**63), 2**64 - 1, float("nan"), float("inf"), float("-inf"), 1e308, -1e308),
    *("\x1b[2J\u202e\x00", b"\xff\x00", ["a", 1], {"a": {"b": 1}}),
    *(msgpack.ExtType(7, b"x"), msgpack.Timestamp(2**40)),
)
"""15 values: with the good ones around them, as many messages as a Storage queue shows."""

FIELDS: Final = ("v", "headers", "properties", "body")
PROPERTIES: Final = (
    *("message_id", "content_type", "content_encoding", "subject", "correlation_id"),
    *("partition_key", "expires_at", "due", "delay", "hidden", "dead", "properties", "unknown"),
)
HEADERS: Final = ("id", "task", "lang", "generation", "resubmit", "eta", "expires", "own")
PLACES: Final = [
    *(("fields", name) for name in FIELDS),
    *(("properties", name) for name in PROPERTIES),
    *(("headers", name) for name in HEADERS),
]


@pytest.fixture
def broker(azurite: Azurite) -> Iterator[StorageQueueBroker]:
    made = broker_at(azurite.connection_string)
    yield made
    made.close()


def text(app: App, task_id: str) -> str:
    """A task as our own sender writes it."""
    body, content_type, encoding = app.codec.encode_arguments([task_id], {})
    message = TaskMessage(task_id, work.name, "default", body, content_type, encoding)
    return text_of(app.codec.to_envelope(message))


def packed(fields: Any) -> str:
    return base64.b64encode(msgpack.packb(fields)).decode()


def spoilt(good: str, where: str, name: str, value: Any) -> str:
    fields = msgpack.unpackb(base64.b64decode(good))
    place = fields if where == "fields" else fields[where]
    place[name] = value
    return packed(fields)


def full(good: str) -> str:
    """Due in a year, and without room for the note that it was received too early."""
    fields = msgpack.unpackb(base64.b64decode(good))
    fields["properties"]["due"] = time.time() + 365 * 86400.0
    size = TEXT_LIMIT // 4 * 3 - len(msgpack.packb({**fields, "body": b""})) - 2
    fields["body"] = bytes(size)
    made = packed(fields)
    assert TEXT_LIMIT - 8 < len(made) <= TEXT_LIMIT
    return made


def texts_of(good: str) -> list[str]:
    """Texts that are wrong as a whole."""
    data = base64.b64decode(good)
    return [
        full(good),
        "no base64",
        "\N{GRINNING FACE} <&>\"'",
        base64.b64encode(b"").decode(),
        base64.b64encode(b"\xc1").decode(),
        base64.b64encode(data[:-5]).decode(),
        base64.b64encode(data + b"\x00").decode(),
        base64.b64encode(b"\x91" * 5000).decode(),
        base64.b64encode(b"\xdf\xff\xff\xff\xff").decode(),
        good[:-1],
        packed([1, 2]),
        packed({1: 2}),
        packed({b"\xff": 1}),
    ]


def id_in(app: App, envelope: Any, queue: str) -> str:
    """The id of the task; "" if it cannot be read, and then it says why."""
    try:
        return app.message_in(envelope, queue, "1", any_age=True).id
    except CodecError as error:
        assert str(error)
        return ""


def check(azurite: Azurite, broker: StorageQueueBroker, bad: list[str]) -> None:
    app, queue = App("fields", broker=azurite.connection_string), f"fields-{next(_names)}"
    broker.declare(queue)
    messages = broker._client.messages(queue)
    good = [f"good-{number}" for number in range(len(bad) + 1)]
    for number, task_id in enumerate(good):
        messages.put(text(app, task_id), 0, seconds=SECONDS)
        if number < len(bad):
            messages.put(bad[number], 0, seconds=SECONDS)
    expected = set(good)
    assert expected <= {id_in(app, each.envelope, queue) for each in broker.peek(queue)}

    receiver = broker.receiver(queue, lease=120.0)
    deliveries: list[Delivery] = []
    while page := receiver.receive(32, 1.0):
        deliveries += page
    ids = [id_in(app, each.envelope, queue) for each in deliveries]
    assert expected <= set(ids)
    ones = [each for each, name in zip(deliveries, ids, strict=True) if name in expected]
    assert {each.delivery_count for each in ones} == {1}
    reasons = [DeadLetter("rejected" if name else "undecodable", "why") for name in ids]
    answers = receiver.settle(list(zip(deliveries, reasons, strict=True)))
    assert answers == [Settled()] * len(deliveries)
    receiver.close()

    letters = DeadLetters(app, queue)
    listed = list(letters.find(ALL))
    assert expected <= {each.id for each in listed}
    assert all(each.reason for each in listed)
    total = sum(each.count for each in letters.groups())
    assert total == letters.count(ALL) == len(listed)
    report = letters.replay(ALL)
    assert (report.done, report.lost, report.unreadable) == (total, 0, 0)
    assert letters.count(ALL) == 0
    receiver = broker.receiver(queue, lease=120.0)
    again: set[str] = set()
    while page := receiver.receive(32, 1.0):
        again |= {id_in(app, each.envelope, queue) for each in page}
    assert expected <= again
    receiver.close()
    assert broker.purge(queue) >= len(good)
    assert broker.peek(queue) == []
    app.close()


@pytest.mark.parametrize(("where", "name"), PLACES)
def test_the_messages_around_it_do_not_notice(
    where: str, name: str, azurite: Azurite, broker: StorageQueueBroker
) -> None:
    app = App("fields", broker=azurite.connection_string)
    bad = [
        spoilt(text(app, f"odd-{number}"), where, name, value)
        for number, value in enumerate(VALUES)
    ]
    app.close()
    check(azurite, broker, bad)


def test_texts_that_are_wrong_as_a_whole_harm_no_other(
    azurite: Azurite, broker: StorageQueueBroker
) -> None:
    app = App("fields", broker=azurite.connection_string)
    bad = texts_of(text(app, "odd"))
    app.close()
    check(azurite, broker, bad)
