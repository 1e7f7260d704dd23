"""Transactions: work is done at the discharge, all of it or nothing."""

from __future__ import annotations

from uuid import UUID

import pytest
from amqpwire import dispose, uuid_array
from emulatorbench import body_of, message

from aztask.emulator.amqp import encode, outgoing, sections
from aztask.emulator.amqp.link import COORDINATOR
from aztask.emulator.amqp.outgoing import frame
from aztask.emulator.broker import stored, transactions
from aztask.emulator.broker.consumer import SESSION_FILTER
from aztask.emulator.broker.transactions import MAX_MESSAGES, TIMEOUT_SECONDS, transactional
from aztask.queues.engine import number_of

CONTROL, SENDER, RECEIVER = 9, 0, 1


class Controller:
    """A client with a control link, and links to the queue ``q``."""

    def __init__(self, bench):
        self.client = bench.client()
        self.numbers = iter(range(10_000))
        coordinator = encode.described(COORDINATOR, encode.list_of([]))
        fields = [encode.string("control"), encode.uint(CONTROL), encode.FALSE, *[encode.NULL] * 3]
        self.client.feed(frame(0, encode.fields(0x12, [*fields, coordinator])))
        assert self.client.frames()[0].target.descriptor == COORDINATOR
        self.client.attach(receive=False, handle=SENDER, name="s")
        self.client.attach(receive=True, handle=RECEIVER, name="r")

    def control(self, code, *items, settled=False):
        body = encode.described(code, encode.list_of(list(items)))
        payload = encode.described(sections.AMQP_VALUE, body)
        number = next(self.numbers)
        answers = self.client.send(number, payload, handle=CONTROL, settled=settled)
        return outcome(answers)

    def declare(self):
        descriptor, (number,) = self.control(0x31)
        assert descriptor == 0x33
        return number

    def discharge(self, number, *, fail=False):
        return self.control(0x32, encode.binary(number), encode.boolean(fail))

    def send(self, number, body, **options):
        state = transactional(number, encode.NULL)
        return outcome(self.client.send(next(self.numbers), body, state=state, **options))

    def settle(self, number, delivery, state=outgoing.ACCEPTED):
        dispose(self.client, delivery, state=transactional(number, state))
        return outcome(self.client.frames())


def outcome(answers):
    """The descriptor and the value of the one disposition; an error as its condition."""
    (answer,) = [each for each in answers if type(each).__name__ == "Disposition"]
    assert answer.settled
    value = answer.state.value
    if answer.state.descriptor == 0x25:
        value = value[0].value[0]
    return answer.state.descriptor, value


@pytest.fixture
def controller(bench):
    bench.create("q", max_deliveries=3)
    return Controller(bench)


def counts(bench, path="q"):
    found = bench.engine.stats(path)._asdict()
    return {name: number for name, number in found.items() if number}


def test_nothing_is_done_before_the_discharge(bench, controller):
    bench.put("q", message(b"in"))
    assert len(controller.client.receive(1, handle=RECEIVER)) == 1
    number = controller.declare()
    descriptor, (named, state) = controller.send(number, message(b"out"))
    assert (descriptor, named, state.descriptor) == (0x34, number, 0x24)
    assert controller.settle(number, 0)[0] == 0x34
    assert counts(bench) == {"leased": 1}
    assert controller.discharge(number) == (0x24, [])
    assert counts(bench) == {"active": 1}
    assert len(bench.broker.locks) == 0
    assert controller.discharge(number) == (0x25, "amqp:transaction:unknown-id")


def test_a_rollback_does_nothing_and_leaves_the_lock(bench, controller):
    bench.put("q", message(b"in"))
    controller.client.receive(1, handle=RECEIVER)
    number = controller.declare()
    controller.send(number, message(b"out"))
    controller.settle(number, 0)
    assert controller.discharge(number, fail=True) == (0x24, [])
    assert counts(bench) == {"leased": 1}
    again = controller.declare()
    assert controller.settle(again, 0)[0] == 0x34
    assert controller.discharge(again) == (0x24, [])
    assert counts(bench) == {}


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (outgoing.ACCEPTED, {}),
        (outgoing.REJECTED, {"dead": 1}),
        (outgoing.RELEASED, {"active": 1}),
        (outgoing.MODIFIED, {"active": 1}),
        (encode.described(0x27, encode.list_of([encode.TRUE, encode.TRUE])), {"deferred": 1}),
    ],
)
def test_every_settlement_may_be_part_of_a_transaction(bench, controller, state, expected):
    bench.put("q", message())
    controller.client.receive(1, handle=RECEIVER)
    number = controller.declare()
    controller.settle(number, 0, state)
    controller.discharge(number)
    assert counts(bench) == expected


