"""The Kombu channel over the local broker: publishing, consuming, settling."""

import time
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from kombu import Connection
from kombu.exceptions import ContentDisallowed

from aztask import App
from aztask.celery.transport.connection import Transport
from aztask.celery.transport.unacked import EarlyMessages
from aztask.errors import QueueNotFound
from aztask.message.envelope import Envelope


@pytest.fixture
def site():
    """An app's broker and a channel over it."""
    app = App("shop", broker="local://:memory:")
    connection = Connection(transport=Transport, transport_options={"broker": app.broker})
    channel = connection.channel()
    channel.queue_declare("orders")
    yield SimpleNamespace(broker=app.broker, channel=channel, connection=connection)
    connection.release()
    app.close()


def publish(site, *bodies, queue="orders"):
    for body in bodies:
        message = site.channel.prepare_message(body, content_type="text/plain")
        site.channel.basic_publish(message, "", queue)


def counts(site):
    stats = site.broker.stats("orders")
    return stats.active, stats.leased, stats.dead


def test_each_way_to_settle(site):
    publish(site, "ack", "reject", "requeue")
    tags = [site.channel.basic_get("orders").delivery_tag for _ in range(3)]
    assert counts(site) == (0, 3, 0)
    assert len(site.channel.unacked) == 3
    site.channel.basic_ack(tags[0])
    site.channel.basic_reject(tags[1])
    site.channel.basic_reject(tags[2], requeue=True)
    assert counts(site) == (1, 0, 1)
    assert site.channel.basic_get("orders").body == b"requeue"


def test_an_acknowledgement_of_several(site):
    publish(site, "a", "b", "c")
    tags = [site.channel.basic_get("orders").delivery_tag for _ in range(3)]
    site.channel.basic_ack(tags[1], multiple=True)
    assert counts(site) == (0, 1, 0)


def test_a_prefetch_count_bounds_what_is_received(site):
    publish(site, *"abcde")
    delivered = []
    site.channel.basic_qos(prefetch_count=2)
    site.channel.basic_consume("orders", False, delivered.append, "tag")
    for source in site.channel.open_sources():
        assert site.channel.fetch(source, 0.0)
    while site.channel.deliver_one():
        pass
    assert [message.body for message in delivered] == [b"a", b"b"]
    assert list(site.channel.open_sources()) == []
    site.channel.basic_ack(delivered[0].delivery_tag)
    assert len(list(site.channel.open_sources())) == 1


def test_a_cancelled_consumer_gives_back_what_it_did_not_see(site):
    publish(site, "a", "b")
    site.channel.basic_consume("orders", False, print, "tag")
    (source,) = site.channel.open_sources()
    site.channel.fetch(source, 0.0)
    site.channel.basic_cancel("tag")
    site.channel.basic_cancel("unknown")
    assert counts(site) == (2, 0, 0)


def to_nowhere(site, **headers):
    site.channel.exchange_declare("shop", type="direct")
    return site.channel.prepare_message("x", content_type="text/plain", headers=headers)


def test_a_task_is_never_dropped_for_want_of_a_queue(site):
    with pytest.raises(QueueNotFound, match="no queue is bound to exchange 'shop'"):
        site.channel.basic_publish(to_nowhere(site, task="shop.pay"), "shop", "nowhere")
    with pytest.raises(QueueNotFound, match="no queue is bound to exchange 'shop'"):
        site.channel.basic_publish(to_nowhere(site), "shop", "nowhere", mandatory=True)


def test_another_message_that_no_queue_is_bound_for_is_dropped_and_logged(site, caplog):
    caplog.set_level("INFO")
    site.channel.basic_publish(to_nowhere(site), "shop", "nowhere")
    assert "no queue is bound to exchange 'shop' with key 'nowhere'" in caplog.text


def test_or_it_goes_to_the_queue_that_is_named_for_such_messages(site):
    site.channel.deadletter_queue = "orders"
    site.channel.basic_publish(to_nowhere(site, task="shop.pay"), "shop", "nowhere")
    assert counts(site) == (1, 0, 0)


