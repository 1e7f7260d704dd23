"""``inspect scheduled`` and ``query_task`` over a broker, also over one that does not answer."""

import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.worker import control
from kombu import Connection, Consumer, Queue
from kombu.serialization import dumps

from aztask import App
from aztask.celery.transport import scheduled
from aztask.celery.transport.connection import Transport
from aztask.errors import BrokerUnavailable

ETA = datetime.now(UTC) + timedelta(hours=1)


class RemoteBroker:
    """A local broker behind a network: each peek first waits for `answers`, then raises `error`."""

    def __init__(self, broker):
        self.broker = broker
        self.capabilities = replace(broker.capabilities, remote=True)
        self.answers = threading.Event()
        self.answers.set()
        self.error = None
        self.peeks = 0

    def peek(self, *args, **kwargs):
        self.peeks += 1
        self.answers.wait(10)
        if self.error is not None:
            raise self.error
        return self.broker.peek(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.broker, name)


def add(left, right):
    return left + right


@pytest.fixture(params=["local", "remote"])
def site(request, monkeypatch):
    """A worker's consumer of the queue ``orders``, and the command that it was given."""
    monkeypatch.setattr(control.Panel, "data", dict(control.Panel.data))
    app = App("shop", broker="local://:memory:")
    broker = app.broker if request.param == "local" else RemoteBroker(app.broker)
    celery = Celery("shop", set_as_current=False)
    celery.task(name="listed.add", shared=False)(add)
    options = {"broker": app.broker, "priorities": {"high": 4, "low": 1}, "order": "redis"}
    connection = Connection(transport=Transport, transport_options=options)
    channel = connection.channel()
    channel.link._broker = broker
    Consumer(channel, [Queue("orders")], callbacks=[print], accept=["json", "pickle"]).consume()
    consumer = SimpleNamespace(
        task_consumer=SimpleNamespace(channel=channel),
        timer=SimpleNamespace(schedule=SimpleNamespace(queue=[])),
    )
    state = SimpleNamespace(app=celery, hostname="one@host", consumer=consumer)
    yield SimpleNamespace(
        broker=broker,
        channel=channel,
        state=state,
        list=lambda: control.Panel.data["scheduled"](state),
    )
    connection.release()
    app.close()


def send(site, number, priority=0, serializer="json", **headers):
    headers = {"id": f"task-{number}", "task": "listed.add", "eta": ETA.isoformat(), **headers}
    kind, encoding, body = dumps(((number, 2), {}, {}), serializer=serializer)
    message = site.channel.prepare_message(
        body, priority, content_type=kind, content_encoding=encoding, headers=headers
    )
    site.channel.basic_publish(message, "", "orders")


def ids(entries):
    return sorted(each["request"]["id"] for each in entries)


def test_what_waits_is_listed_as_celery_lists_it_and_stays_as_it_is(site):
    send(site, 1)
    send(site, 2, priority=9, serializer="pickle")
    send(site, 3, eta=None)
    send(site, 4, task="of.another.app")
    send(site, 5, serializer="yaml")
    (first, second) = sorted(site.list(), key=lambda each: each["request"]["id"])
    assert first == {
        "eta": ETA.isoformat(),
        "priority": 6,
        "request": {
            "id": "task-1",
            "name": "listed.add",
            "args": [1, 2],
            "kwargs": {},
            "type": "listed.add",
            "hostname": "one@host",
            "time_start": None,
            "acknowledged": False,
            "delivery_info": {
                "exchange": "",
                "routing_key": "orders",
                "priority": 0,
                "redelivered": False,
            },
            "worker_pid": None,
        },
    }
    assert second["request"]["id"] == "task-2"
    assert second["request"]["args"] == (2, 2)  # pickle keeps a tuple
    stats = [site.broker.stats(each) for each in site.channel.addresses("orders")]
    assert sum(each.scheduled for each in stats) == 4
    assert sum(each.leased for each in stats) == 0
    assert control.Panel.data["dump_schedule"](site.state) == site.list()


def test_what_celery_itself_lists_comes_first_and_nothing_twice(site):
    send(site, 1)
    own = {"eta": None, "priority": 6, "request": {"id": "task-1"}}
    waiting = scheduled.WaitingTasks(control.Request)
    command = scheduled.ScheduledCommand(lambda _: [own], waiting)
    assert command(site.state) == [own]


def test_a_task_is_asked_for_by_its_id(site):
    send(site, 1)
    send(site, 2)
    query = control.Panel.data["query_task"]
    (found,) = query(site.state, ids=["task-2", "task-3"]).items()
    assert found == ("task-2", ("scheduled", site.list()[1]["request"]))
    assert set(query(site.state, ids="task-1")) == {"task-1"}
    command = scheduled.QueryCommand(lambda _, ids: {ids[0]: ("active", {})}, query.waiting)
    assert command(site.state, ["task-1"]) == {"task-1": ("active", {})}, "the worker knows it"


def test_a_command_that_a_program_puts_in_its_place_is_extended_and_no_other_twice(site):
    send(site, 1)
    query = control.Panel.data["query_task"]
    control.Panel.data["scheduled"] = lambda _: [{"request": {"id": "mine"}}]
    scheduled.extend_inspect()
    scheduled.extend_inspect()
    assert ids(site.list()) == ["mine", "task-1"]
    assert control.Panel.data["query_task"] is query


def test_a_worker_on_another_transport_is_answered_by_celery_alone(site):
    send(site, 1)
    site.state.consumer.task_consumer = SimpleNamespace(channel=object())
    assert site.list() == []
    site.state.consumer.task_consumer = None  # while it connects again
    assert site.list() == []


def test_more_than_a_page_is_read_and_not_more_than_the_most(site, monkeypatch, caplog):
    monkeypatch.setattr(scheduled, "PAGE", 2)
    monkeypatch.setattr(scheduled, "MOST_READ", 5)
    for number in range(7):
        send(site, number)
    with caplog.at_level("INFO"):
        assert ids(site.list()) == [f"task-{number}" for number in range(5)]
    assert "at the first 5 messages of queue orders" in caplog.text


@pytest.mark.parametrize("site", ["remote"], indirect=True)
def test_a_broker_that_does_not_answer_delays_the_loop_for_a_moment(site, monkeypatch, caplog):
    monkeypatch.setattr(scheduled, "ANSWER_SECONDS", 0.2)
    send(site, 1)
    site.broker.answers.clear()
    began = time.monotonic()
    assert site.list() == site.list() == []
    assert time.monotonic() - began < 5
    assert site.broker.peeks == 1, "the second command waits for the same answer"
    assert "did not show all tasks with an eta within 0.2 s" in caplog.text
    site.broker.answers.set()
    command = control.Panel.data["scheduled"]
    command.waiting._reading.join(10)
    assert ids(site.list()) == ["task-1"]


@pytest.mark.parametrize("site", ["remote"], indirect=True)
@pytest.mark.parametrize("error", [BrokerUnavailable("away"), RuntimeError("of the SDK")])
def test_an_error_of_the_broker_is_logged_and_the_command_answers(site, error, caplog):
    send(site, 1)
    site.broker.error = error
    assert site.list() == []
    assert "celery inspect cannot list the tasks with an eta" in caplog.text
    assert str(error) in caplog.text


def test_one_that_shows_no_delayed_messages_is_not_asked(site, monkeypatch):
    send(site, 1)
    hiding = replace(site.broker.capabilities, paged_peek=False)
    broker = RemoteBroker(site.broker)
    broker.capabilities = hiding
    monkeypatch.setattr(site.channel.link, "_broker", broker)
    assert site.list() == []
    assert broker.peeks == 0
