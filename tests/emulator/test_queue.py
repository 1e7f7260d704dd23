"""Every public queue operation of the Python SDK, over the wire."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from azure.servicebus import (
    AutoLockRenewer,
    ServiceBusMessage,
    ServiceBusMessageState,
    ServiceBusReceiveMode,
    ServiceBusSubQueue,
)
from azure.servicebus.exceptions import (
    MessageLockLostError,
    MessageSizeExceededError,
    ServiceBusAuthenticationError,
    ServiceBusError,
)

WAIT = 5


def bodies(messages):
    return [str(message) for message in messages]


def now():
    return datetime.now(UTC)


def test_send_receive_complete(queue, link):
    sender, receiver = link(queue())
    sender.send_messages(ServiceBusMessage("one", message_id="id-1", subject="s"))
    sender.send_messages([ServiceBusMessage(f"{n}") for n in range(3)])
    batch = sender.create_message_batch()
    batch.add_message(ServiceBusMessage("batched"))
    sender.send_messages(batch)
    got = receiver.receive_messages(5, max_wait_time=WAIT)
    assert bodies(got) == ["one", "0", "1", "2", "batched"]
    assert [message.delivery_count for message in got] == [0] * 5
    assert (got[0].message_id, got[0].subject) == ("id-1", "s")
    numbers = [message.sequence_number for message in got]
    assert numbers == sorted(set(numbers))
    assert abs((got[0].enqueued_time_utc - now()).total_seconds()) < 10
    assert 50 < (got[0].locked_until_utc - now()).total_seconds() < 61
    for message in got:
        receiver.complete_message(message)
    assert receiver.peek_messages(10, sequence_number=1) == []


def test_abandon_counts_and_the_limit_dead_letters(queue, link):
    name = queue(max_deliveries=2)
    sender, receiver = link(name)
    dead = link(name, send=False, sub_queue=ServiceBusSubQueue.DEAD_LETTER)
    sender.send_messages(ServiceBusMessage("stubborn"))
    for count in range(2):
        (message,) = receiver.receive_messages(1, max_wait_time=WAIT)
        assert message.delivery_count == count
        receiver.abandon_message(message)
    (letter,) = dead.receive_messages(1, max_wait_time=WAIT)
    assert letter.dead_letter_reason == "MaxDeliveryCountExceeded"
    dead.complete_message(letter)


def test_dead_letter_with_reason_and_properties_kept(queue, link):
    name = queue()
    sender, receiver = link(name)
    dead = link(name, send=False, sub_queue="deadletter")
    sender.send_messages(ServiceBusMessage("bad", application_properties={"kept": 7}))
    (message,) = receiver.receive_messages(1, max_wait_time=WAIT)
    receiver.dead_letter_message(message, reason="broken", error_description="cannot be read")
    (letter,) = dead.receive_messages(1, max_wait_time=WAIT)
    assert letter.dead_letter_reason == "broken"
    assert letter.dead_letter_error_description == "cannot be read"
    assert letter.application_properties[b"kept"] == 7
    assert letter.sequence_number == message.sequence_number
    assert bodies(dead.peek_messages(5, sequence_number=1)) == ["bad"]
    dead.renew_message_lock(letter)
    dead.complete_message(letter)


def test_defer_and_receive_deferred(queue, link):
    sender, receiver = link(queue())
    sender.send_messages([ServiceBusMessage("a"), ServiceBusMessage("b")])
    first, second = receiver.receive_messages(2, max_wait_time=WAIT)
    receiver.defer_message(first)
    receiver.defer_message(second)
    assert receiver.receive_messages(1, max_wait_time=0.5) == []
    (peeked, _) = receiver.peek_messages(5, sequence_number=1)
    assert peeked.state == ServiceBusMessageState.DEFERRED
    got = receiver.receive_deferred_messages([first.sequence_number, second.sequence_number])
    assert bodies(got) == ["a", "b"]
    assert got[0].delivery_count == 1
    receiver.renew_message_lock(got[0])
    receiver.complete_message(got[0])
    receiver.dead_letter_message(got[1], reason="late")
    with pytest.raises(ServiceBusError):
        receiver.receive_deferred_messages(first.sequence_number)


def test_schedule_cancel_and_arrival(queue, link):
    sender, receiver = link(queue())
    soon = now() + timedelta(seconds=1)
    later = now() + timedelta(hours=1)
    (number,) = sender.schedule_messages(ServiceBusMessage("soon"), soon)
    cancelled = sender.schedule_messages([ServiceBusMessage("x"), ServiceBusMessage("y")], later)
    annotated = ServiceBusMessage("annotated", scheduled_enqueue_time_utc=soon)
    sender.send_messages(annotated)
    peeked = receiver.peek_messages(10, sequence_number=1)
    assert {message.state for message in peeked} == {ServiceBusMessageState.SCHEDULED}
    assert number in [message.sequence_number for message in peeked]
    sender.cancel_scheduled_messages(cancelled)
    with pytest.raises(ServiceBusError):
        sender.cancel_scheduled_messages(cancelled)
    got = receiver.receive_messages(2, max_wait_time=WAIT)
    got += receiver.receive_messages(1, max_wait_time=1) if len(got) < 2 else []
    assert sorted(bodies(got)) == ["annotated", "soon"]
    assert now() >= soon
    for message in got:
        receiver.complete_message(message)


def test_a_message_with_an_expired_lock_is_redelivered(queue, link):
    sender, receiver = link(queue(lock_seconds=1))
    sender.send_messages(ServiceBusMessage("slow"))
    (first,) = receiver.receive_messages(1, max_wait_time=WAIT)
    (again,) = receiver.receive_messages(1, max_wait_time=WAIT)
    assert again.delivery_count == 1
    with pytest.raises(MessageLockLostError):
        receiver.complete_message(first)
    with pytest.raises(MessageLockLostError):
        receiver.renew_message_lock(first)
    receiver.complete_message(again)


def test_the_server_refuses_an_expired_lock_too(queue, link):
    """The SDK checks its own clock first: here it believes that the lock has not expired."""
    sender, receiver = link(queue(lock_seconds=0.5))
    sender.send_messages(ServiceBusMessage("slow"))
    (message,) = receiver.receive_messages(1, max_wait_time=WAIT)
    message._expiry = now() + timedelta(minutes=1)
    time.sleep(0.6)
    with pytest.raises(MessageLockLostError):
        receiver.complete_message(message)


def test_a_link_whose_messages_are_settled_elsewhere_is_not_starved(queue, link, monkeypatch):
    """``$management`` settles the messages; the link's client sends no disposition."""
    monkeypatch.setattr("aztask.emulator.broker.consumer.MAX_UNSETTLED", 10)
    monkeypatch.setattr("aztask.emulator.broker.consumer.TIDY_SECONDS", 0.0)
    sender, receiver = link(queue())
    sender.send_messages([ServiceBusMessage(str(number)) for number in range(35)])
    got = []
    for _ in range(7):
        messages = receiver.receive_messages(5, max_wait_time=WAIT)
        tokens = [message.lock_token for message in messages]
        receiver._settle_message_via_mgmt_link("completed", tokens)
        got += bodies(messages)
    assert got == [str(number) for number in range(35)]