def test_one_lost_lock_rolls_everything_back(bench, controller):
    bench.put("q", message(b"a"), message(b"b"))
    assert len(controller.client.receive(2, handle=RECEIVER)) == 2
    number = controller.declare()
    controller.send(number, message(b"out"))
    controller.settle(number, 0)
    controller.settle(number, 1)
    lock = controller.client.connection.sessions[0].unsettled[1].context
    bench.engine.complete("q", [(lock.seq, lock.token)])
    assert controller.discharge(number) == (0x25, "amqp:transaction:rollback")
    assert counts(bench) == {"leased": 1}


def test_a_message_that_is_refused_does_not_join(bench, controller):
    number = controller.declare()
    assert controller.send(number, b"garbage") == (0x25, "amqp:decode-error")
    controller.send(number, message())
    assert controller.discharge(number) == (0x24, [])
    assert counts(bench) == {"active": 1}


def test_a_transaction_has_at_most_100_messages(bench, controller):
    number = controller.declare()
    for _ in range(MAX_MESSAGES):
        assert controller.send(number, message())[0] == 0x34
    assert controller.send(number, message()) == (0x25, "amqp:not-allowed")
    assert controller.discharge(number) == (0x24, [])
    assert counts(bench) == {"active": MAX_MESSAGES}


def test_an_unknown_transaction_is_refused(bench, controller):
    bench.put("q", message())
    controller.client.receive(1, handle=RECEIVER)
    assert controller.send(b"none", message()) == (0x25, "amqp:transaction:unknown-id")
    assert controller.settle(b"none", 0) == (0x25, "amqp:transaction:unknown-id")
    assert Controller(bench).discharge(controller.declare()) == (
        0x25,
        "amqp:transaction:unknown-id",
    )
    assert counts(bench) == {"leased": 1}


def test_time_ends_a_transaction(bench, controller):
    number = controller.declare()
    controller.send(number, message())
    bench.now += TIMEOUT_SECONDS + 1
    controller.client.handler.tick()
    assert controller.discharge(number) == (0x25, "amqp:transaction:unknown-id")
    assert counts(bench) == {}


def test_the_end_of_the_control_link_or_of_the_connection_rolls_back(bench, controller):
    number = controller.declare()
    controller.send(number, message())
    controller.client.detach(CONTROL)
    assert controller.send(number, message()) == (0x25, "amqp:transaction:unknown-id")
    other = Controller(bench)
    number = other.declare()
    other.send(number, message())
    other.client.connection.lost()
    bench.turn()
    assert counts(bench) == {}


@pytest.mark.parametrize(
    ("payload", "condition"),
    [
        (encode.described(sections.AMQP_VALUE, encode.NULL), "amqp:not-implemented"),
        (
            encode.described(sections.AMQP_VALUE, encode.described(0x31, encode.NULL)),
            "amqp:decode-error",
        ),
        (b"garbage", "amqp:decode-error"),
    ],
)
def test_the_coordinator_refuses_anything_else(controller, payload, condition):
    answers = controller.client.send(next(controller.numbers), payload, handle=CONTROL)
    assert outcome(answers) == (0x25, condition)


def test_messages_are_settled_by_their_lock_tokens_under_a_transaction(bench, controller):
    bench.put("q", message())
    (transfer,) = controller.client.receive(1, handle=RECEIVER)
    token = UUID(bytes_le=transfer.delivery_tag)
    number = controller.declare()
    state = transactional(number, encode.NULL)
    wanted = [
        (encode.string("disposition-status"), encode.string("completed")),
        (encode.string("lock-tokens"), uuid_array([token])),
    ]
    operation = "com.microsoft:update-disposition"
    node, body = "q/$management", encode.map_of(wanted)
    status, _, _ = controller.client.request(node, operation, body, state=state)
    assert (status, counts(bench)) == (200, {"leased": 1})
    controller.discharge(number)
    assert counts(bench) == {}
    peek = "com.microsoft:peek-message"
    assert controller.client.request(node, peek, encode.map_of([]), state=state)[0] == 501


