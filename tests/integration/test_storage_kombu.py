"""A plain kombu producer and consumer on Storage queues, and the example that uses them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import azurite
import kombu
import kombu.pidbox
import pytest
import test_celery
from harness import ROOT
from storage import broker_at

import aztask.celery.transport
from aztask import App
from aztask.celery.transport.names import original_name
from aztask.errors import InvalidQueueName, MessageTooLarge
from aztask.queues.base import KEPT_SECONDS, PREFIX, Binding
from aztask.queues.storagequeue.mailboxes import LAG
from aztask.settlement import Complete

EXAMPLE = ROOT / "examples" / "storagequeue"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[azurite.Azurite]:
    with azurite.running(tmp_path_factory.mktemp("azurite")) as running:
        yield running


def consumer_of(
    connection: kombu.Connection, got: list[kombu.Message], queue: str = "plain"
) -> kombu.Consumer:
    consumer = kombu.Consumer(connection.channel(), [kombu.Queue(queue)])
    consumer.register_callback(lambda body, message: got.append(message))
    consumer.consume()
    return consumer


def drain(connection: kombu.Connection, got: list[kombu.Message], count: int) -> None:
    until = time.monotonic() + 10
    while len(got) < count:
        connection.drain_events(timeout=max(0.0, until - time.monotonic()))


def test_a_plain_kombu_producer_and_consumer(server):
    aztask.celery.transport.register()
    broker = broker_at(server.connection_string)
    options = {"broker": server.connection_string}
    got: list[kombu.Message] = []
    with kombu.Connection("aztask://", transport_options=options) as connection:
        producer = connection.Producer()
        consumer = consumer_of(connection, got)
        producer.publish({"n": 1}, routing_key="plain", headers={"h": "x"})
        drain(connection, got, 1)
        assert got[0].payload == {"n": 1}
        assert got[0].headers == {"h": "x"}
        got[0].ack()
        producer.publish({"n": 2}, routing_key="plain")
        drain(connection, got, 2)
        got[1].requeue()
        drain(connection, got, 3)
        assert got[2].delivery_info["redelivered"] is True
        got[2].reject()
        consumer.cancel()
    (dead,) = broker.peek("plain", dead_letter=True)
    assert dead.dead_letter_reason == "rejected"
    assert broker.stats("plain").total == 0
    broker.close()


def test_a_name_that_the_service_refuses_is_translated_when_asked_for(server):
    aztask.celery.transport.register()
    broker = broker_at(server.connection_string)
    options = {"broker": server.connection_string}
    with (
        kombu.Connection("aztask://", transport_options=options) as connection,
        pytest.raises(InvalidQueueName),
    ):
        connection.Producer().publish(1, routing_key="Invoices.EU")
    options["translate_names"] = True
    got: list[kombu.Message] = []
    with kombu.Connection("aztask://", transport_options=options) as connection:
        consumer = consumer_of(connection, got, "Invoices.EU")
        connection.Producer().publish(1, routing_key="Invoices.EU")
        drain(connection, got, 1)
        assert got[0].delivery_info["routing_key"] == "Invoices.EU"
        got[0].reject()
        consumer.cancel()
    (name,) = [each for each in broker.queues() if each.startswith("enc-")]
    assert original_name(name) == "Invoices.EU"
    (dead,) = broker.peek(name, dead_letter=True)
    assert dead.dead_letter_reason == "rejected"
    broker.delete(name)
    broker.close()


LARGE = [{"task": "shop.resize", "args": [number], "id": str(uuid4())} for number in range(1000)]


def test_a_message_that_is_too_large_is_compressed(server):
    """To a queue and to a mailbox; one that is too large even so is refused."""
    aztask.celery.transport.register()
    options = {"broker": server.connection_string}
    got: list[kombu.Message] = []
    everywhere = kombu.Exchange("everywhere", type="fanout")
    mailbox = kombu.Queue("", everywhere, exclusive=True, auto_delete=True)
    with kombu.Connection("aztask://", transport_options=options) as connection:
        producer = connection.Producer()
        consumer = consumer_of(connection, got)
        listener = kombu.Consumer(connection.channel(), [mailbox])
        listener.register_callback(lambda _, message: got.append(message))
        listener.consume()
        producer.publish(LARGE[:9], routing_key="plain")
        producer.publish(LARGE, routing_key="plain", headers={"h": "x"})
        producer.publish(LARGE, exchange=everywhere, declare=[everywhere])
        drain(connection, got, 3)
        small, large, copy = sorted(got, key=lambda each: (len(each.payload), not each.headers))
        assert [each.payload for each in (small, large, copy)] == [LARGE[:9], LARGE, LARGE]
        assert large.headers == {"h": "x"}
        for message in got:
            message.ack()
        random = os.urandom(80_000).hex()
        with pytest.raises(MessageTooLarge, match=r"has 2\d{5} bytes on the wire"):
            producer.publish(random, routing_key="plain", retry=False)
        with pytest.raises(MessageTooLarge, match=r"has 1\d{5} bytes on the wire"):
            producer.publish(random, routing_key="plain", compression="zlib", retry=False)
        consumer.cancel()
        listener.cancel()


def test_the_example(server, tmp_path: Path):
    environment = {
        **os.environ,
        "AZTASK_APP": "shop:app",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    text = (EXAMPLE / "shop.py").read_text()
    assert "UseDevelopmentStorage=true" in text
    (tmp_path / "shop.py").write_text(text.replace('broker="UseDevelopmentStorage=true", ', ""))
    environment["AZTASK_BROKER"] = server.connection_string

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stderr + done.stdout

    run("-m", "aztask", "queues", "create", "default", "slow")
    assert "12 tasks sent" in run("shop.py")
    log = run("-m", "aztask", "worker", "-Q", "default,slow", "--burst")
    assert "12 succeeded, 0 failed" in log


def test_every_queue_has_its_own_lease(server):
    app = App("leases", broker=server.connection_string)
    app.queue("short-tasks", lease=20.0)
    app.queue("long-tasks", lease=200.0)
    for queue in ("short-tasks", "long-tasks"):
        app.broker.declare(queue)
        app.send("any", queue=queue)
        with app.receive(queue) as lease:
            assert lease.delivery.lease_seconds == app.queue_settings(queue).lease_seconds
    app.close()


# -- Celery --------------------------------------------------------------------------------------


def test_every_mailbox_gets_a_copy_in_whatever_process_it_is(server):
    broker = broker_at(server.connection_string)
    options = {"broker": server.connection_string}
    control = kombu.Exchange("control", "fanout", durable=False)
    connections = [kombu.Connection("aztask://", transport_options=options) for _ in range(3)]
    got: list[list[kombu.Message]] = [[], []]
    for number, (connection, messages) in enumerate(zip(connections, got, strict=False)):
        queue = kombu.Queue(f"monitor{number}@host", control, exclusive=True)
        consumer = kombu.Consumer(connection.channel(), [queue], no_ack=True)
        consumer.register_callback(lambda body, message, messages=messages: messages.append(body))
        consumer.consume()
    connections[2].Producer().publish("hello", exchange=control, declare=[control])
    for connection, messages in zip(connections, got, strict=False):
        drain(connection, messages, 1)
        assert messages == ["hello"]
    assert not [name for name in broker.queues() if "mailbox" in name]
    for connection in connections:
        connection.release()
    names = [each.name for each in broker._client.service.list_queues()]
    assert not [name for name in names if "mailbox" in name], "removed with their connections"
    broker.close()


@pytest.fixture
def site(server, tmp_path):
    site = test_celery.Site(tmp_path)
    site.environment["BROKER"] = server.connection_string
    broker = broker_at(server.connection_string)
    broker.declare("celery")
    site.broker = broker
    yield site
    site.end()
    broker.delete("celery")
    broker.close()


def test_what_is_revoked_before_there_is_a_worker(site):
    site.counts = lambda: (site.broker.stats("celery").living, 0, 0, 0)
    test_celery.check_revoked_before_there_is_a_worker(site)


def test_inspect_scheduled_cannot_list_what_the_service_hides(site):
    test_celery.check_scheduled(site, 5.0, shown=False)


def test_a_task_that_is_sent_after_a_revocation_comes_after_it(server):
    """Workers poll the queue and their mailboxes, each at its own times."""
    mailbox = kombu.pidbox.Mailbox("celery", type="fanout")
    broker = broker_at(server.connection_string)
    options = {"broker": server.connection_string}
    with kombu.Connection("aztask://", transport_options=options) as connection:
        queue = kombu.Queue("after")
        queue(connection.channel()).declare()
        receiver = broker.receiver("after", lease=30.0)

        def sent(**headers: str) -> float:
            """Seconds until a message that is sent now is received."""
            connection.Producer().publish({}, routing_key="after", headers=headers)
            began = time.monotonic()
            (delivery,) = receiver.receive(1, 20.0)
            took = time.monotonic() - began
            receiver.settle([(delivery, Complete())])
            return took

        with kombu.Connection("aztask://", transport_options=options) as other:
            mailbox(other).multi_call("revoke", {"task_id": ["one"]}, timeout=0.0)
        assert sent(task="add", id="one") >= 1.0
        mailbox(connection).multi_call("revoke", {"task_id": ["two"]}, timeout=0.0)
        assert min(sent(note="this is no task") for _ in range(3)) < 1.0
        time.sleep(LAG)
        mailbox(connection).multi_call("revoke", {"task_id": ["three"]}, timeout=0.0)
        time.sleep(LAG / 2)
        mailbox(connection).multi_call("ping", {}, timeout=0.0)
        time.sleep(LAG / 2)
        # Other commands are nothing to wait for, however often they are sent.
        assert min(sent(task="add", id="four") for _ in range(3)) < 1.0
    broker.close()


def test_notes_are_kept_for_mailboxes_that_are_opened_later(server, monkeypatch):
    broker = broker_at(server.connection_string)
    service = broker._client.service

    def queues():
        found = {each.name for each in service.list_queues(name_starts_with=PREFIX)}
        return sorted(found - others)

    others: set[str] = set()
    others.update(queues())
    mailboxes = broker.mailboxes()
    notes = [f"{number:0100}" for number in range(100)]
    mailboxes.keep("notes", notes)
    assert len(queues()) == 3, "of 8 KiB each"
    mailboxes.keep("notes", ["one more"])
    mailboxes.keep("others", ["x"])
    assert len(queues()) == 4
    assert sorted(broker.mailboxes().kept("notes")) == [*notes, "one more"]
    assert broker.mailboxes().kept("others") == ["x"]
    service.get_queue_client(queues()[0]).set_queue_metadata({"notes": "damaged"})
    assert len(broker.mailboxes().kept("notes")) < 101
    for name in queues():
        service.delete_queue(name)
    mailboxes.keep("notes", ["again"])
    assert "again" in mailboxes.kept("notes"), "its own queue was removed"
    monkeypatch.setattr("aztask.queues.storagequeue.mailboxes.MOST_NOTE_QUEUES", 3)
    for number in range(4):
        broker.mailboxes().keep("notes", [f"{number}"])
    assert len(queues()) <= 3
    mailboxes._clock = Later(KEPT_SECONDS + 60)
    assert mailboxes.kept("notes") == []
    mailboxes.open("worker", [Binding("notes")])
    assert len(queues()) == 1, "opening a mailbox removes what has expired"
    mailboxes.delete("worker")
    broker.close()


class Later:
    """A clock that is so many seconds ahead."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def wall(self) -> float:
        return time.time() + self._seconds

    def monotonic(self) -> float:
        return time.monotonic() + self._seconds


def test_remote_control_and_events(site):
    test_celery.check_remote_control(site, 3.0)


def test_tasks_with_an_eta_start_at_their_time(site):
    test_celery.check_on_time(site)
