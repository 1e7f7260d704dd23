"""Operations of ``$management``, requested over real links."""

from __future__ import annotations

from uuid import UUID

import pytest
from amqpwire import uuid_array
from emulatorbench import body_of, message

from aztask.emulator.amqp import AmqpError, encode
from aztask.emulator.broker import management, nodes, stored
from aztask.emulator.broker.broker import Lock
from aztask.emulator.broker.consumer import SESSION_FILTER
from aztask.emulator.broker.management import ALL_SESSIONS, operation
from aztask.queues.engine import number_of

PREFIX = "com.microsoft:"
SCHEDULED = encode.symbol(stored.SCHEDULED_TIME)


def body(**values):
    return encode.map_of(
        [(encode.string(name.replace("_", "-")), value) for name, value in values.items()]
    )


@pytest.fixture
def ask(bench):
    """Sends a request to the queue ``q``; returns (status, condition, body)."""
    client = bench.client()

    def send(name, node="q/$management", **values):
        return client.request(node, PREFIX + name, body(**values))

    send.client = client
    return send


def lock(bench, queue="q"):
    """Receive one message; return its lock token."""
    (lease,) = bench.engine.receive(queue, 1)
    bench.broker.locks.add(Lock(queue, False, lease.seq, lease.token, None, lease.lease_until))
    return UUID(hex=lease.token)


def test_locks_are_renewed(bench, ask):
    bench.create("q", lock_seconds=30)
    bench.put("q", message())
    token = lock(bench)
    bench.now += 20
    status, _, answer = ask("renew-lock", lock_tokens=uuid_array([token]))
    assert (status, answer) == (200, {"expirations": [int((bench.now + 30) * 1000)]})
    assert bench.broker.locks.get(token.hex).until == bench.now + 30
    bench.now += 31
    status, condition, _ = ask("renew-lock", lock_tokens=uuid_array([token]))
    assert (status, condition) == (410, "com.microsoft:message-lock-lost")


@pytest.mark.parametrize(
    ("word", "counts"),
    [
        ("completed", {}),
        ("abandoned", {"active": 1}),
        ("defered", {"deferred": 1}),
        ("suspended", {"dead": 1}),
    ],
)
def test_locked_messages_are_settled(bench, ask, word, counts):
    bench.create("q")
    bench.put("q", message())
    tokens = uuid_array([lock(bench)])
    status, _, _ = ask(
        "update-disposition", lock_tokens=tokens, disposition_status=encode.string(word)
    )
    found = bench.engine.stats("q")._asdict()
    assert (status, {name: n for name, n in found.items() if n}) == (200, counts)


def test_one_lost_lock_settles_none(bench, ask):
    bench.create("q")
    bench.put("q", message(), message())
    lost = lock(bench)
    bench.now += 61
    held = lock(bench)
    status, condition, _ = ask(
        "update-disposition",
        lock_tokens=uuid_array([held, lost]),
        disposition_status=encode.string("completed"),
    )
    assert (status, condition) == (410, "com.microsoft:message-lock-lost")
    assert sum(bench.engine.stats("q")) == 2


def test_messages_are_scheduled_and_cancelled(bench, ask):
    bench.create("q")
    due = encode.described(
        0x72, encode.map_of([(SCHEDULED, encode.timestamp(int((bench.now + 60) * 1000)))])
    )
    item = body(message=encode.binary(due + message()))
    status, _, answer = ask("schedule-message", messages=encode.list_of([item]))
    assert status == 200
    assert bench.engine.stats("q").scheduled == 1
    numbers = encode.long_array(answer["sequence-numbers"])
    assert ask("cancel-scheduled-message", sequence_numbers=numbers)[0] == 200
    assert sum(bench.engine.stats("q")) == 0
    status, condition, _ = ask("cancel-scheduled-message", sequence_numbers=numbers)
    assert (status, condition) == (404, "com.microsoft:message-not-found")


