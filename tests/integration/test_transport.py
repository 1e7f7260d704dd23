"""The Kombu transport over the local broker: real files, real threads, real forks."""

import dataclasses
import json
import logging
import multiprocessing
import os
import socket
import threading
import time
import zlib

import kombu
import pytest

from aztask.celery import transport
from aztask.celery.transport.names import original_name
from aztask.errors import ConfigurationError, EncodeError, InvalidQueueName, QueueNotFound
from aztask.message.codec import Codec
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage
from aztask.message.signatures import SignatureRules
from aztask.queues.base import QueueOptions
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker
from aztask.sending.publisher import Publisher

transport.register()


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "queues.db")


@pytest.fixture
def broker(path):
    database = Database(path)
    yield LocalBroker(database)
    database.close()


@pytest.fixture
def connect(broker):
    """A function that opens connections; all are closed at the end."""
    opened = []

    def open_connection(**options):
        connection = kombu.Connection("aztask://", transport_options={"broker": broker, **options})
        opened.append(connection)
        return connection

    yield open_connection
    for connection in opened:
        connection.release()


def consume(connection, queue="q", **options):
    """A started consumer that keeps its messages in `.got`."""
    queue = kombu.Queue(queue) if isinstance(queue, str) else queue
    consumer = kombu.Consumer(connection.channel(), [queue], **options)
    consumer.got = []
    consumer.register_callback(lambda body, message: consumer.got.append(message))
    consumer.consume()
    return consumer


def drain(connection, consumer, messages=1, timeout=5.0):
    until = time.monotonic() + timeout
    while len(consumer.got) < messages:
        connection.drain_events(timeout=max(0.0, until - time.monotonic()))
    return consumer.got[-1]


def nothing_comes(connection, seconds=0.2):
    with pytest.raises(socket.timeout):
        connection.drain_events(timeout=seconds)


def dead_letters(broker, queue="q"):
    return [
        (peeked.dead_letter_reason, peeked.envelope.body)
        for peeked in broker.peek(queue, dead_letter=True)
    ]


def counts(broker, queue="q"):
    stats = broker.stats(queue)
    return (stats.active, stats.leased, stats.scheduled, stats.dead)


def eventually(check, seconds=5.0):
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)


# -- settling ----------------------------------------------------------------------------------


def test_ack_completes(connect, broker):
    connection = connect()
    connection.Producer().publish({"n": 1}, routing_key="q", headers={"h": "x"}, priority=3)
    consumer = consume(connection)
    message = drain(connection, consumer)
    assert message.payload == {"n": 1}
    assert message.headers == {"h": "x"}
    assert message.properties["priority"] == 3
    assert message.delivery_info["redelivered"] is False
    assert counts(broker) == (0, 1, 0, 0)
    message.ack()
    assert counts(broker) == (0, 0, 0, 0)


def test_reject_dead_letters_with_a_reason(connect, broker):
    connection = connect()
    connection.Producer().publish("text", routing_key="q")
    drain(connection, consume(connection)).reject()
    assert dead_letters(broker) == [("rejected", b"text")]


def test_requeue_makes_it_available_again(connect, broker):
    connection = connect()
    connection.Producer().publish(b"\x00\xff", routing_key="q")
    consumer = consume(connection)
    drain(connection, consumer).requeue()
    again = drain(connection, consumer, messages=2)
    assert again.delivery_info["redelivered"] is True
    assert again.body == b"\x00\xff"
    again.ack()
    assert counts(broker) == (0, 0, 0, 0)


def test_ack_of_several(connect, broker):
    connection = connect()
    for n in range(4):
        connection.Producer().publish(n, routing_key="q")
    consumer = consume(connection)
    drain(connection, consumer, messages=4)
    consumer.got[2].ack(multiple=True)
    assert counts(broker)[1] == 1
    consumer.got[3].ack()
    assert counts(broker) == (0, 0, 0, 0)


def test_closing_gives_everything_back(connect, broker):
    connection = connect()
    for n in range(3):
        connection.Producer().publish(n, routing_key="q")
    drain(connection, consume(connection))
    assert counts(broker) == (0, 3, 0, 0)
    connection.release()
    assert counts(broker) == (3, 0, 0, 0)