def test_renewal_by_hand_and_by_the_renewer(queue, link):
    sender, receiver = link(queue(lock_seconds=1.5))
    sender.send_messages([ServiceBusMessage("hand"), ServiceBusMessage("auto")])
    hand, auto = receiver.receive_messages(2, max_wait_time=WAIT)
    with AutoLockRenewer() as renewer:
        renewer.register(receiver, auto, max_lock_renewal_duration=30)
        for _ in range(3):
            time.sleep(0.7)
            before = hand.locked_until_utc
            assert receiver.renew_message_lock(hand) > before
        receiver.complete_message(hand)
        receiver.complete_message(auto)


def test_receive_and_delete(queue, link):
    name = queue()
    sender, receiver = link(name, receive_mode=ServiceBusReceiveMode.RECEIVE_AND_DELETE)
    sender.send_messages([ServiceBusMessage("gone")] * 3)
    assert bodies(receiver.receive_messages(3, max_wait_time=WAIT)) == ["gone"] * 3
    assert receiver.peek_messages(5, sequence_number=1) == []


def test_prefetched_messages_go_back_uncounted_when_the_receiver_closes(queue, link, client):
    name = queue()
    sender, other = link(name)
    sender.send_messages([ServiceBusMessage(f"{n}") for n in range(10)])
    with client.get_queue_receiver(name, prefetch_count=10) as receiver:
        (taken,) = receiver.receive_messages(1, max_wait_time=WAIT)
        receiver.complete_message(taken)
        time.sleep(0.2)
    got = other.receive_messages(9, max_wait_time=WAIT)
    assert len(got) == 9
    assert {message.delivery_count for message in got} == {0}
    for message in got:
        other.complete_message(message)