def test_peeking_pages_through_a_queue(bench, ask):
    bench.create("q")
    bench.put("q", *[message(b"%d" % n) for n in range(3)])

    def peek(start, count):
        return ask(
            "peek-message",
            from_sequence_number=encode.long(start),
            message_count=encode.int32(count),
        )

    status, _, answer = peek(1, 2)
    assert status == 200
    assert [body_of(each["message"]) for each in answer["messages"]] == [b"0", b"1"]
    assert peek(10**9, 5)[0] == 204


def test_deferred_messages_are_received_by_number(bench, ask):
    bench.create("q")
    (seq,) = bench.put("q", message(b"later"))
    (lease,) = bench.engine.receive("q", 1)
    bench.engine.defer("q", [(lease.seq, lease.token)])
    number = number_of(seq)
    numbers = encode.long_array([number])
    status, _, answer = ask("receive-by-sequence-number", sequence_numbers=numbers)
    (item,) = answer["messages"]
    assert (status, body_of(item["message"])) == (200, b"later")
    assert bench.broker.locks.get(item["lock-token"].hex).seq == seq
    status, condition, _ = ask("receive-by-sequence-number", sequence_numbers=numbers)
    assert (status, condition) == (404, "com.microsoft:message-not-found")


def test_sessions_are_renewed_listed_and_have_a_state(bench, ask):
    bench.create("q", sessions=True)
    bench.put("q", message(session="waiting"))
    name = encode.string("one")
    filters = encode.map_of([(encode.symbol(SESSION_FILTER), name)])
    ask.client.attach(receive=True, filters=filters)
    assert ask("get-session-state", session_id=name)[2] == {"session-state": None}
    ask("set-session-state", session_id=name, session_state=encode.binary(b"state"))
    assert ask("get-session-state", session_id=name)[2] == {"session-state": b"state"}
    bench.now += 30
    _, _, answer = ask("renew-session-lock", session_id=name)
    assert answer == {"expiration": int((bench.now + 60) * 1000)}

    def sessions(since):
        page = {"skip": encode.int32(0), "top": encode.int32(10)}
        return ask("get-message-sessions", last_updated_time=encode.timestamp(since), **page)

    assert sessions(0)[2]["sessions-ids"] == ["one"]
    assert sessions(int(bench.now * 1000))[0] == 204
    assert sessions(ALL_SESSIONS)[2]["sessions-ids"] == ["one", "waiting"]
    ask("set-session-state", session_id=name, session_state=encode.NULL)
    assert sessions(0)[0] == 204


def test_a_session_of_another_connection_is_out_of_reach(bench, ask):
    bench.create("q", sessions=True)
    bench.client().attach(
        receive=True,
        filters=encode.map_of([(encode.symbol(SESSION_FILTER), encode.string("one"))]),
    )
    status, condition, _ = ask("get-session-state", session_id=encode.string("one"))
    assert (status, condition) == (410, "com.microsoft:session-lock-lost")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("renew-lock", {}),
        ("renew-lock", {"lock_tokens": encode.string_array(["x"])}),
        ("update-disposition", {"disposition_status": encode.string("eaten")}),
        ("schedule-message", {"messages": encode.list_of([body(x=encode.NULL)])}),
        ("peek-message", {"from_sequence_number": encode.TRUE}),
        ("get-session-state", {"session_id": encode.uint(5)}),
    ],
)
def test_malformed_requests_are_argument_errors(bench, ask, name, values):
    bench.create("q")
    status, condition, _ = ask(name, **values)
    assert (status, condition) == (400, "com.microsoft:argument-error")


def delete(ask, count, before):
    wanted = {"message_count": encode.int32(count), "enqueued_time_utc": encode.timestamp(before)}
    return ask("batch-delete-messages", **wanted)


def test_messages_are_deleted_in_batches(bench, ask):
    bench.create("q")
    numbers = bench.put("q", *[message(b"%d" % number) for number in range(6)])
    bench.engine.receive("q", 1)
    bench.now += 10
    bench.put("q", message(b"young"))
    before = int((bench.now - 5) * 1000)
    assert delete(ask, 2, before) == (200, None, {"message-count": 2})
    left = [each.seq for each in bench.engine.peek("q")]
    assert left[:4] == [numbers[0], *numbers[3:]]
    assert delete(ask, 4000, before) == (200, None, {"message-count": 3})
    assert delete(ask, 4000, before) == (204, None, None)
    assert [each.state for each in bench.engine.peek("q")] == ["leased", "active"]