def through(bench, destination):
    """A client that sends to `destination` through ``q``; return its first answers."""
    client = bench.client()
    key = "com.microsoft:transfer-destination-address"
    target = encode.described(0x29, encode.list_of([encode.string("q")]))
    client.feed(
        frame(
            0,
            encode.fields(
                0x12,
                [
                    *(encode.string("via"), encode.uint(0), encode.FALSE, *[encode.NULL] * 3),
                    *(target, *[encode.NULL] * 6),
                    encode.map_of([(encode.symbol(key), encode.string(destination))]),
                ],
            ),
        )
    )
    return client, client.frames()


def test_a_link_sends_through_an_entity_to_another(bench):
    bench.create("q")
    bench.create("to", sessions=True)
    client, answers = through(bench, "amqps://host/to")
    assert answers[0].properties == {
        "com.microsoft:transfer-destination-address": "amqps://host/to"
    }
    assert outcome(client.send(0, message(b"x", session="s")))[0] == 0x24
    assert outcome(client.send(1, message(b"lost")))[0] == 0x24
    assert (counts(bench), counts(bench, "to")) == ({}, {"active": 1})
    (dead,) = bench.engine.peek("q/$Transfer", limit=1, dead_letter=True)
    assert (dead.reason, body_of(dead.payload[-9:])) == ("Session ID is null.", b"lost")
    bench.namespace.delete("to")
    client.send(2, message(b"gone", session="s"))
    assert counts(bench, "q/$Transfer") == {"dead": 2}


def test_the_destination_must_exist_when_the_link_begins(bench):
    bench.create("q")
    _, answers = through(bench, "nowhere")
    assert answers[-1].error.value[0] == "amqp:not-found"


def test_settled_work_that_was_refused_rolls_back_the_transaction(bench, controller):
    """It gets no answer, so only the discharge can tell."""
    number = controller.declare()
    controller.send(number, message())
    state = transactional(number, encode.NULL)
    assert controller.client.send(77, b"garbage", state=state, settled=True) == []
    assert controller.discharge(number) == (0x25, "amqp:transaction:rollback")
    assert counts(bench) == {}


def test_a_settled_settlement_that_was_refused_rolls_back_the_transaction(bench, controller):
    bench.put("q", *[message()] * (MAX_MESSAGES + 1))
    assert len(controller.client.receive(500, handle=RECEIVER)) == MAX_MESSAGES + 1
    number = controller.declare()
    state = transactional(number, outgoing.ACCEPTED)
    dispose(controller.client, 0, MAX_MESSAGES, state=state, settled=True)
    assert controller.client.frames() == []
    assert controller.discharge(number) == (0x25, "amqp:transaction:rollback")
    assert counts(bench) == {"leased": MAX_MESSAGES + 1}


def test_what_is_declared_and_never_discharged_is_limited(bench, controller, monkeypatch):
    monkeypatch.setattr(transactions, "MAX_BYTES", 1000)
    numbers = [controller.declare() for _ in range(transactions.MAX_OPEN)]
    assert controller.control(0x31) == (0x25, "amqp:resource-limit-exceeded")
    assert controller.send(numbers[0], message(bytes(900)))[0] == 0x34
    refused = controller.send(numbers[1], message(bytes(900)))
    assert refused == (0x25, "amqp:resource-limit-exceeded")
    controller.discharge(numbers[0])
    assert controller.send(numbers[1], message(bytes(900)))[0] == 0x34
    assert controller.declare()


def test_a_discharge_just_before_the_end_of_its_connection_is_done(bench, controller):
    bench.put("q", message())
    controller.client.receive(1, handle=RECEIVER)
    number = controller.declare()
    controller.settle(number, 0)
    controller.send(number, message(b"out"))
    body = encode.described(0x32, encode.list_of([encode.binary(number)]))
    controller.client.transfer(
        99, encode.described(sections.AMQP_VALUE, body), handle=CONTROL, settled=False
    )
    controller.client.connection.lost()
    bench.turn()
    (left,) = bench.engine.peek("q", limit=9)
    assert left.payload.endswith(b"out")