def test_an_exchange_that_was_not_declared_is_an_error(site):
    message = site.channel.prepare_message("x")
    with pytest.raises(QueueNotFound, match="'shop' was not declared"):
        site.channel.basic_publish(message, "shop", "orders")


def test_what_cannot_be_decoded_is_dead_lettered_and_not_delivered(site):
    message = site.channel.prepare_message(b"[", content_type="application/json")
    site.channel.basic_publish(message, "", "orders")
    assert site.channel.basic_get("orders") is None
    assert counts(site) == (0, 0, 1)


def test_one_that_is_fetched_by_hand_is_not_decoded_whatever_it_is(site):
    message = site.channel.prepare_message(b"\x80", content_type="application/x-python-serialize")
    site.channel.basic_publish(message, "", "orders")
    fetched = site.channel.basic_get("orders")
    assert fetched.body == b"\x80"
    with pytest.raises(ContentDisallowed):
        fetched.decode()
    fetched.reject()
    assert counts(site) == (0, 0, 1)


def iso(moment):
    return datetime.fromtimestamp(moment, UTC).isoformat()


@pytest.fixture
def early(site, monkeypatch):
    """A consumer on a clock that the test moves, with a function that delivers what is due."""
    clock = SimpleNamespace(now=time.time())
    monkeypatch.setattr("aztask.celery.transport.channel.time", lambda: clock.now)
    delivered = []
    site.channel.basic_qos(prefetch_count=1)
    site.channel.basic_consume("orders", False, delivered.append, "tag")

    def deliver():
        for source in site.channel.open_sources():
            site.channel.fetch(source, 0.0)
        while site.channel.deliver_one():
            pass
        return [message.body for message in delivered]

    return SimpleNamespace(clock=clock, deliver=deliver, delivered=delivered)


def send_early(site, *messages):
    """Store messages that are visible before their eta, as a service may show them."""
    for body, eta in messages:
        headers = {"eta": iso(eta), "task": "shop.pay"}
        site.broker.send("orders", [Envelope(body, headers, content_type="text/plain")])


def test_a_message_is_delivered_at_its_time_and_never_early(site, early):
    due = early.clock.now + 1.0
    send_early(site, (b"task", due))
    assert early.deliver() == []
    assert site.channel.seconds_to_due() == pytest.approx(1.0)
    assert counts(site) == (0, 1, 0), "held under its lease"
    early.clock.now = due - 0.001
    assert early.deliver() == []
    early.clock.now = due + 0.001
    assert early.deliver() == [b"task"]
    assert "eta" not in early.delivered[0].headers, "Celery's timer would start it late"
    assert site.channel.seconds_to_due() is None


def test_a_message_that_waits_for_its_time_delays_no_other(site, early):
    send_early(site, (b"later", early.clock.now + 2.0))
    assert early.deliver() == []
    publish(site, "now")
    assert early.deliver() == [b"now"], "the prefetch count is 1"


def test_a_message_that_is_much_too_early_is_hidden_again(site, early):
    send_early(site, (b"later", early.clock.now + 60.0))
    assert early.deliver() == []
    assert counts(site)[1] == 0
    assert site.broker.stats("orders").scheduled == 1


def test_a_cancelled_consumer_gives_back_what_waits_for_its_time(site, early):
    send_early(site, (b"later", early.clock.now + 2.0))
    assert early.deliver() == []
    site.channel.basic_cancel("tag")
    assert counts(site) == (1, 0, 0)


def test_not_more_than_some_are_held(monkeypatch):
    monkeypatch.setattr("aztask.celery.transport.unacked.MOST_HELD", 2)
    messages = EarlyMessages()
    first, second, third = (SimpleNamespace(consumer_tag=tag) for tag in "aab")
    assert messages.hold(first, 20.0)
    assert messages.hold(second, 10.0)
    assert not messages.hold(third, 5.0)
    assert messages.seconds(4.0) == 6.0
    assert messages.due(9.0) == []
    assert messages.due(30.0) == [second, first]
    messages.hold(third, 5.0)
    messages.hold(first, 4.0)
    assert messages.take("a") == [first]
    assert messages.due(9.0) == [third]