def test_released_messages_are_not_counted(queue, link):
    """The SDK's keep-alive releases messages that arrive while no receive call is active."""
    sender, receiver = link(queue())
    assert receiver.receive_messages(1, max_wait_time=0.3) == []
    sender.send_messages(ServiceBusMessage("late"))
    deadline = time.monotonic() + 12
    got = []
    while not got and time.monotonic() < deadline:
        time.sleep(0.5)
        got = receiver.receive_messages(1, max_wait_time=1)
    assert got[0].delivery_count == 0
    receiver.complete_message(got[0])


def test_settling_on_another_receiver_goes_through_management(queue, link):
    name = queue()
    sender, receiver = link(name)
    other = link(name, send=False)
    sender.send_messages([ServiceBusMessage("x"), ServiceBusMessage("y"), ServiceBusMessage("z")])
    first, second, third = receiver.receive_messages(3, max_wait_time=WAIT)
    other.complete_message(first)
    other.abandon_message(second)
    other.dead_letter_message(third, reason="r", error_description="d")
    (again,) = other.receive_messages(1, max_wait_time=WAIT)
    assert (str(again), again.delivery_count) == ("y", 1)
    other._settle_message_via_mgmt_link("completed", [again.lock_token])


def test_arrays_of_lock_tokens_settle_all_or_none(queue, link):
    name = queue()
    sender, receiver = link(name)
    sender.send_messages([ServiceBusMessage(f"{n}") for n in range(20)])
    got = receiver.receive_messages(20, max_wait_time=WAIT)
    tokens = [message.lock_token for message in got]
    with pytest.raises(MessageLockLostError):
        receiver._settle_message_via_mgmt_link("completed", [*tokens, uuid4()])
    assert len(receiver.peek_messages(30, sequence_number=1)) == 20
    receiver._settle_message_via_mgmt_link("completed", tokens)
    assert receiver.peek_messages(30, sequence_number=1) == []


def test_range_dispositions(queue, link):
    sender, receiver = link(queue())
    sender.send_messages([ServiceBusMessage(f"{n}") for n in range(30)])
    got = receiver.receive_messages(30, max_wait_time=WAIT)
    ids = [message._delivery_id for message in got]
    tags = [message._delivery_tag for message in got]
    receiver._handler.settle_messages((ids[0], ids[-1]), tags[0], "accepted", await_outcome=True)
    assert receiver.peek_messages(5, sequence_number=1) == []