def test_a_message_that_is_settled_twice_under_one_transaction_rolls_it_back(bench, controller):
    bench.put("q", message())
    (transfer,) = controller.client.receive(1, handle=RECEIVER)
    number = controller.declare()
    controller.settle(number, 0)
    wanted = [
        (encode.string("disposition-status"), encode.string("abandoned")),
        (encode.string("lock-tokens"), uuid_array([UUID(bytes_le=transfer.delivery_tag)])),
    ]
    state = transactional(number, encode.NULL)
    operation = "com.microsoft:update-disposition"
    controller.client.request("q/$management", operation, encode.map_of(wanted), state=state)
    assert controller.discharge(number) == (0x25, "amqp:transaction:rollback")
    (left,) = bench.engine.peek("q", limit=9)
    assert (left.state, left.delivery_count) == ("leased", 1)


# -- schedule, cancel and session state under a transaction


def due(body, seconds):
    """A message that is scheduled for this time."""
    at = [(encode.symbol(stored.SCHEDULED_TIME), encode.timestamp(int(seconds * 1000)))]
    return encode.described(sections.MESSAGE_ANNOTATIONS, encode.map_of(at)) + message(body)


def ask(controller, number, operation, path="q", **values):
    """Request an operation under a transaction; return status, condition and body."""
    state = transactional(number, encode.NULL)
    body = encode.map_of(
        [(encode.string(name.replace("_", "-")), value) for name, value in values.items()]
    )
    name = f"com.microsoft:{operation}"
    return controller.client.request(f"{path}/$management", name, body, state=state)


def schedule(bench, controller, number, *bodies):
    items = [
        encode.map_of([(encode.string("message"), encode.binary(due(body, bench.now + 60)))])
        for body in bodies
    ]
    return ask(controller, number, "schedule-message", messages=encode.list_of(items))


def cancel(controller, number, *numbers):
    wanted = encode.long_array(list(numbers))
    return ask(controller, number, "cancel-scheduled-message", sequence_numbers=wanted)


def scheduled(bench):
    return [number_of(each.seq) for each in bench.engine.peek("q")]


def test_what_is_scheduled_under_a_transaction_is_stored_at_the_discharge(bench, controller):
    number = controller.declare()
    status, _, answer = schedule(bench, controller, number, b"one", b"two")
    assert (status, answer) == (200, {"sequence-numbers": [1, 2]})
    assert counts(bench) == {}
    bench.put("q", message(b"beside"))
    assert controller.discharge(number) == (0x24, [])
    assert counts(bench) == {"active": 1, "scheduled": 2}
    assert scheduled(bench) == [1, 2, 3]


def test_what_is_scheduled_and_rolled_back_is_not_stored(bench, controller):
    number = controller.declare()
    schedule(bench, controller, number, b"one")
    assert controller.discharge(number, fail=True) == (0x24, [])
    assert counts(bench) == {}
    bench.put("q", message(b"next"))
    assert scheduled(bench) == [2]  # the client was told 1


def test_a_schedule_counts_towards_the_limit_of_messages(bench, controller):
    number = controller.declare()
    assert schedule(bench, controller, number, *[b"x"] * MAX_MESSAGES)[0] == 200
    assert schedule(bench, controller, number, b"x")[1] == "amqp:not-allowed"


def test_a_cancel_is_done_at_the_discharge_or_not_at_all(bench, controller):
    bench.put("q", due(b"later", bench.now + 60))
    number = controller.declare()
    assert cancel(controller, number, 1)[0] == 200
    assert counts(bench) == {"scheduled": 1}
    assert controller.discharge(number, fail=True) == (0x24, [])
    assert counts(bench) == {"scheduled": 1}
    number = controller.declare()
    cancel(controller, number, 1)
    assert controller.discharge(number) == (0x24, [])
    assert counts(bench) == {}


def test_a_cancel_of_what_is_not_scheduled_does_not_join(bench, controller):
    number = controller.declare()
    assert cancel(controller, number, 1)[:2] == (404, "com.microsoft:message-not-found")
    controller.send(number, message(b"out"))
    assert controller.discharge(number) == (0x24, [])
    assert counts(bench) == {"active": 1}


def test_a_cancel_of_what_fell_due_rolls_everything_back(bench, controller):
    bench.put("q", due(b"later", bench.now + 60))
    number = controller.declare()
    cancel(controller, number, 1)
    controller.send(number, message(b"out"))
    bench.now += 61
    assert controller.discharge(number) == (0x25, "amqp:transaction:rollback")
    assert counts(bench) == {"active": 1}


