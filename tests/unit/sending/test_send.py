"""Sending: task ids, batches, hooks and events."""

import re

import pytest

from aztask import App
from aztask.sending import send as module
from aztask.sending.send import new_id


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
    ids = {new_id() for _ in range(1000)}
    assert len(ids) == 1000
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
