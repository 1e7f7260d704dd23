"""One field of one message, of every AMQP type: it harms no other message of its batch.

Each such message lies between two good ones. The good ones are shown, received, listed, replayed
and purged as if it were not there. It does the same, or ends as a dead letter that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest
from bus import broker_at, bus_site
from harness import Site, wait_until
from hostilemessages import ODD, send_raw, taken_as_it_is, task_payload, with_properties
from ledger_app import work

from aztask import App
from aztask.emulator.amqp import encode, sections
from aztask.errors import CodecError
from aztask.operate.deadletters.view import DeadLetters, Selection
from aztask.queues.base import Delivery, Position, QueueOptions
from aztask.queues.delivery import Settled
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.queues.servicebus.broker import ServiceBusBroker
from aztask.queues.servicebus.reading import read_message
from aztask.queues.servicebus.wire import EXPIRES_AT, PACKED
from aztask.settlement import DeadLetter
from aztask.testing import RunningEmulator

LEASE = 60.0
ALL = Selection(everything=True)
_names = count(1)

TIMES: Final = {
    "timestamp": encode.timestamp(4_102_444_800_000),
    "last timestamp": encode.timestamp(2**63 - 1),
    "first timestamp": encode.timestamp(-(2**63)),
}
VALUES: Final[dict[str, bytes]] = {
    "null": encode.NULL,
    "true": encode.TRUE,
    "boolean": b"\x56\x00",
    "ubyte": encode.ubyte(200),
    "ushort": encode.ushort(60_000),
    "uint": encode.uint(2**32 - 1),
    "ulong": encode.ulong(2**64 - 1),
    "byte": b"\x51\x80",
    "short": b"\x61\x80\x00",
    "int": encode.int32(-(2**31)),
    "long": encode.long(-(2**63)),
    "float": b"\x72\x3f\x80\x00\x00",
    "double": encode.double(1.0),
    "not a number": encode.double(float("nan")),
    "infinite": encode.double(float("inf")),
    "minus infinite": encode.double(float("-inf")),
    **{name: raw for name, (raw, _) in ODD.items()},
    "decimal one": bytes.fromhex("94 3040000000000000 0000000000000001"),
    **TIMES,
    "binary": encode.binary(b"\xff\x00\xfe"),
    "empty binary": encode.binary(b""),
    "string": encode.string("\x1b[2J\u202e\x00"),
    "empty string": encode.string(""),
    "long string": encode.string("x" * 3000),
    "no text": b"\xa1\x02\xff\xfe",
    "surrogate": b"\xa1\x03\xed\xa0\x80",
    "symbol": encode.symbol("s"),
    "symbol of no text": b"\xa3\x02\xff\xfe",
    "list": encode.list_of([encode.string("a"), encode.uint(1)]),
    "empty list": encode.list_of([]),
    "map": encode.map_of([(encode.string("a"), encode.uint(1))]),
    "array": encode.string_array(["a", "b"]),
    "described": b"\x00" + encode.symbol("some:type") + encode.string("a"),
    "no type": b"\x2f",
}
"""An encoded value of each AMQP type, with its extremes, and some that are malformed."""

PROPERTIES: Final = (
    *("message-id", "user-id", "to", "subject", "reply-to", "correlation-id", "content-type"),
    *("content-encoding", "absolute-expiry-time", "creation-time", "group-id", "group-sequence"),
    "reply-to-group-id",
)
HEADERS: Final = ("durable", "priority", "ttl", "first-acquirer", "delivery-count")
ANNOTATIONS: Final = (
    *("x-opt-enqueued-time", "x-opt-sequence-number", "x-opt-locked-until", "x-opt-message-state"),
    *("x-opt-partition-key", "x-opt-enqueue-sequence-number", "x-opt-deadletter-source", "x-own"),
)
APPLICATION: Final = (
    *("id", "task", "lang", "generation", "resubmit", "eta", "expires", "aztask-unknown", "own"),
    *(PACKED, EXPIRES_AT, "DeadLetterReason", "DeadLetterErrorDescription"),
)


def in_properties(place: str, raw: bytes, value: bytes) -> bytes:
    known: Any = read_message(raw).properties
    items = [encode.simple(each) for each in known]
    items += [encode.NULL] * (len(PROPERTIES) - len(items))
    items[PROPERTIES.index(place)] = value
    return encode.fields(sections.PROPERTIES, items) + raw[sections.cut(raw).application_start :]


def in_header(place: str, raw: bytes, value: bytes) -> bytes:
    items = [encode.NULL] * len(HEADERS)
    items[HEADERS.index(place)] = value
    return encode.fields(sections.HEADER, items) + raw


def in_annotations(place: str, raw: bytes, value: bytes) -> bytes:
    pair = (encode.symbol(place), value)
    return encode.described(sections.MESSAGE_ANNOTATIONS, encode.map_of([pair])) + raw


def in_application(place: str, raw: bytes, value: bytes) -> bytes:
    return with_properties(raw, {place: value})


def as_section(place: str, raw: bytes, value: bytes) -> bytes:
    """A whole section is of that type: in front of the message, or behind it."""
    section = encode.described(SECTIONS[place], value)
    if SECTIONS[place] < sections.PROPERTIES:
        return section + raw
    if SECTIONS[place] < sections.DATA:
        return section + raw[sections.cut(raw).application_start :]
    return raw + section


SECTIONS: Final = {
    name: getattr(sections, name.upper().replace(" ", "_"))
    for name in (
        *("header", "delivery annotations", "message annotations", "properties"),
        *("data", "amqp sequence", "amqp value", "footer"),
    )
}

Spoil = Callable[[str, bytes, bytes], bytes]
GROUPS: Final[dict[str, tuple[Spoil, tuple[str, ...]]]] = {
    "properties": (in_properties, PROPERTIES),
    "header": (in_header, HEADERS),
    "annotations": (in_annotations, ANNOTATIONS),
    "application properties": (in_application, APPLICATION),
    "sections": (as_section, tuple(SECTIONS)),
}


def spoilt(app: App, group: str, without: tuple[str, ...] = ()) -> tuple[list[bytes], list[str]]:
    """(messages, ids of the good ones): good, odd, good, odd, ..., good; each a task."""
    spoil, all_places = GROUPS[group]
    places = [each for each in all_places if each not in without]
    made, good = [], []

    def task(task_id: str) -> bytes:
        return task_payload(app.codec, work.name, [task_id], task_id)

    for number, (place, kind) in enumerate((p, k) for p in places for k in VALUES):
        good.append(f"good-{group.split(maxsplit=1)[0]}-{number}")
        made.append(task(good[-1]))
        made.append(spoil(place, task(f"odd {place} {kind}".replace(" ", "-")), VALUES[kind]))
    good.append(f"good-{group.split(maxsplit=1)[0]}-last")
    return [*made, task(good[-1])], good


@pytest.fixture
def broker(bus: RunningEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceBusBroker]:
    monkeypatch.setenv(ADMIN_VARIABLE, bus.admin_connection_string)
    with taken_as_it_is():
        made = broker_at(bus)
        yield made
        made.close()


def all_peeked(broker: ServiceBusBroker, queue: str) -> list[Any]:
    found: list[Any] = []
    after: Position | None = None
    while page := broker.peek(queue, after=after, limit=250):
        found += page
        after = page[-1].position
    return found


def all_received(receiver: Any) -> list[Delivery]:
    """What is in the queue; those that a strange time to live let expire are dead letters."""
    found: list[Delivery] = []
    while page := receiver.receive(250, 3.0):
        found += page
    return found


def id_in(app: App, envelope: Any, queue: str) -> str:
    """The id of the task; "" if it cannot be read, and then it says why."""
    try:
        return app.message_in(envelope, queue, 1, any_age=True).id
    except CodecError as error:
        assert str(error)
        return ""


@pytest.mark.parametrize("group", GROUPS)
def test_the_messages_around_it_do_not_notice(
    group: str, bus: RunningEmulator, broker: ServiceBusBroker
) -> None:
    app = App("fields", broker=bus.connection_string, lease=LEASE)
    queue = f"fields-{next(_names)}"
    broker.declare(queue, QueueOptions(lease=LEASE))
    payloads, good = spoilt(app, group)
    send_raw(bus.port, queue, payloads)
    expected = set(good)
    assert expected <= {id_in(app, each.envelope, queue) for each in all_peeked(broker, queue)}

    receiver = broker.receiver(queue, lease=LEASE)
    deliveries = all_received(receiver)
    ids = [id_in(app, each.envelope, queue) for each in deliveries]
    assert expected <= set(ids)
    ones = [each for each, name in zip(deliveries, ids, strict=True) if name in expected]
    assert {each.delivery_count for each in ones} == {1}
    answers = receiver.settle(
        [
            (each, DeadLetter("rejected" if name else "undecodable", each.envelope.problem))
            for each, name in zip(deliveries, ids, strict=True)
        ]
    )
    assert answers == [Settled()] * len(deliveries)
    receiver.close()

    letters = DeadLetters(app, queue)
    listed = list(letters.find(ALL))
    assert expected <= {each.id for each in listed}
    assert all(each.reason for each in listed)
    total = sum(each.count for each in letters.groups())
    assert total == letters.count(ALL) == len(payloads)
    report = letters.replay(ALL)
    assert (report.lost, report.held_back) == (0, 0)
    assert report.done + report.unreadable == total
    assert expected <= {id_in(app, each.envelope, queue) for each in all_peeked(broker, queue)}
    assert letters.purge(ALL).done == report.unreadable
    assert letters.count(ALL) == 0
    broker.purge(queue)
    assert all_peeked(broker, queue) == []
    app.close()


@pytest.fixture
def site(bus: RunningEmulator, tmp_path: Path) -> Iterator[Site]:
    options = QueueOptions(lease=LEASE, duplicate_window=600.0)
    with taken_as_it_is(), bus_site(tmp_path / "site", bus, options) as made:
        yield made


def test_a_worker_runs_what_it_can_read_and_dead_letters_the_rest(
    bus: RunningEmulator, site: Site
) -> None:
    """Other than one of an unknown task or for another time, which waits."""
    app = site.app()
    payloads, good = [], []
    for group in GROUPS:
        more, ids = spoilt(app, group, without=("task", "eta"))
        payloads += more
        good += ids
    send_raw(bus.port, "default", payloads)
    worker = site.worker("-Q", "default", "-c", "8", "--pool", "threads", "--lease", f"{LEASE}s")
    wait_until(lambda: set(good) <= set(site.counts("end")), 180, "the good ones have run")
    wait_until(lambda: not app.broker.peek("default"), 120, "all is settled")
    assert worker.stop(60) == 0, worker.log
    counts = site.counts("end")
    assert {each: counts[each] for each in good} == dict.fromkeys(good, 1)
    assert "Traceback" not in worker.log
    letters = list(DeadLetters(app, "default").find(ALL))
    assert all(each.reason for each in letters)
    assert len(letters) > 50
