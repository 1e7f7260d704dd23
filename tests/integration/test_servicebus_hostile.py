"""Messages with odd types, and some that cannot be read at all: each harms itself alone."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import kombu
import pytest
from bus import broker_at, bus_site
from harness import Site, wait_until
from hostilemessages import (
    MALFORMED,
    ODD,
    encoded,
    send_raw,
    taken_as_it_is,
    task_payload,
    with_properties,
)
from ledger_app import flaky, work

import aztask.celery.transport
from aztask import App
from aztask.emulator.amqp import encode, sections
from aztask.message.envelope import Envelope
from aztask.operate.deadletters.view import DeadLetters, Selection
from aztask.queues.base import (
    AnySession,
    Delivery,
    MessageState,
    QueueOptions,
    Receiver,
    Settled,
)
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.queues.servicebus.broker import ServiceBusBroker
from aztask.settlement import Complete, DeadLetter, Defer
from aztask.stores.events.sink import read_events
from aztask.stores.records.base import State
from aztask.testing import RunningEmulator

SEED = 20260719
LEASE = 20.0
ODD_PROPERTIES = {name: raw for name, (raw, _) in ODD.items()}
SHOWN = {name: text for name, (_, text) in ODD.items()}
_names = count(1)


@pytest.fixture
def broker(bus: RunningEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceBusBroker]:
    monkeypatch.setenv(ADMIN_VARIABLE, bus.admin_connection_string)
    with taken_as_it_is():
        made = broker_at(bus)
        yield made
        made.close()


def queue_on(broker: ServiceBusBroker, **options: bool) -> str:
    name = f"hostile-{next(_names)}"
    broker.declare(name, QueueOptions(lease=LEASE, **options))
    return name


def odd(envelope: Envelope) -> bytes:
    return with_properties(encoded(envelope), ODD_PROPERTIES)


def plain(number: int, **properties: str) -> Envelope:
    return Envelope(b"%d" % number, {"n": number}, message_id=f"m{number}", **properties)


def taken(receiver: Receiver, number: int) -> list[Delivery]:
    deliveries: list[Delivery] = []
    until = time.monotonic() + 15
    while len(deliveries) < number and time.monotonic() < until:
        deliveries += receiver.receive(number - len(deliveries), 2.0)
    assert len(deliveries) == number
    return deliveries


def test_odd_types_are_read_in_one_batch_with_their_neighbours(
    bus: RunningEmulator, broker: ServiceBusBroker
) -> None:
    queue = queue_on(broker)
    dice = random.Random(SEED)
    payloads = [odd(plain(n)) for n in range(40)] + [encoded(plain(n)) for n in range(40, 80)]
    dice.shuffle(payloads)
    send_raw(bus.port, queue, payloads)
    receiver = broker.receiver(queue, lease=LEASE)
    deliveries = taken(receiver, 80)
    assert {each.delivery_count for each in deliveries} == {1}
    for each in deliveries:
        number = each.envelope.headers["n"]
        assert each.envelope.body == b"%d" % number
        more = SHOWN if number < 40 else {}
        assert each.envelope.headers == {"n": number, **more}
    peeked = broker.peek(queue)
    assert [each.envelope.problem for each in peeked] == [""] * 80
    assert receiver.settle([(each, Complete()) for each in deliveries]) == [Settled()] * 80


def test_ids_of_every_type_are_received_in_one_batch_with_their_neighbours(
    bus: RunningEmulator, broker: ServiceBusBroker
) -> None:
    queue = queue_on(broker)
    kinds = [
        *(encode.ulong(7), b"\x98" + bytes(range(16)), encode.binary(b"\xff\x00")),
        *(b"\x82" + bytes(8), encode.boolean(True), b"\x83" + bytes(8), encode.symbol("m")),
        *(encode.list_of([encode.uint(1)]), encode.NULL),
    ]
    data = encode.described(sections.DATA, encode.binary(b"0"))
    payloads = [encode.fields(sections.PROPERTIES, [each]) + data for each in kinds]
    good = [encoded(plain(n)) for n in range(len(kinds) + 1)]
    mixed = [each for pair in zip(good, payloads, strict=False) for each in pair] + good[-1:]
    send_raw(bus.port, queue, mixed)
    receiver = broker.receiver(queue, lease=LEASE)
    deliveries = taken(receiver, len(mixed))
    assert {each.delivery_count for each in deliveries} == {1}
    assert [each.envelope.body for each in deliveries[::2]] == [b"%d" % n for n in range(len(good))]
    assert all(isinstance(each.envelope.message_id, str) for each in deliveries)
    results = receiver.settle([(each, Complete()) for each in deliveries])
    assert results == [Settled()] * len(mixed)


def test_what_cannot_be_read_arrives_alone_and_can_be_settled(
    bus: RunningEmulator, broker: ServiceBusBroker
) -> None:
    """It says why, and holds its bytes; in the dead letters too, where a peek finds it."""
    queue = queue_on(broker)
    payloads = []
    for number, spoil in enumerate(MALFORMED.values()):
        payloads += [encoded(plain(number)), spoil(encoded(plain(1000 + number)))]
    send_raw(bus.port, queue, payloads)
    receiver = broker.receiver(queue, lease=LEASE)
    deliveries = taken(receiver, len(payloads))
    good = [each for each in deliveries if not each.envelope.problem]
    bad = [each for each in deliveries if each.envelope.problem]
    assert [each.envelope.body for each in good] == [b"%d" % n for n in range(len(MALFORMED))]
    assert len(bad) == len(MALFORMED)
    assert all("cannot be read" in each.envelope.problem for each in bad)
    for each, sent in zip(bad, payloads[1::2], strict=True):
        assert sent in each.envelope.body
    pairs = [(each, DeadLetter("undecodable", each.envelope.problem)) for each in bad]
    assert receiver.settle([*pairs, *((each, Complete()) for each in good)]) == [Settled()] * len(
        payloads
    )
    letters = broker.peek(queue, dead_letter=True)
    assert [each.dead_letter_reason for each in letters] == ["undecodable"] * len(MALFORMED)
    assert [each.position for each in letters] == [each.position for each in bad]
    assert all(each.envelope.problem for each in letters)
    assert broker.purge(queue, dead_letter=True) == len(MALFORMED)


def test_deferred_messages_too(bus: RunningEmulator, broker: ServiceBusBroker) -> None:
    queue = queue_on(broker)
    spoil = MALFORMED["no type"]
    send_raw(bus.port, queue, [odd(plain(0)), spoil(encoded(plain(1))), encoded(plain(2))])
    receiver = broker.receiver(queue, lease=LEASE)
    deliveries = taken(receiver, 3)
    positions = [each.position for each in deliveries]
    receiver.settle([(each, Defer(60.0, 0.0)) for each in deliveries])
    assert {each.state for each in broker.peek(queue)} == {MessageState.DEFERRED}
    again = receiver.receive_deferred(positions)
    assert [each.position for each in again] == positions
    assert [bool(each.envelope.problem) for each in again] == [False, True, False]
    assert again[0].envelope.headers == {"n": 0, **SHOWN}
    assert receiver.settle([(each, Complete()) for each in again]) == [Settled()] * 3


@pytest.mark.parametrize("session", ["s", AnySession.ANY])
def test_a_session_goes_on_behind_it(
    bus: RunningEmulator, broker: ServiceBusBroker, session: str | AnySession
) -> None:
    queue = queue_on(broker, sessions=True)
    spoil = MALFORMED["no character"]
    envelopes = [plain(n, session="s") for n in range(3)]
    payloads = [odd(envelopes[0]), spoil(encoded(envelopes[1])), encoded(envelopes[2])]
    send_raw(bus.port, queue, payloads, session="s")
    receiver = broker.receiver(queue, lease=LEASE, session=session)
    for number in range(3):
        (delivery,) = taken(receiver, 1)
        assert delivery.session == "s"
        assert bool(delivery.envelope.problem) == (number == 1)
        how = DeadLetter("undecodable") if number == 1 else Complete()
        assert receiver.settle([(delivery, how)]) == [Settled()]
    (letter,) = broker.peek(queue, dead_letter=True)
    assert letter.envelope.problem


def test_a_held_lease_is_given_the_next_one(bus: RunningEmulator, broker: ServiceBusBroker) -> None:
    queue = queue_on(broker)
    spoil = MALFORMED["a size that lies"]
    send_raw(bus.port, queue, [spoil(encoded(plain(0))), encoded(plain(1))])
    app = App("held", broker=bus.connection_string, lease=LEASE)
    with app.receive(queue, wait=10.0) as lease:
        assert lease.body == b"1"
        assert lease.delivery.delivery_count == 1
        lease.complete()
    (letter,) = broker.peek(queue, dead_letter=True)
    assert letter.dead_letter_reason == "undecodable"
    assert "the data at byte" in (letter.dead_letter_description or "")
    app.close()


def test_a_kombu_consumer_never_sees_it(bus: RunningEmulator, broker: ServiceBusBroker) -> None:
    queue = queue_on(broker)
    spoil = MALFORMED["no text"]
    aztask.celery.transport.register()
    with kombu.Connection(
        transport="aztask", transport_options={"broker": bus.connection_string, "lease": LEASE}
    ) as connection:
        message = Envelope(b'"x"', content_type="application/json", content_encoding="utf-8")
        send_raw(bus.port, queue, [spoil(encoded(plain(0))), odd(message)])
        with connection.SimpleQueue(queue) as simple:
            got = simple.get(timeout=15)
            assert got.payload == "x"
            assert got.headers == SHOWN
            got.ack()
    (letter,) = broker.peek(queue, dead_letter=True)
    assert letter.dead_letter_reason == "undecodable"


# -- workers --------------------------------------------------------------------------------------

INNOCENT = 40


@pytest.fixture
def site(bus: RunningEmulator, tmp_path: Path) -> Iterator[Site]:
    options = QueueOptions(lease=LEASE, duplicate_window=600.0)
    with taken_as_it_is(), bus_site(tmp_path / "site", bus, options) as made:
        yield made


def run(site: Site, ids: list[str]) -> None:
    """Have a worker run these, until nothing is left in the queue."""
    worker = site.worker("-Q", "default", "-c", "2", "--lease", f"{LEASE}s")
    app = site.app()
    for each in ids:
        app.result(each).get(timeout=60)
    wait_until(lambda: not app.broker.peek("default"), 20, "all is settled")
    assert worker.stop() == 0, worker.log


def test_innocent_tasks_run_once_with_no_delivery_more(bus: RunningEmulator, site: Site) -> None:
    """Beside as many with odd properties, which run too, and some that cannot be read."""
    app, dice = site.app(), random.Random(SEED)
    innocent, strange = [f"t{n}" for n in range(INNOCENT)], [f"odd{n}" for n in range(INNOCENT)]
    payloads = [task_payload(app.codec, work.name, [each], each) for each in innocent]
    for each in strange:
        name = dice.choice(sorted(ODD_PROPERTIES))
        raw = task_payload(app.codec, work.name, [each], each)
        payloads.append(with_properties(raw, {name: ODD_PROPERTIES[name]}))
    for name, spoil in MALFORMED.items():
        payloads.append(spoil(task_payload(app.codec, work.name, [name], name)))
    dice.shuffle(payloads)
    send_raw(bus.port, "default", payloads)
    run(site, innocent + strange)
    assert site.counts("end") == dict.fromkeys(innocent + strange, 1)
    received = [event for event in read_events(site.events) if event.event == "received"]
    assert {event.delivery_count for event in received} == {1}
    letters = app.broker.peek("default", dead_letter=True)
    assert [each.dead_letter_reason for each in letters] == ["undecodable"] * len(MALFORMED)
    assert all(each.dead_letter_description for each in letters)


def test_a_retry_carries_odd_properties_on(bus: RunningEmulator, site: Site) -> None:
    """The clone of each retry is written anew: as text, which says the same."""
    app = site.app()
    raw = task_payload(app.codec, flaky.name, ["odd", 2], "odd")
    send_raw(bus.port, "default", [with_properties(raw, ODD_PROPERTIES)])
    (first,) = app.broker.peek("default")
    extra = {name: first.envelope.headers[name] for name in ODD_PROPERTIES}
    assert extra == SHOWN
    run(site, ["odd"])
    assert site.counts("start") == {"odd": 3}
    assert app.results is not None
    assert app.results.history("odd")[-1].state is State.SUCCEEDED
    assert not app.broker.peek("default", dead_letter=True)


def test_dead_letters_that_cannot_be_read_are_listed_shown_kept_and_purged(
    bus: RunningEmulator, site: Site
) -> None:
    app = site.app()
    spoil = MALFORMED["no type"]
    payloads = [
        spoil(task_payload(app.codec, work.name, ["bad"], "bad")),
        task_payload(app.codec, "no.such.task", ["good"], "good"),
    ]
    send_raw(bus.port, "default", payloads)
    receiver = app.broker.receiver("default", lease=LEASE)
    for delivery in taken(receiver, 2):
        receiver.settle([(delivery, DeadLetter("undecodable", delivery.envelope.problem))])
    bad, _ = DeadLetters(app, "default").list()
    assert bad.message is None
    assert "0x2f is not an AMQP type" in bad.problem
    assert payloads[0][-4:] in bad.envelope.body
    listed = [json.loads(line) for line in dlq(site, "list", "--json").splitlines()]
    assert [each["id"] for each in listed] == [bad.id, "good"]
    shown = json.loads(dlq(site, "show", bad.id, "--json"))
    assert "0x2f is not an AMQP type" in shown["problem"]
    report = DeadLetters(app, "default").replay(Selection(everything=True))
    assert (report.done, report.lost, report.unreadable) == (1, 0, 1)
    assert [each.envelope.headers["id"] for each in app.broker.peek("default")] == ["good"]
    assert "could not be read or sent again, so not replayed" in dlq(
        site, "replay", "--all", "--yes"
    )
    assert [each.id for each in DeadLetters(app, "default").list()] == [bad.id]
    dlq(site, "purge", bad.id, "--yes")
    assert DeadLetters(app, "default").list() == []


def dlq(site: Site, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "aztask", "-A", "ledger_app", "dlq", *arguments, "-Q", "default"],
        env=site.environment,
        cwd=site.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout if "--json" in arguments else done.stdout + done.stderr