def test_cancelling_gives_back_what_was_not_handed_out_as_never_delivered(connect, broker):
    connection = connect()
    for n in range(3):
        connection.Producer().publish(n, routing_key="q")
    consumer = consume(connection)
    first = drain(connection, consumer)
    consumer.cancel()
    assert counts(broker) == (2, 1, 0, 0)
    assert [peeked.delivery_count for peeked in broker.peek("q")][1:] == [0, 0]
    first.ack()
    assert counts(broker) == (2, 0, 0, 0)


def test_no_ack_receives_and_deletes(connect, broker):
    connection = connect()
    for n in range(3):
        connection.Producer().publish(n, routing_key="q")
    consumer = consume(connection, no_ack=True)
    message = drain(connection, consumer)
    assert counts(broker) == (2, 0, 0, 0)
    message.ack()  # Kombu's own rule: nothing to do
    assert len(consumer.got) == 1


def test_a_message_can_be_fetched_by_hand(connect, broker):
    connection = connect()
    channel = connection.channel()
    queue = kombu.Queue("q", channel=channel)
    queue.declare()
    assert queue.get() is None
    connection.Producer().publish(7, routing_key="q")
    message = queue.get()
    assert message.payload == 7
    message.ack()
    assert counts(broker) == (0, 0, 0, 0)


def test_a_message_fetched_by_hand_does_not_wait_for_the_prefetch_count(connect):
    connection = connect()
    for n in range(3):
        connection.Producer().publish(n, routing_key="q")
    consumer = consume(connection, prefetch_count=1)
    drain(connection, consumer)
    assert kombu.Queue("q", channel=consumer.channel).get().payload == 1


def test_an_ack_that_the_broker_does_not_confirm_is_an_error_and_closing_still_ends(path, caplog):
    database = Database(path)
    connection = kombu.Connection("aztask://", transport_options={"broker": LocalBroker(database)})
    for n in range(3):
        connection.Producer().publish(n, routing_key="q")
    consumer = consume(connection)
    message = drain(connection, consumer)
    database.close()
    with pytest.raises(connection.connection_errors + connection.channel_errors):
        message.ack()
    assert not message.acknowledged
    connection.release()
    assert "could not give back 2 messages" in caplog.text


def test_closing_does_not_fail_when_the_queue_is_gone(connect, broker, caplog):
    connection = connect()
    for n in range(3):
        connection.Producer().publish(n, routing_key="q")
    drain(connection, consume(connection))
    broker.delete("q")
    connection.release()
    assert broker.queues() == []


# -- leases ------------------------------------------------------------------------------------


def test_what_is_not_acknowledged_is_renewed_started_or_not(connect, broker):
    connection = connect(lease=0.5)
    for n in range(3):
        connection.Producer().publish(n, routing_key="q")
    consumer = consume(connection)
    message = drain(connection, consumer)
    time.sleep(1.5)
    assert counts(broker) == (0, 3, 0, 0)
    message.ack()
    for n in (2, 3):
        drain(connection, consumer, messages=n).ack()
    assert counts(broker) == (0, 0, 0, 0)
    assert [m.delivery_info["delivery_count"] for m in consumer.got] == [1, 1, 1]


def test_an_ack_after_the_lease_was_lost_is_told_and_harmless(connect, broker, caplog):
    connection = connect(lease=0.3)
    connection.Producer().publish(1, routing_key="q")
    consumer = consume(connection)
    message = drain(connection, consumer)
    # As a machine that stood still would: nobody renews, and somebody else gets the message.
    connection.transport.keeper.stop()
    other = broker.receiver("q", lease=30.0)
    taken = other.receive(1, 3.0)
    assert len(taken) == 1
    with caplog.at_level(logging.WARNING):
        message.ack()
    assert "too late to complete" in caplog.text
    assert counts(broker) == (0, 1, 0, 0)


