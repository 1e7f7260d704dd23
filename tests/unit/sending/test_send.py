"""Sending: task ids, batches, hooks and events."""

import re

import kombu
import pytest
from celery import Celery
from celery.worker.request import Request

from aztask import App
from aztask.celery.transport.routing import to_message
from aztask.errors import SendUnconfirmed
from aztask.message.bounds import MessageLimits
from aztask.message.envelope import Envelope
from aztask.queues.base import QueueOptions
from aztask.sending import send as module
from aztask.support.chance import new_id, new_ids


@pytest.fixture
def app():
    app = App("shop", broker="local://:memory:", results="local://:memory:")
    app.task(name="shop.add")(lambda a, b=0: a + b)
    yield app
    app.close()


def messages(app, queue="default"):
    peeked = app.broker.peek(queue, limit=1000)
    return [app.codec.from_envelope(each.envelope, queue) for each in peeked]


def test_ids_are_random_uuids():
    ids = {*(new_id() for _ in range(1000)), *new_ids(1000)}
    assert len(ids) == 2000
    assert all(
        re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", x)
        for x in ids
    )


def test_a_known_task_id_is_sent_once_unless_it_is_forced(app):
    for _ in range(2):
        assert app.send("shop.add", [1], task_id="a").id == "a"
    assert [message.generation for message in messages(app)] == [0]
    app.send("shop.add", [1], task_id="a", force=True)
    assert [message.generation for message in messages(app)] == [0, 1]


def test_a_map_is_sent_in_batches_and_in_order(app, monkeypatch):
    monkeypatch.setattr(module, "BATCH", 3)
    batches = []

    @app.around_send
    def note(sending):
        batches.append(len(sending.ids))
        sending.headers["shop-region"] = "eu"
        yield

    results = app.tasks["shop.add"].map([(number,) for number in range(7)])
    sent = messages(app)
    assert [message.id for message in sent] == [result.id for result in results]
    assert batches == [3, 3, 1]
    assert {message.extra["shop-region"] for message in sent} == {"eu"}


def test_each_send_is_an_event(app):
    heard = []
    app.on_event(heard.append)
    result = app.send("shop.add", [1])
    assert [(event.event, event.task_id) for event in heard] == [("enqueued", result.id)]


@pytest.mark.parametrize("id_key", [None, "i" * 32])
def test_a_stranger_cannot_make_duplicate_detection_swallow_a_send(id_key):
    """Without an id key this attack succeeds: docs/how-to/production/keep-secrets.md says so."""
    options = {"id_key": id_key} if id_key else {}
    app = App("shop", broker="local://:memory:", signing_keys=["k" * 32], **options)
    app.broker.declare("default", QueueOptions(duplicate_window=600.0))
    app.broker.send("default", [Envelope(b"junk", message_id="order-7:0:0")])
    app.send("shop.add", [1], task_id="order-7")
    bodies = [each.envelope.body for each in app.broker.peek("default", limit=10)]
    assert len(bodies) == (2 if id_key else 1)
    app.close()


def test_unconfirmed_messages_are_recognised_by_their_keyed_ids(monkeypatch):
    app = App("shop", broker="local://:memory:", id_key="i" * 32)
    seen = []

    def doubtful(queue, batch):
        raise SendUnconfirmed("no answer", unconfirmed=[batch[1]])

    monkeypatch.setattr(app.broker, "send", doubtful)
    sender = app.sends.sender
    monkeypatch.setattr(sender.events, "emit", lambda kind, each: seen.append((kind, len(each))))
    app.task(name="shop.add")(lambda a: a)
    with pytest.raises(SendUnconfirmed):
        app.tasks["shop.add"].map([(1,), (2,), (3,)])
    assert seen == [("enqueued", 2), ("send_unconfirmed", 1)]
    app.close()


def test_arguments_are_not_repeated_in_headers_unless_asked_for(app):
    app.send("shop.add", ["secret-7"], {"b": 2})
    (message,) = messages(app)
    assert (message.argsrepr, message.kwargsrepr) == (None, None)


def test_celery_s_tools_read_argsrepr_where_it_is_on():
    app = App("shop", broker="local://:memory:", serializer="json", argsrepr=True)
    app.send("shop.add", ["a.png"], {"b": 2})
    (peeked,) = app.broker.peek("default")
    fields = to_message(peeked.envelope, MessageLimits())
    celery = Celery("shop", broker="memory://", set_as_default=False)
    message = kombu.Message(delivery_info={}, **fields)

    def add(path, b):
        return path

    request = Request(message, app=celery, task=celery.task(name="shop.add", shared=False)(add))
    assert (request.argsrepr, request.kwargsrepr) == ("('a.png',)", "{'b': 2}")
    assert request.info()["args"] is not None
    app.close()
