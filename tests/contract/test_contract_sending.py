"""Sending: what arrives, when it arrives, and what is refused."""

import threading
import time
from dataclasses import replace

import pytest
from subjects import bodies, settle

from aztask.errors import (
    AztaskError,
    CapabilityError,
    InvalidQueueName,
    MessageTooLarge,
    QueueNotFound,
)
from aztask.message.envelope import Envelope
from aztask.settlement import Complete

RICH = Envelope(
    body=bytes(range(256)),
    headers={
        "none": None,
        "yes": True,
        "no": False,
        "int": -(2**62),
        "float": 0.1,
        "text": "straße \N{PILE OF POO} \x00 end",
        "bytes": b"\x00\xff",
        "list": [1, "two", [3.5, None]],
        "map": {"a": {"b": [b"c"]}},
        "empty": "",
    },
    message_id="id:0:1",
    content_type="application/json",
    content_encoding="utf-8",
    subject="shop.resize",
    correlation_id="root",
    properties={"priority": 3, "reply_to": "answers"},
)


def test_an_envelope_arrives_as_it_was_sent(subject):
    queue = subject.queue()
    subject.broker.send(queue, [RICH])
    delivery = subject.one(subject.receiver(queue))
    assert delivery.envelope == RICH
    assert delivery.queue == queue
    assert delivery.delivery_count == 1


@pytest.mark.parametrize("body", [b"", b"\x00", b"\xff\xfe", b"x" * 20_000])
def test_a_body_survives_byte_for_byte(subject, body):
    queue = subject.queue()
    subject.send(queue, body)
    assert subject.one(subject.receiver(queue)).envelope.body == body


def test_expiry_and_session_and_partition_key_travel_along(subject):
    queue = subject.queue()
    now = time.time()
    expires_at = max(now, 1_800_000_000.0) + 86_400.0
    subject.send(queue, b"x", expires_at=expires_at, partition_key="p")
    envelope = subject.one(subject.receiver(queue)).envelope
    assert envelope.expires_at == pytest.approx(expires_at, abs=subject.coarse)
    assert envelope.partition_key == "p"


def test_a_batch_arrives_once_and_in_full(subject):
    queue = subject.queue()
    sent = [b"%d" % number for number in range(120)]
    subject.send(queue, *sent)
    receiver = subject.receiver(queue)
    taken = subject.take(receiver, len(sent))
    assert sorted(bodies(taken)) == sorted(sent)
    assert len({delivery.position for delivery in taken}) == len(sent)
    settle(receiver, Complete(), *taken)
    subject.assert_nothing(receiver)


def test_an_empty_batch_is_nothing(subject):
    queue = subject.queue()
    subject.broker.send(queue, [])
    subject.assert_nothing(subject.receiver(queue))


def test_messages_are_received_in_the_order_they_were_sent(subject):
    queue = subject.queue()
    for number in range(5):
        subject.send(queue, b"%d" % number)
    taken = subject.take(subject.receiver(queue), 5)
    subject.assert_all(bodies(taken), [b"0", b"1", b"2", b"3", b"4"])


def test_a_delayed_message_comes_after_its_delay(subject):
    queue = subject.queue()
    receiver = subject.receiver(queue)
    subject.send(queue, b"later", delay=2.0)
    subject.send(queue, b"now")
    assert bodies(subject.take(receiver)) == [b"now"]
    subject.assert_nothing(receiver)
    subject.pass_time(2.0 + subject.coarse)
    assert subject.one(receiver).envelope.body == b"later"


def test_a_scheduled_message_can_be_cancelled_until_it_is_due(subject):
    if not subject.can.cancel_scheduled:
        with pytest.raises(CapabilityError):
            subject.broker.cancel_scheduled(subject.queue(), ["a"])
        return
    queue = subject.queue()
    subject.send(queue, b"a", message_id="a", delay=3.0)
    subject.send(queue, b"b", message_id="b", delay=3.0)
    subject.send(queue, b"now", message_id="now")
    assert subject.broker.cancel_scheduled(queue, ["a", "missing", "now"]) == 1
    subject.pass_time(3.0 + subject.coarse)
    assert sorted(bodies(subject.take(subject.receiver(queue), 2))) == [b"b", b"now"]
    assert subject.broker.cancel_scheduled(queue, ["b"]) == 0