def test_a_message_whose_lease_lapsed_in_the_buffer_is_not_handed_out(connect, caplog):
    connection = connect(lease=0.3)
    for n in range(2):
        connection.Producer().publish(n, routing_key="q")
    consumer = consume(connection)
    drain(connection, consumer).ack()
    connection.transport.keeper.stop()
    time.sleep(0.4)
    with caplog.at_level(logging.WARNING):
        message = drain(connection, consumer, messages=2)
    assert "waited here until its lease expired" in caplog.text
    assert message.delivery_info["delivery_count"] == 2


def test_prefetch_is_honoured(connect, broker):
    connection = connect()
    for n in range(5):
        connection.Producer().publish(n, routing_key="q")
    consumer = consume(connection, prefetch_count=2)
    drain(connection, consumer, messages=2)
    nothing_comes(connection)
    assert counts(broker) == (3, 2, 0, 0)
    consumer.got[0].ack()
    drain(connection, consumer, messages=3)
    nothing_comes(connection)
    consumer.qos(prefetch_count=0)
    drain(connection, consumer, messages=5)
    for message in consumer.got[1:]:
        message.ack()
    assert counts(broker) == (0, 0, 0, 0)


def test_several_queues_take_turns(connect):
    connection = connect()
    consumers = [consume(connection, name) for name in ("a", "b", "c")]
    for name in ("a", "b", "c"):
        for n in range(3):
            connection.Producer().publish(n, routing_key=name)
    for _ in range(9):
        connection.drain_events(timeout=5)
    assert [len(consumer.got) for consumer in consumers] == [3, 3, 3]
    for consumer in consumers:
        assert [message.payload for message in consumer.got] == [0, 1, 2]


# -- delays ------------------------------------------------------------------------------------


def test_a_countdown_lies_in_the_broker(connect, broker):
    connection = connect()
    connection.Producer().publish(1, routing_key="q", countdown=600)
    assert counts(broker) == (0, 0, 1, 0)
    consumer = consume(connection)
    nothing_comes(connection)
    connection.Producer().publish(2, routing_key="q", countdown=0.4)
    message = drain(connection, consumer)
    assert message.payload == 2
    message.ack()
    assert counts(broker) == (0, 0, 1, 0)


def test_a_message_that_comes_before_its_eta_is_hidden_again(connect, broker, monkeypatch):
    monkeypatch.setattr("aztask.celery.transport.channel.HELD_SECONDS", 0.3)
    eta = time.time() + 3.0
    headers = {"eta": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(eta)) + f"{eta % 1:.6f}"[1:]}
    broker.send("q", [Envelope(b"1", headers=headers, message_id="m", content_type="text/plain")])
    connection = connect()
    consumer = consume(connection)
    nothing_comes(connection)
    assert counts(broker) == (0, 0, 1, 0)
    assert [peeked.envelope.message_id for peeked in broker.peek("q")] == ["m~1"]
    message = drain(connection, consumer)
    assert time.time() >= eta
    message.ack()
    assert counts(broker) == (0, 0, 0, 0)


def test_a_message_that_expired_is_dead_lettered(connect, broker):
    connection = connect()
    connection.Producer().publish("late", routing_key="q", expiration=0.05)
    connection.Producer().publish("fresh", routing_key="q", expiration=60)
    time.sleep(0.1)
    message = drain(connection, consume(connection))
    assert message.payload == "fresh"
    message.ack()
    assert dead_letters(broker) == [("expired", b"late")]


def test_a_delay_that_cannot_be_is_refused_at_the_send(connect, broker):
    with pytest.raises(EncodeError):
        connect().Producer().publish(1, routing_key="q", countdown=float("nan"))
    assert broker.queues() == []


# -- what cannot be decoded --------------------------------------------------------------------

UNDECODABLE = {
    "broken json": Envelope(b"[", content_type="application/json"),
    "deep json": Envelope(b"[" * 100_000, content_type="application/json"),
    "broken msgpack": Envelope(b"\xc1"),
    "lying msgpack": Envelope(b"\xdd\xff\xff\xff\xff"),
    "pickle": Envelope(b"\x80\x04.", content_type="application/x-python-serialize"),
    "bomb": Envelope(
        zlib.compress(bytes(20_000_000)), headers={"compression": "application/x-gzip"}
    ),
}


