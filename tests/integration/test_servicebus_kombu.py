"""Plain Kombu producers and consumers, and an unchanged Celery app, on Service Bus."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import kombu
import pytest
import test_celery
from bus import broker_at

import aztask.celery.transport
from aztask.celery.transport.names import original_name
from aztask.errors import ConfigurationError, InvalidQueueName, MessageTooLarge
from aztask.message.envelope import Envelope
from aztask.queues.base import QueueOptions
from aztask.queues.servicebus.admin import ADMIN_VARIABLE, administration_client
from aztask.queues.servicebus.broker import ServiceBusBroker
from aztask.queues.servicebus.mailboxes import _notes_of
from aztask.testing import RunningEmulator, emulator

LEASE = 3.0


@pytest.fixture
def broker(bus: RunningEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceBusBroker]:
    monkeypatch.setenv(ADMIN_VARIABLE, bus.admin_connection_string)
    made = broker_at(bus)
    made.declare("plain", QueueOptions(lease=LEASE))
    made.declare("celery", QueueOptions(lease=6.0))  # its processes start while others are busy
    made.declare("ordered", QueueOptions(lease=LEASE, sessions=True))
    yield made
    for name in ("plain", "celery", "ordered"):
        made.delete(name)
    made.close()


class Consumer:
    """A started consumer of one queue."""

    def __init__(self, connection: kombu.Connection, queue: str | kombu.Queue = "plain") -> None:
        self.got: list[kombu.Message] = []
        self._connection = connection
        queue = kombu.Queue(queue) if isinstance(queue, str) else queue
        self._consumer = kombu.Consumer(connection.channel(), [queue])
        self._consumer.register_callback(lambda body, message: self.got.append(message))
        self._consumer.consume()

    def drain(self, count: int, seconds: float = 15.0) -> kombu.Message:
        until = time.monotonic() + seconds
        while len(self.got) < count:
            self._connection.drain_events(timeout=max(0.0, until - time.monotonic()))
        return self.got[-1]

    def cancel(self) -> None:
        self._consumer.cancel()


def connected(bus: RunningEmulator, **options: object) -> kombu.Connection:
    aztask.celery.transport.register()
    wish = {"broker": bus.connection_string, **options}
    return kombu.Connection("aztask://", transport_options=wish)


def test_a_plain_kombu_producer_and_consumer(
    bus: RunningEmulator, broker: ServiceBusBroker
) -> None:
    with connected(bus) as connection:
        producer = connection.Producer()
        consumer = Consumer(connection)
        producer.publish({"n": 1}, routing_key="plain", headers={"h": "x"}, priority=3)
        first = consumer.drain(1)
        assert first.payload == {"n": 1}
        assert first.headers == {"h": "x"}
        assert first.properties["priority"] == 3
        assert first.delivery_info["redelivered"] is False
        first.ack()
        producer.publish({"n": 2}, routing_key="plain")
        consumer.drain(2).requeue()
        again = consumer.drain(3)
        assert again.delivery_info["redelivered"] is True
        again.reject()
        consumer.cancel()
    (dead,) = broker.peek("plain", dead_letter=True)
    assert dead.dead_letter_reason == "rejected"
    assert broker.peek("plain") == []


def test_a_message_that_is_too_large_for_the_tier_is_compressed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = [{"task": "shop.resize", "args": [number]} for number in range(20_000)]
    with emulator(tier="standard") as standard:
        monkeypatch.setenv(ADMIN_VARIABLE, standard.admin_connection_string)
        with connected(standard) as connection:
            producer = connection.Producer()
            consumer = Consumer(connection)
            producer.publish(large, routing_key="plain")
            received = consumer.drain(1)
            assert received.payload == large
            received.ack()
            with pytest.raises(MessageTooLarge):
                producer.publish(os.urandom(300_000).hex(), routing_key="plain", retry=False)
            consumer.cancel()


def test_what_is_not_acknowledged_stays_leased_for_many_locks(
    bus: RunningEmulator, broker: ServiceBusBroker
) -> None:
    with connected(bus) as connection:
        for number in range(3):
            connection.Producer().publish(number, routing_key="plain")
        consumer = Consumer(connection)
        message = consumer.drain(1)
        rival = broker.receiver("plain", lease=LEASE)
        assert rival.receive(3, 3 * LEASE) == []
        message.ack()
        for count in (2, 3):
            consumer.drain(count).ack()
        assert [each.delivery_info["delivery_count"] for each in consumer.got] == [1, 1, 1]
        rival.close()
    assert broker.peek("plain") == []


def test_a_lock_that_may_not_be_read_is_learned_from_the_messages(
    bus: RunningEmulator, broker: ServiceBusBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    nobody = bus.admin_connection_string.replace(
        bus.admin_connection_string.split("//")[1].split(";")[0].rstrip("/"), f"127.0.0.1:{port}"
    )
    monkeypatch.setenv(ADMIN_VARIABLE, nobody)
    with connected(bus, declare=False) as connection:
        connection.Producer().publish("x", routing_key="plain")
        consumer = Consumer(connection)
        message = consumer.drain(1)
        time.sleep(2 * LEASE)
        message.ack()
        assert message.delivery_info["delivery_count"] == 1
    assert broker.peek("plain") == []


def test_a_lease_that_is_not_the_queues_lock_is_refused(
    bus: RunningEmulator, broker: ServiceBusBroker
) -> None:
    with connected(bus, lease=60) as connection:
        consumer = Consumer(connection)
        with pytest.raises(ConfigurationError, match="holds its messages for 3 s, not for 60 s"):
            consumer.drain(1)


def test_messages_of_a_session_arrive_in_order(
    bus: RunningEmulator, broker: ServiceBusBroker
) -> None:
    with connected(bus) as connection:
        for number in range(3):
            connection.Producer().publish(number, routing_key="ordered", session="a")
        consumer = Consumer(connection, "ordered")
        for count in (1, 2, 3):
            consumer.drain(count).ack()
        assert [message.payload for message in consumer.got] == [0, 1, 2]


def test_a_name_that_the_service_refuses_is_translated_when_asked_for(
    bus: RunningEmulator, broker: ServiceBusBroker
) -> None:
    with connected(bus) as connection, pytest.raises(InvalidQueueName):
        connection.Producer().publish(1, routing_key="Invoices EU")
    with connected(bus, translate_names=True) as connection:
        consumer = Consumer(connection, "Invoices EU")
        connection.Producer().publish(1, routing_key="Invoices EU")
        message = consumer.drain(1)
        assert message.delivery_info["routing_key"] == "Invoices EU"
        message.ack()
        consumer.cancel()
    (name,) = [each for each in broker.queues() if each.startswith("enc-")]
    assert original_name(name) == "Invoices EU"
    broker.delete(name)


def test_garbage_is_dead_lettered_and_the_next_message_comes(
    bus: RunningEmulator, broker: ServiceBusBroker
) -> None:
    broker.send("plain", [Envelope(b"\xc1", content_type="application/x-python-serialize")])
    with connected(bus) as connection:
        connection.Producer().publish("fine", routing_key="plain")
        assert Consumer(connection).drain(1).payload == "fine"
    (dead,) = broker.peek("plain", dead_letter=True)
    assert dead.envelope.body == b"\xc1"


def test_a_countdown_lies_in_the_broker(bus: RunningEmulator, broker: ServiceBusBroker) -> None:
    with connected(bus) as connection:
        eta = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() + 6))
        connection.Producer().publish(1, routing_key="plain", headers={"eta": eta, "task": "t"})
        (peeked,) = broker.peek("plain")
        assert peeked.due is not None
        consumer = Consumer(connection)
        with pytest.raises(socket.timeout):
            connection.drain_events(timeout=0.5)
        consumer.drain(1).ack()


# -- Celery --------------------------------------------------------------------------------------


class Site(test_celery.Site):
    """The same Celery app, whose broker is a Service Bus."""

    def __init__(self, folder: Path, bus: RunningEmulator, broker: ServiceBusBroker) -> None:
        super().__init__(folder)
        text = (folder / "celery_app.py").read_text()
        assert '"lease": 1.5' in text
        # The queue's own lock, which is not the usual 60 s, is the lease.
        (folder / "celery_app.py").write_text(text.replace(', "lease": 1.5', ""))
        self.environment["BROKER"] = bus.connection_string
        self.broker = broker  # type: ignore[assignment]


@pytest.fixture
def site(tmp_path: Path, bus: RunningEmulator, broker: ServiceBusBroker) -> Iterator[Site]:
    site = Site(tmp_path, bus, broker)
    yield site
    for process in site.processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def test_a_celery_app_over_service_bus(site: Site) -> None:
    """Retries, a countdown, a task longer than its lock, garbage, and a kill: nothing is lost."""
    site.broker.send("celery", [Envelope(b"\xc1garbage")])
    site.send(
        "for n in range(5): add.delay(n, 0)\n"
        "slow.delay(1, 7.0)\n"
        "slow.delay(2, 7.0)\n"
        "flaky.delay()\n"
        "add.apply_async((100, 0), countdown=10)"  # longer than the sender takes to end
    )
    assert site.counts()[2] == 1, "the countdown lies in the broker"
    first = site.worker("prefork")
    site.until(lambda: any(note.startswith("start") for note in site.notes()))
    os.killpg(first.pid, signal.SIGKILL)
    first.wait(10)
    site.worker("prefork")
    wanted = {*(f"add {n}" for n in (*range(5), 100)), "slow 1", "slow 2", "flaky 2"}
    site.until(lambda: wanted <= set(site.notes()))
    site.until(lambda: (site.counts()[0], *site.counts()[2:]) == (0, 0, 1))
    assert site.notes().count("slow 1") + site.notes().count("slow 2") == 2
    assert site.broker.peek("celery", dead_letter=True)[0].dead_letter_reason == "undecodable"


def test_a_worker_runs_the_tasks_of_a_session_in_order(site: Site) -> None:
    """A queue with sessions: in their order, one at a time, although a second slot is free."""
    site.send(
        "for n in range(4):\n"
        "    slow.apply_async((n, 0.3), queue='ordered', session='customer-7')\n"
    )
    site.worker("threads", "-Q", "ordered")
    wanted = [f"{step} {n}" for n in range(4) for step in ("start", "slow")]
    site.until(lambda: len(site.notes()) == len(wanted))
    assert site.notes() == wanted


def test_tasks_with_an_eta_start_at_their_time(site: Site) -> None:
    test_celery.check_on_time(site)


def test_what_is_revoked_before_there_is_a_worker(site: Site) -> None:
    test_celery.check_revoked_before_there_is_a_worker(site)


def test_inspect_scheduled_lists_what_waits_in_the_broker(site: Site) -> None:
    test_celery.check_scheduled(site, 5.0, shown=True)


def test_notes_are_kept_for_mailboxes_that_are_opened_later(broker: ServiceBusBroker) -> None:
    mailboxes = broker.mailboxes()
    assert mailboxes.kept("notes") == []
    mailboxes.keep("notes", [f"{number}" for number in range(1200)])
    mailboxes.keep("others", ["x"])
    broker.send(_notes_of("notes"), [Envelope(b"{"), Envelope(b"5"), Envelope(b'[6, "6"]')])
    assert broker.mailboxes().kept("notes") == [f"{number}" for number in range(1200)]
    assert _notes_of("notes") not in broker.queues()


def test_remote_control_and_events(site: Site) -> None:
    test_celery.check_remote_control(site, 3.0)


def test_every_mailbox_gets_a_copy_in_whatever_process_it_is(
    bus: RunningEmulator, broker: ServiceBusBroker
) -> None:
    control = kombu.Exchange("control", "fanout", durable=False)
    events = kombu.Exchange("events", "topic")
    with connected(bus) as one, connected(bus) as two, connected(bus) as sender:
        boxes = [
            Consumer(one, kombu.Queue("one@host", control, auto_delete=True)),
            Consumer(two, kombu.Queue("two@host", control, auto_delete=True)),
            Consumer(two, kombu.Queue("events", events, routing_key="task.*", auto_delete=True)),
        ]
        producer = sender.Producer()
        for key in ("worker.online", "task.sent"):
            producer.publish(key, exchange=events, routing_key=key, declare=[events])
        producer.publish("hello", exchange=control, declare=[control])
        for box, wanted in zip(boxes, ("hello", "hello", "task.sent"), strict=True):
            message = box.drain(1)
            assert message.payload == wanted
            message.ack()
        with pytest.raises(socket.timeout):
            two.drain_events(timeout=0.5)
    admin = administration_client(bus.admin_connection_string)
    left = {each.user_metadata for each in admin.list_subscriptions("aztask-mailboxes")}
    assert not left & {"one@host", "two@host", "events"}
    assert "aztask-mailboxes" not in broker.queues()