def test_a_timer_is_cancelled_by_its_number_until_it_is_due(subject):
    queue, envelope = subject.queue(), Envelope(b"a", message_id="a", delay=3.0)
    if not subject.can.timer_numbers:
        with pytest.raises(CapabilityError):
            subject.broker.send_timer(queue, envelope)
        with pytest.raises(CapabilityError):
            subject.broker.cancel_timer(queue, 1)
        return
    number = subject.broker.send_timer(queue, envelope)
    other = subject.broker.send_timer(queue, replace(envelope, body=b"b", message_id="b"))
    assert subject.broker.cancel_timer(queue, number)
    assert not subject.broker.cancel_timer(queue, number)
    subject.pass_time(3.0 + subject.coarse)
    assert bodies(subject.take(subject.receiver(queue))) == [b"b"]
    assert not subject.broker.cancel_timer(queue, other)


def test_a_message_id_is_stored_once_within_the_window(subject):
    if not subject.can.duplicate_detection:
        with pytest.raises(CapabilityError):
            subject.queue(duplicate_window=30.0)
        return
    queue = subject.queue(duplicate_window=30.0)
    receiver = subject.receiver(queue)
    subject.send(queue, b"first", b"again", message_id="same")
    settle(receiver, Complete(), subject.one(receiver))
    subject.send(queue, b"after completion", message_id="same")
    subject.send(queue, b"other", message_id="other")
    subject.send(queue, b"without", b"without")
    subject.assert_all(bodies(subject.take(receiver, 3)), [b"other", b"without", b"without"])
    subject.assert_nothing(receiver)


def test_without_a_window_every_send_counts(subject):
    queue = subject.queue()
    subject.send(queue, b"1", b"2", message_id="same")
    assert len(subject.take(subject.receiver(queue), 2)) == 2


def test_receive_and_delete_takes_at_most_once(subject):
    queue = subject.queue()
    subject.send(queue, b"1", b"2")
    receiver = subject.receiver(queue, delete=True)
    taken = subject.take(receiver, 2)
    assert sorted(bodies(taken)) == [b"1", b"2"]
    with pytest.raises(AztaskError):
        settle(receiver, Complete(), taken[0])
    subject.lapse()
    subject.assert_nothing(subject.receiver(queue))


def test_eight_threads_send_and_none_is_lost(subject):
    queue = subject.queue()

    def work(thread):
        for number in range(10):
            subject.send(queue, b"%d-%d" % (thread, number))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = subject.take(subject.receiver(queue), 80)
    assert len(set(bodies(taken))) == 80


def test_a_message_beyond_the_limit_is_refused_whole(subject):
    queue = subject.queue()
    limit = subject.can.max_message_bytes
    with pytest.raises(MessageTooLarge):
        subject.send(queue, b"small", bytes(limit + 1))
    subject.assert_nothing(subject.receiver(queue))


@pytest.mark.parametrize(
    "name", ["", "a/../b", "a" * 261, "Ca\x1b[31mps", "new\nline", "a\x00b", "\ud800", "-", "ö"]
)
def test_a_name_that_is_not_allowed_is_refused_with_the_rule(subject, name):
    for attempt in (
        lambda: subject.broker.declare(name),
        lambda: subject.send(name, b"x"),
        lambda: subject.broker.receiver(name, lease=subject.lease),
    ):
        with pytest.raises(InvalidQueueName) as caught:
            attempt()
        text = str(caught.value)
        assert text.isprintable()
        assert "1 to" in text or "characters" in text
    assert name not in subject.broker.queues()


def test_a_queue_that_does_not_exist_is_not_found(subject):
    for attempt in (
        lambda: subject.broker.stats("not-there"),
        lambda: subject.broker.peek("not-there"),
        lambda: subject.broker.purge("not-there"),
        lambda: subject.broker.delete("not-there"),
    ):
        with pytest.raises(QueueNotFound, match="not-there"):
            attempt()


def test_queues_come_and_go(subject):
    queue = subject.queue()
    subject.broker.declare(queue)
    assert queue in subject.broker.queues()
    assert subject.broker.queues() == sorted(subject.broker.queues())
    assert queue in subject.broker.listing().queues
    assert queue not in subject.broker.listing().foreign
    subject.send(queue, b"x")
    receiver = subject.receiver(queue)
    subject.broker.delete(queue)
    assert queue not in subject.broker.queues()
    with pytest.raises(QueueNotFound):
        receiver.receive(1, 0.0)