def test_undecodable_messages_are_dead_lettered_once_and_never_seen(connect, broker, caplog):
    broker.send("q", list(UNDECODABLE.values()))
    connection = connect()
    connection.Producer().publish("good", routing_key="q")
    consumer = consume(connection, accept=["json", "msgpack", "text/plain"])
    message = drain(connection, consumer)
    assert message.payload == "good"
    message.ack()
    nothing_comes(connection)
    assert [m.payload for m in consumer.got] == ["good"]
    dead = dead_letters(broker)
    assert {reason for reason, _ in dead} == {"undecodable"}
    assert [body for _, body in dead] == [envelope.body for envelope in UNDECODABLE.values()]
    assert caplog.text.count("is not delivered but dead-lettered (undecodable)") == len(dead)
    assert "accept_content" in caplog.text


def test_a_consumer_gets_every_type_that_it_accepts_itself(connect, broker):
    connection = connect()
    for serializer in ("pickle", "yaml", "json"):
        if serializer in kombu.serialization.registry.name_to_type:
            connection.Producer().publish({"a": 1}, routing_key="q", serializer=serializer)
    consumer = consume(connection, accept=["pickle", "json"])
    drain(connection, consumer, 2)
    assert [message.payload for message in consumer.got] == [{"a": 1}] * 2
    for message in consumer.got:
        message.ack()
    nothing_comes(connection)
    consumer.cancel()
    connection.Producer().publish({"a": 2}, routing_key="q", serializer="pickle")
    consume(connection)  # it names no types: Kombu disables pickle then
    nothing_comes(connection)
    assert {reason for reason, _ in dead_letters(broker)} == {"undecodable"}


def test_a_compressed_message_is_decompressed_here(connect):
    connection = connect()
    connection.Producer().publish({"a": "b" * 1000}, routing_key="q", compression="zlib")
    message = drain(connection, consume(connection))
    assert message.payload == {"a": "b" * 1000}
    assert "compression" not in message.headers
    message.ack()


def test_further_content_types_are_handed_out_when_accepted(connect, broker):
    broker.send("q", [Envelope(b"raw", content_type="application/x-own")])
    connection = connect(accept=["application/x-own"])
    consumer = kombu.Consumer(connection.channel(), [kombu.Queue("q")])
    got = []
    consumer.on_message = got.append
    consumer.consume()
    connection.drain_events(timeout=5)
    assert got[0].body == b"raw"
    got[0].ack()


def test_a_type_that_only_the_option_lets_through_is_decoded_by_kombus_own_rule(connect):
    """`accept` hands it out; whether its content may be read is still the consumer's to say."""
    connection = connect(accept=["msgpack"])
    connection.Producer().publish({"a": 1}, routing_key="q", serializer="msgpack")
    consumer = kombu.Consumer(connection.channel(), [kombu.Queue("q")], accept=["json"])
    got = []
    consumer.on_message = got.append
    consumer.consume()
    connection.drain_events(timeout=5)
    with pytest.raises(kombu.exceptions.ContentDisallowed):
        got[0].decode()
    got[0].ack()


# -- exchanges ---------------------------------------------------------------------------------


def test_exchanges_route_and_nothing_is_dropped_silently(connect, broker):
    connection = connect()
    producer = connection.Producer()
    topic = kombu.Exchange("events", "topic")
    queues = [
        kombu.Queue("all", topic, routing_key="#"),
        kombu.Queue("red", topic, routing_key="*.red"),
    ]
    for key in ("car.red", "car.blue"):
        producer.publish(key, exchange=topic, routing_key=key, declare=queues)
    assert counts(broker, "all")[0] == 2
    assert counts(broker, "red")[0] == 1
    exchange = kombu.Exchange("direct", "direct")
    direct = {"exchange": exchange, "routing_key": "nobody", "declare": [exchange]}
    with pytest.raises(QueueNotFound, match="no queue is bound"):
        producer.publish(1, headers={"task": "shop.pay"}, **direct)
    producer.publish(1, **direct)  # as in AMQP


