"""Links that receive."""

from __future__ import annotations

from uuid import UUID

import pytest
from amqpwire import dispose
from emulatorbench import body_of, message

from aztask.emulator.amqp import encode, outgoing
from aztask.emulator.broker.consumer import SESSION_FILTER, guid_bytes
from aztask.emulator.broker.entities import EntityKind, Status

KEY = bytes(range(16))


def test_tags_are_in_the_order_of_guids():
    identifier = UUID(bytes=KEY)
    assert guid_bytes(KEY) == identifier.bytes_le


NEXT_SESSION = encode.map_of([(encode.symbol(SESSION_FILTER), encode.NULL)])


def named(session):
    return encode.map_of([(encode.symbol(SESSION_FILTER), encode.string(session))])


def accepted(answers):
    return [each for each in answers if type(each).__name__ == "Attach" and each.source]


def test_messages_are_locked_until_settled(bench):
    bench.create("q")
    bench.put("q", message(b"a"))
    client = bench.client()
    client.attach(receive=True)
    (transfer,) = client.receive(5)
    assert body_of(transfer.payload) == b"a"
    assert not transfer.settled
    assert bench.engine.stats("q").leased == 1
    dispose(client, transfer.delivery_id, state=outgoing.ACCEPTED)
    client.frames()
    assert sum(bench.engine.stats("q")) == 0


def test_a_receive_and_delete_link_locks_nothing(bench):
    bench.create("q")
    bench.put("q", message(b"a"))
    client = bench.client()
    client.attach(receive=True, settled=1)
    (transfer,) = client.receive(5)
    assert (transfer.settled, transfer.delivery_tag) == (True, b"")
    assert sum(bench.engine.stats("q")) == 0


@pytest.mark.parametrize(
    ("settings", "address", "filters", "condition"),
    [
        ({}, "missing", None, "amqp:not-found"),
        ({"kind": EntityKind.TOPIC}, "q", None, "amqp:not-allowed"),
        ({"status": Status.DISABLED}, "q", None, "com.microsoft:entity-disabled"),
        ({"sessions": True}, "q", None, "amqp:not-allowed"),
        ({}, "q", NEXT_SESSION, "amqp:not-allowed"),
        ({"sessions": True}, "q/$DeadLetterQueue", NEXT_SESSION, "amqp:not-allowed"),
        ({"kind": EntityKind.TOPIC}, "q/$Transfer/$DeadLetterQueue", None, "amqp:not-allowed"),
    ],
)
def test_links_that_are_refused(bench, settings, address, filters, condition):
    bench.create("q", **settings)
    answers = bench.client().attach(receive=True, address=address, filters=filters)
    assert answers[0].source is None
    assert answers[-1].error.value[0] == condition


def test_a_waiting_link_accepts_one_session_per_turn(bench):
    """Two attempts in one transaction would accept two sessions and lose one of them."""
    bench.create("q", sessions=True)
    client = bench.client()
    assert client.attach(receive=True, filters=NEXT_SESSION) == []
    bench.put("q", message(b"a", session="one"), message(b"b", session="two"))
    client.handler.tick()
    client.handler.tick()
    (answer,) = accepted(client.frames())
    assert answer.source.value[7][SESSION_FILTER] == "one"
    (other,) = accepted(bench.client().attach(receive=True, filters=NEXT_SESSION))
    assert other.source.value[7][SESSION_FILTER] == "two"


def test_a_locked_session_is_refused_and_is_free_when_its_link_ends(bench):
    bench.create("q", sessions=True)
    first, second = bench.client(), bench.client()
    assert accepted(first.attach(receive=True, filters=named("one")))
    refusal = second.attach(receive=True, filters=named("one"))[-1]
    assert refusal.error.value[0] == "com.microsoft:session-cannot-be-locked"
    first.detach(0)
    second.detach(0)
    assert accepted(second.attach(receive=True, filters=named("one")))


def test_a_link_without_a_session_times_out(bench):
    bench.create("q", sessions=True)
    client = bench.client()
    assert client.attach(receive=True, filters=NEXT_SESSION) == []
    bench.now += 66
    client.handler.tick()
    assert client.frames()[-1].error.value[0] == "com.microsoft:timeout"


def test_a_link_ends_with_the_lock_of_its_session(bench):
    bench.create("q", sessions=True, lock_seconds=10)
    client, deleting = bench.client(), bench.client()
    client.attach(receive=True, filters=named("one"))
    deleting.attach(receive=True, filters=named("two"), settled=1)
    for _ in range(4):
        bench.now += 3
        client.handler.tick()
        deleting.handler.tick()
        bench.turn()
    assert client.frames()[-1].error.value[0] == "com.microsoft:session-lock-lost"
    assert deleting.frames() == []  # renewed by the emulator: its client never renews