@pytest.mark.parametrize("size", [100, 70_000, 300_000, 1_000_000])
def test_large_messages(queue, link, size):
    sender, receiver = link(queue())
    body = bytes(range(256)) * (size // 256)
    sender.send_messages(ServiceBusMessage(body))
    (message,) = receiver.receive_messages(1, max_wait_time=WAIT)
    assert b"".join(message.body) == body
    receiver.complete_message(message)


def test_batches_to_the_limit_and_past_it(queue, link):
    sender, receiver = link(queue())
    batch = sender.create_message_batch()
    count = 0
    with pytest.raises(MessageSizeExceededError):
        while True:
            batch.add_message(ServiceBusMessage(b"x" * 10_000))
            count += 1
    sender.send_messages(batch)
    assert count > 90
    done = 0
    while done < count:
        for message in receiver.receive_messages(count - done, max_wait_time=WAIT):
            receiver.complete_message(message)
            done += 1
    with pytest.raises(MessageSizeExceededError):
        sender.send_messages([ServiceBusMessage(b"x" * 10_000)] * 200)
    with pytest.raises(MessageSizeExceededError):
        sender.send_messages(ServiceBusMessage(b"x" * 1_100_000))


def test_a_queue_with_a_smaller_limit(queue, link):
    sender, receiver = link(queue(max_message_bytes=10_000))
    with pytest.raises(MessageSizeExceededError):
        sender.send_messages(ServiceBusMessage(b"x" * 20_000))
    sender.send_messages(ServiceBusMessage(b"fits"))
    assert bodies(receiver.receive_messages(1, max_wait_time=WAIT)) == ["fits"]


def test_time_to_live(queue, link):
    silent, kept = queue(), queue(dead_letter_expired=True)
    for name in (silent, kept):
        sender, receiver = link(name)
        sender.send_messages(ServiceBusMessage("short", time_to_live=timedelta(seconds=1)))
        (peeked,) = receiver.peek_messages(1, sequence_number=1)
        assert peeked.time_to_live == timedelta(seconds=1)
    dead = link(kept, send=False, sub_queue="deadletter")
    (letter,) = dead.receive_messages(1, max_wait_time=WAIT)
    assert letter.dead_letter_reason == "TTLExpiredException"
    dead.complete_message(letter)
    none = link(silent, send=False, sub_queue="deadletter")
    assert none.receive_messages(1, max_wait_time=0.5) == []
    assert receiver.peek_messages(5, sequence_number=1) == []


def test_the_queues_own_time_to_live(queue, link):
    name = queue(time_to_live=0.2, dead_letter_expired=True)
    sender, _ = link(name)
    sender.send_messages(ServiceBusMessage("short"))
    dead = link(name, send=False, sub_queue="deadletter")
    assert bodies(dead.receive_messages(1, max_wait_time=WAIT)) == ["short"]


def test_duplicate_detection(queue, link):
    sender, receiver = link(queue(duplicate_window=60))
    sender.send_messages(ServiceBusMessage("first", message_id="same"))
    sender.send_messages(ServiceBusMessage("second", message_id="same"))
    sender.send_messages(ServiceBusMessage("other", message_id="other"))
    got = receiver.receive_messages(3, max_wait_time=1)
    assert bodies(got) == ["first", "other"]


def test_forwarding(queue, link):
    target = queue()
    source = queue(forward_to=target)
    failing = queue(forward_dead_letters_to=target)
    to_failing, receiver_of_failing = link(failing)
    receiver = link(target, send=False)
    with pytest.raises(ServiceBusError):  # a queue that forwards has no receivers
        link(source, send=False)
    to_failing.send_messages(ServiceBusMessage("dead", application_properties={"k": "v"}))
    (message,) = receiver_of_failing.receive_messages(1, max_wait_time=WAIT)
    receiver_of_failing.dead_letter_message(message, reason="moved")
    (moved,) = receiver.receive_messages(1, max_wait_time=WAIT)
    assert moved.application_properties == {b"k": b"v", b"DeadLetterReason": b"moved"}
    assert moved.dead_letter_source == failing
    receiver.complete_message(moved)


def test_a_chain_of_forwarding_queues(queue, client, link):
    target = queue()
    middle = queue(forward_to=target)
    source = queue(forward_to=middle)
    receiver = link(target, send=False)
    with client.get_queue_sender(source) as sender:
        sender.send_messages([ServiceBusMessage(f"{n}") for n in range(3)])
    assert bodies(receiver.receive_messages(3, max_wait_time=WAIT)) == ["0", "1", "2"]


def test_unknown_entities(client):
    """The service refuses their token with status 404; SDKs report an authentication error."""
    with pytest.raises(ServiceBusAuthenticationError), client.get_queue_receiver("nowhere"):
        pass
    with pytest.raises(ServiceBusAuthenticationError) as caught, client.get_queue_sender("nowhere"):
        pass
    assert "amqp:client-error" in str(caught.value)


def test_another_clients_lock_token_of_another_queue_is_refused(queue, link):
    first, second = queue(), queue()
    sender, receiver = link(first)
    _, stranger = link(second)
    sender.send_messages(ServiceBusMessage("mine"))
    (message,) = receiver.receive_messages(1, max_wait_time=WAIT)
    with pytest.raises(MessageLockLostError):
        stranger._settle_message_via_mgmt_link("completed", [message.lock_token])
    receiver.complete_message(message)