def test_a_new_queue_gets_the_lease_and_the_sessions_of_the_options(connect, broker):
    connection = connect(lease=20, leases={"slow": 90}, sessions=["ordered"])
    for name in ("q", "slow", "ordered"):
        kombu.Queue(name, channel=connection.channel()).declare()
    assert [broker.engine.queue(name).lease_seconds for name in ("q", "slow")] == [20.0, 90.0]
    assert broker.engine.queue("ordered").sessions
    again = connect(lease=50)
    kombu.Queue("q", channel=again.channel()).declare()
    assert broker.engine.queue("q").lease_seconds == 20.0, "an existing queue keeps its own"


def test_messages_of_a_session_arrive_one_by_one_and_in_order(connect, broker):
    broker.declare("q", QueueOptions(sessions=True))
    connection = connect()
    for n in range(3):
        connection.Producer().publish(n, routing_key="q", session="a")
    consumer = consume(connection)
    first = drain(connection, consumer)
    nothing_comes(connection)
    first.ack()
    drain(connection, consumer, messages=2).requeue()
    drain(connection, consumer, messages=3).ack()
    drain(connection, consumer, messages=4).ack()
    assert [message.payload for message in consumer.got] == [0, 1, 1, 2]


def test_a_name_that_the_broker_refuses_is_translated_when_asked_for(connect, broker):
    with pytest.raises(InvalidQueueName):
        connect().Producer().publish(1, routing_key="Invoices.EU")
    connection = connect(translate_names=True)
    connection.Producer().publish(1, routing_key="Invoices.EU")
    message = drain(connection, consume(connection, "Invoices.EU"))
    assert message.delivery_info["routing_key"] == "Invoices.EU"
    message.ack()
    assert broker.queues() == ["enc-x49nvoicesx2ex45x55"]
    assert original_name("enc-x49nvoicesx2ex45x55") == "Invoices.EU"


def temporary(name, exchange, key=""):
    return kombu.Queue(name, exchange, routing_key=key, exclusive=True, auto_delete=True)


def test_every_mailbox_gets_a_copy_in_whatever_process_it_is(connect, broker):
    """The publisher's connection knows nothing of the listeners' bindings."""
    control = kombu.Exchange("control", "fanout", durable=False)
    listeners = [connect() for _ in range(3)]
    consumers = [
        consume(connection, temporary(f"worker{n}@host.control", control), no_ack=True)
        for n, connection in enumerate(listeners)
    ]
    connect().Producer().publish("hello", exchange=control, declare=[control])
    for connection, consumer in zip(listeners, consumers, strict=True):
        message = drain(connection, consumer)
        assert message.payload == "hello"
        assert message.delivery_info["exchange"] == "control"
        assert "aztask-exchange" not in message.headers
        nothing_comes(connection)
    assert broker.queues() == [], "mailboxes are not listed among the queues"


def test_topics_and_direct_keys_reach_the_mailboxes_that_are_bound_for_them(connect):
    events, replies = kombu.Exchange("events", "topic"), kombu.Exchange("replies", "direct")
    connection, sender = connect(), connect().Producer()
    workers = consume(connection, temporary("w", events, "worker.#"), no_ack=True)
    mine = consume(connection, temporary("r", replies, "me"), no_ack=True)
    for exchange, key in ((events, "worker.online"), (events, "task.sent"), (replies, "me")):
        sender.publish(key, exchange=exchange, routing_key=key, declare=[exchange])
    sender.publish("you", exchange=replies, routing_key="you")  # the client has gone
    drain(connection, workers)
    drain(connection, mine)
    nothing_comes(connection)
    assert [message.payload for message in workers.got] == ["worker.online"]
    assert [message.payload for message in mine.got] == ["me"]


def test_a_mailbox_ends_with_its_channel(connect, broker):
    control = kombu.Exchange("control", "fanout", durable=False)
    channel = connect().channel()
    consumer = kombu.Consumer(channel, [temporary("box", control)])
    consumer.consume()
    assert len(broker.engine.queues()) == 1
    channel.close()
    assert broker.engine.queues() == []
    sender = connect().Producer()
    sender.publish("x", exchange=control, declare=[control])  # no process listens


def test_messages_of_a_mailbox_can_be_acknowledged(connect, broker):
    control = kombu.Exchange("control", "fanout")
    connection = connect()
    consumer = consume(connection, temporary("box", control))
    connection.Producer().publish("again", exchange=control)
    drain(connection, consumer).requeue()
    drain(connection, consumer, messages=2).ack()
    nothing_comes(connection)


