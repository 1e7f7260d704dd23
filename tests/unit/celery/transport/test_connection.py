"""One Kombu connection: its broker, its keeper, and the bodies that it lets through."""

import pytest
from kombu import Connection

from aztask import App
from aztask.celery.transport.connection import Transport
from aztask.errors import CodecError, ContentRefused
from aztask.message.envelope import Envelope
from aztask.queues.base import QueueOptions


def connected(broker="local://:memory:", **options):
    connection = Connection(transport=Transport, transport_options={"broker": broker, **options})
    return connection, connection.transport


def test_broker_and_keeper_are_opened_at_the_first_use_and_closed():
    connection, transport = connected()
    assert transport._broker is None
    assert transport.keeper is transport.keeper
    assert transport.broker is transport.broker
    connection.connect()
    connection.release()
    assert transport._broker is None


def test_a_broker_that_was_given_stays_open():
    app = App("shop", broker="local://:memory:")
    connection, transport = connected(app.broker)
    assert transport.broker is app.broker
    connection.connect()
    connection.release()
    app.broker.declare("orders")
    assert app.broker.stats("orders").active == 0
    app.close()


def test_only_bodies_that_can_be_decoded_pass():
    _, transport = connected()
    assert transport.decoded(b"[1]", "application/json") == [1]
    assert transport.decoded(b"\xff", "application/x-own") is None
    with pytest.raises(CodecError):
        transport.decoded(b"[1", "application/json")
    with pytest.raises(ContentRefused, match="only aztask's workers"):
        transport.decoded(b"", "application/x-aztask-payload+json")


def test_waiting_for_messages_is_bounded():
    connection, _ = connected()
    channel = connection.channel()
    channel.queue_declare("orders")
    channel.basic_consume("orders", False, print, "tag")
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.01)
    connection.release()


def test_a_connection_rests_while_a_message_of_a_session_is_worked_on(monkeypatch):
    connection, transport = connected()
    transport.broker.declare("orders", QueueOptions(sessions=True))
    body = {"content_type": "application/json", "session": "a"}
    transport.broker.send("orders", [Envelope(b"1", **body), Envelope(b"2", **body)])
    channel, got, waits = connection.channel(), [], []
    channel.basic_consume("orders", False, got.append, "tag")
    connection.drain_events(timeout=5)
    rest = transport._wait
    monkeypatch.setattr(transport, "_wait", lambda wait: waits.append(wait) or rest(wait))
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.3)
    assert len(waits) < 30, "it asks again and again"
    got[0].ack()
    connection.drain_events(timeout=5)
    assert [message.payload for message in got] == [1, 2]
    connection.release()


@pytest.mark.parametrize(
    ("first", "in_a_pause", "pauses", "received"),
    [
        (1, 0, 1, 1),  # no task ends: nothing more is waited for
        (1, 2, 3, 7),  # until three quarters are free
        (1, 1, 4, 5),  # so often at most
        (6, 1, 0, 6),  # room enough
    ],
)
def test_room_gathers_before_a_receive_as_long_as_tasks_end(
    monkeypatch, first, in_a_pause, pauses, received
):
    """Each receive of a Storage queue costs the service as much as twenty messages."""
    connection, transport = connected()
    transport.broker.declare("orders")
    channel, got, slept = connection.channel(), [], []
    channel.basic_qos(0, 8, False)
    channel.basic_consume("orders", False, got.append, "tag")
    transport.broker.send("orders", [Envelope(b"1", content_type="application/json")] * 20)
    while len(got) < 8:
        connection.drain_events(timeout=5)

    def end(count):
        for message in [each for each in got if not each.acknowledged][:count]:
            message.ack()

    def pause(seconds):
        slept.append(seconds)
        end(in_a_pause)

    monkeypatch.setattr("aztask.celery.transport.connection.sleep", pause)
    end(first)
    assert transport.receive_once()
    while channel.deliver_one():
        pass
    assert (len(slept), len(got)) == (pauses, 8 + received)
    connection.release()