def test_sessions_and_dead_letters_are_deleted_in_batches(bench, ask):
    bench.create("q", sessions=True)
    bench.put("q", message(session="a"), message(session="b"))
    now = int((bench.now + 1) * 1000)
    assert delete(ask, 1, now)[2] == {"message-count": 1}
    assert sum(bench.engine.stats("q")) == 1


@pytest.mark.parametrize("count", [0, 4001])
def test_a_batch_to_delete_is_limited(bench, ask, count):
    bench.create("q")
    assert delete(ask, count, 5)[:2] == (400, "com.microsoft:argument-error")


@pytest.mark.parametrize("name", ["renew-lock", "com.microsoft:dance"])
def test_unknown_operations_are_refused(name):
    with pytest.raises(AmqpError, match="not-implemented"):
        operation(name)


def test_a_batch_is_deleted_without_reading_its_messages(bench, ask, monkeypatch):
    """4,000 messages of 1 MB would be read for each request."""
    bench.create("q")
    bench.put("q", *[message()] * 30)
    locked = bench.engine.receive("q", 10)
    monkeypatch.setattr(bench.engine, "peek", None)
    monkeypatch.setattr(bench.engine, "receive_deferred", None)
    status, _, found = delete(ask, 15, int((bench.now + 60) * 1000))
    assert (status, found) == (200, {"message-count": 15})
    assert bench.engine.stats("q")._asdict() == {
        **dict.fromkeys(("scheduled", "deferred", "dead"), 0),
        "active": 5,
        "leased": len(locked),
    }


def test_a_peek_reads_few_messages_first(bench, ask, monkeypatch):
    bench.create("q")
    bench.put("q", *[message(bytes(300_000))] * 40)
    sizes, peek = [], bench.engine.peek

    def peeked(queue, start, limit, **options):
        sizes.append(limit)
        return peek(queue, start, limit, **options)

    monkeypatch.setattr(bench.engine, "peek", peeked)
    wanted = {"from-sequence-number": encode.long(0), "message-count": encode.int32(40)}
    _, _, found = ask("peek-message", **wanted)
    assert len(found["messages"]) == 3
    assert max(sizes) == management.FIRST_PAGE


def test_results_that_nobody_reads_are_limited(bench, monkeypatch):
    """One read of a socket may hold a thousand requests, each for a megabyte."""
    monkeypatch.setattr(nodes, "MAX_UNANSWERED", 1_000_000)
    bench.create("big")
    bench.put("big", message(bytes(300_000)))
    client = bench.client()
    for receive in (True, False):
        client.attach(receive=receive, handle=int(receive), address="big/$management", end="a")
    client.flow(50, handle=1)
    request = (
        encode.fields(0x73, [encode.string("id"), *[encode.NULL] * 3, encode.string("a")])
        + encode.described(
            0x74,
            encode.map_of(
                [(encode.string("operation"), encode.string("com.microsoft:peek-message"))]
            ),
        )
        + encode.described(
            0x77,
            body(**{"from-sequence-number": encode.long(0), "message-count": encode.int32(1)}),
        )
    )
    for round_ in range(2):
        for number in range(20):
            client.transfer(20 * round_ + number, request, handle=0)
        answers = [each.payload for each in client.frames() if type(each).__name__ == "Transfer"]
        assert len(answers) == 20
        assert sum(b"server-busy" in answer for answer in answers) == 16


def test_properties_to_modify_have_no_more_room_than_others(bench, ask):
    bench.create("q")
    bench.put("q", message(a="x" * 40_000))
    token = lock(bench)
    more = encode.map_of([(encode.string("b"), encode.string("x" * 40_000))])
    wanted = {"disposition-status": encode.string("abandoned"), "properties-to-modify": more}
    wanted["lock-tokens"] = uuid_array([token])
    status, condition, _ = ask("update-disposition", **wanted)
    assert (status, condition) == (400, "amqp:link:message-size-exceeded")
    assert bench.engine.stats("q").leased == 1