def test_a_mailbox_that_was_removed_is_created_again(connect, broker):
    control = kombu.Exchange("control", "fanout")
    connection = connect()
    consumer = consume(connection, temporary("box", control), no_ack=True)
    broker.mailboxes().delete("box")  # as another process does with a frozen one's
    nothing_comes(connection)
    connection.transport.boxes.renew("box")  # as its thread does when it goes on
    connection.Producer().publish("x", exchange=control)
    assert drain(connection, consumer).payload == "x"


def test_a_temporary_queue_that_is_not_bound_is_an_ordinary_one(connect, broker):
    connection = connect()
    queue = kombu.Queue("replies", channel=connection.channel(), auto_delete=True)
    queue.declare()
    assert broker.queues() == []
    connection.Producer().publish("task", routing_key="q")
    assert broker.queues() == ["q", "replies"], "there before anybody can know its name"


def test_a_command_runs_although_no_thread_drains(connect):
    """As in a worker whose draining thread waits for a free process of its pool."""
    control = kombu.Exchange("celery.pidbox", "fanout", durable=False)
    consumer = consume(connect(), temporary("w@host.celery.pidbox", control), no_ack=True)
    connect().Producer().publish("ping", exchange=control, declare=[control])
    eventually(lambda: [message.payload for message in consumer.got] == ["ping"])


def test_a_command_that_ends_the_process_ends_the_draining_thread(connect):
    control = kombu.Exchange("celery.pidbox", "fanout", durable=False)
    connection = connect()
    consumer = consume(connection, temporary("w@host.celery.pidbox", control), no_ack=True)

    def shut_down(body, message):
        raise SystemExit("shutdown")

    consumer.register_callback(shut_down)
    connect().Producer().publish("shutdown", exchange=control, declare=[control])
    with pytest.raises(SystemExit, match="shutdown"):
        drain(connection, consumer, messages=2)


def test_fanout_can_be_switched_off(connect):
    assert connect().supports_exchange_type("fanout")
    connection = connect(remote_control=False)
    assert connection.supports_exchange_type("direct")
    assert not connection.supports_exchange_type("fanout")
    exchange = kombu.Exchange("control", "fanout")
    with pytest.raises(ConfigurationError, match="remote_control"):
        connection.Producer().publish("x", exchange=exchange, declare=[exchange])


def test_a_queue_is_purged_and_deleted(connect, broker):
    connection = connect()
    connection.Producer().publish(1, routing_key="q")
    queue = kombu.Queue("q", channel=connection.channel())
    assert queue.purge() == 1
    queue.delete()
    assert broker.queues() == []


# -- identity ----------------------------------------------------------------------------------


def test_every_message_of_a_foreign_producer_gets_a_fresh_id(connect, broker):
    producer = connect().Producer()
    for _ in range(3):
        producer.publish(1, routing_key="q", correlation_id="same")
    peeked = broker.peek("q")
    assert len({p.envelope.message_id for p in peeked}) == 3
    assert {p.envelope.correlation_id for p in peeked} == {"same"}


def test_the_body_is_stored_as_it_is(connect, broker):
    connect().Producer().publish({"a": 1}, routing_key="q")
    envelope = broker.peek("q")[0].envelope
    assert json.loads(envelope.body) == {"a": 1}
    assert (envelope.content_type, envelope.content_encoding) == ("application/json", "utf-8")


# -- the publisher -----------------------------------------------------------------------------


FROZEN = SignatureRules(now=lambda: 1_800_000_000.0)