def test_what_was_scheduled_in_a_transaction_may_be_cancelled_in_it(bench, controller):
    number = controller.declare()
    schedule(bench, controller, number, b"one", b"two")
    assert cancel(controller, number, 1)[0] == 200
    assert controller.discharge(number) == (0x24, [])
    assert scheduled(bench) == [2]


def test_a_schedule_under_an_unknown_transaction_is_refused(bench, controller):
    for refused in (
        schedule(bench, controller, b"unknown", b"one"),
        cancel(controller, b"unknown", 1),
    ):
        assert refused[1] == "amqp:transaction:unknown-id"
    assert counts(bench) == {}


def test_numbers_are_reserved_in_a_queue_that_counts_with_the_file(bench, controller):
    bench.engine.delete_queue("q")
    bench.engine.create_queue("q")
    number = controller.declare()
    _, _, answer = schedule(bench, controller, number, b"one", b"two")
    bench.put("q", message(b"beside"))
    controller.discharge(number)
    assert answer == {"sequence-numbers": [1, 2]}
    assert scheduled(bench) == [1, 2, 3]


def test_the_state_of_a_session_is_set_at_the_discharge(bench, controller):
    bench.create("s", sessions=True)
    filters = encode.map_of([(encode.symbol(SESSION_FILTER), encode.string("one"))])
    client = controller.client
    client.attach(receive=True, address="s", handle=7, name="session", filters=filters)
    number = controller.declare()
    values = {"session_id": encode.string("one"), "session_state": encode.binary(b"state")}
    assert ask(controller, number, "set-session-state", "s", **values)[0] == 200
    (lease,) = [c.lease for c in bench.broker.dispatcher.consumers("s")]
    assert bench.engine.get_session_state("s", lease) is None
    assert controller.discharge(number) == (0x24, [])
    assert bench.engine.get_session_state("s", lease) == b"state"
    values["session_id"] = encode.string("two")
    number = controller.declare()
    answer = ask(controller, number, "set-session-state", "s", **values)
    assert answer[1] == "com.microsoft:session-lock-lost"


# -- settlement with changed properties under a transaction


def changed(value=b""):
    """The outcomes that settle with the property ``p``, by the state of the message after them."""
    text = value or encode.string("new")
    properties = encode.map_of([(encode.symbol("p"), text)])
    error = encode.described(
        0x1D, encode.list_of([encode.symbol("com.microsoft:dead-letter"), encode.NULL, properties])
    )
    return {
        "active": encode.described(0x27, encode.list_of([encode.TRUE, encode.FALSE, properties])),
        "deferred": encode.described(0x27, encode.list_of([encode.TRUE, encode.TRUE, properties])),
        "dead": encode.described(0x25, encode.list_of([error])),
    }


def found_property(bench, dead):
    (left,) = bench.engine.peek("q", dead_letter=dead)
    cut = sections.cut(stored.unpack(left.payload).bare)
    return cut.application_properties.get("p")


@pytest.mark.parametrize("after", ["active", "deferred", "dead"])
def test_properties_are_changed_at_the_discharge(bench, controller, after):
    bench.put("q", message(b"in"))
    controller.client.receive(1, handle=RECEIVER)
    number = controller.declare()
    assert controller.settle(number, 0, changed()[after])[0] == 0x34
    assert found_property(bench, False) is None
    assert controller.discharge(number) == (0x24, [])
    assert counts(bench) == {after: 1}
    assert found_property(bench, after == "dead") == "new"


@pytest.mark.parametrize("after", ["active", "deferred", "dead"])
def test_properties_are_not_changed_by_a_rollback(bench, controller, after):
    bench.put("q", message(b"in"))
    controller.client.receive(1, handle=RECEIVER)
    number = controller.declare()
    controller.settle(number, 0, changed()[after])
    controller.discharge(number, fail=True)
    assert counts(bench) == {"leased": 1}
    assert found_property(bench, False) is None


def test_too_many_properties_are_refused_when_they_come_not_at_the_discharge(bench, controller):
    bench.put("q", message(b"in", many="x" * 40_000))
    controller.client.receive(1, handle=RECEIVER)
    number = controller.declare()
    large = changed(encode.string("x" * 40_000))["active"]
    descriptor, _ = controller.settle(number, 0, large)
    assert descriptor == 0x25
    controller.send(number, message(b"out"))
    assert controller.discharge(number) == (0x24, [])
    assert counts(bench) == {"active": 1, "leased": 1}