@pytest.mark.parametrize(
    "codec", [Codec(), Codec(serializer="json", signing_keys=[b"k" * 32], signatures=FROZEN)]
)
def test_one_by_one_and_in_batches_the_same_is_sent(broker, codec):
    body, content_type, encoding = codec.encode_arguments(["a", 1.5], {"x": None})
    plain = TaskMessage(
        id="t", task="shop.pay", queue="q", body=body,
        content_type=content_type, content_encoding=encoding,
    )  # fmt: skip
    full = dataclasses.replace(
        plain, id="u", eta=time.time() + 5, expires=2e9, session="s", reply_to="r", hop=2,
        generation=1, resubmit_count=2, saved=b"s", time_limit=5.0, correlation_id="c",
        traceparent="00-1-2-01", extra={"tenant": "x"}, origin="me", group="g",
    )  # fmt: skip
    publisher = Publisher(broker, codec)
    for message in (plain, full):
        publisher.publish("one", message, delay=60.0)
    publisher.publish_many("many", [plain, full], delay=60.0)
    publisher.close()
    one, many = ([p.envelope for p in broker.peek(name)] for name in ("one", "many"))
    assert one == many
    assert [envelope.body for envelope in one] == [body, body]
    assert codec.from_envelope(one[0], "q") == plain
    assert counts(broker, "one") == (0, 0, 2, 0)


def test_many_threads_publish_through_one_publisher(broker):
    codec = Codec()
    publisher = Publisher(broker, codec)

    def publish(thread):
        for n in range(25):
            message = TaskMessage(id=f"{thread}-{n}", task="t", queue="q", body=b"\x93\x90\x80\x80")
            publisher.publish("q", message)

    threads = [threading.Thread(target=publish, args=[n]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = {p.envelope.message_id for p in broker.peek("q", limit=200)}
    assert ids == {f"{thread}-{n}:0:0" for thread in range(4) for n in range(25)}


# -- threads and processes ---------------------------------------------------------------------


def test_acks_come_from_any_thread(connect, broker):
    connection = connect(lease=0.4)
    for n in range(40):
        connection.Producer().publish(n, routing_key="q")
    consumer = consume(connection, prefetch_count=8)
    threads, seen = [], []

    def work(message):
        time.sleep(0.02 * (message.payload % 5))
        message.ack()

    consumer.callbacks = [lambda body, message: seen.append(message.payload)]
    consumer.register_callback(
        lambda body, message: (
            threads.append(threading.Thread(target=work, args=[message])) or threads[-1].start()
        )
    )
    while len(seen) < 40:
        connection.drain_events(timeout=5)
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(40))
    assert counts(broker) == (0, 0, 0, 0)


def in_child(function):
    """Run `function` in a forked child; its exit code."""
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    process.join(10)
    assert process.exitcode is not None, "the child hangs"
    return process.exitcode


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_leaves_its_parents_messages_alone(path):
    connection = kombu.Connection(
        "aztask://",
        transport_options={"broker": lambda: LocalBroker(Database(path)), "lease": 0.5},
    )
    for n in range(3):
        connection.Producer().publish(n, routing_key="q")
    consumer = consume(connection)
    message = drain(connection, consumer)

    def child():
        message.ack()  # not the child's to settle: nothing happens
        connection.Producer().publish("from the child", routing_key="other")
        own = consume(connection, "other")
        drain(connection, own).ack()
        connection.release()
        os._exit(0 if own.got[0].payload == "from the child" else 1)

    assert in_child(child) == 0
    broker = connection.transport.broker
    time.sleep(0.7)  # longer than the lease: the parent renews as before
    assert counts(broker) == (0, 3, 0, 0)
    message._state = "RECEIVED"
    message.ack()
    assert counts(broker) == (0, 2, 0, 0)
    assert counts(broker, "other") == (0, 0, 0, 0)
    connection.release()
    assert counts(LocalBroker(Database(path))) == (2, 0, 0, 0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_consumer_that_is_killed_loses_nothing(path):
    parent = LocalBroker(Database(path))
    parent.declare("q")

    def child():
        connection = kombu.Connection(
            "aztask://",
            transport_options={"broker": lambda: LocalBroker(Database(path)), "lease": 0.5},
        )
        connection.Producer().publish(1, routing_key="q")
        drain(connection, consume(connection))
        os._exit(9)

    assert in_child(child) == 9
    assert counts(parent) == (0, 1, 0, 0)
    connection = kombu.Connection("aztask://", transport_options={"broker": parent})
    message = drain(connection, consume(connection))
    assert message.delivery_info["redelivered"] is True
    message.ack()
    connection.release()
    assert counts(parent) == (0, 0, 0, 0)
