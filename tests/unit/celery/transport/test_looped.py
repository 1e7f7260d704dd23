"""A connection in a real event loop of Kombu: who receives, who delivers, and when it wakes."""

import logging
import os
import threading
import time
from dataclasses import replace

import pytest
from kombu import Connection, Consumer, Exchange, Producer, Queue
from kombu.asynchronous import Hub

from aztask import App
from aztask.celery.transport.connection import Transport
from aztask.celery.transport.consumers import MailboxConsumer, QueueConsumer
from aztask.celery.transport.unacked import Changes
from aztask.errors import BrokerUnavailable
from aztask.message.envelope import Envelope
from aztask.message.headers import to_iso


class Site:
    """A broker, a connection in a loop, and what its consumer got."""

    def __init__(self) -> None:
        self.app = App("shop", broker="local://:memory:")
        self.broker = self.app.broker
        self.broker.declare("orders")
        self.hub = Hub()
        self.connection = Connection(transport=Transport, transport_options={"broker": self.broker})
        self.connection.register_with_event_loop(self.hub)
        self.transport = self.connection.transport
        self.got = []
        self.threads = []

    def consume(self, **options):
        consumer = Consumer(
            self.connection.channel(), [Queue("orders")], on_message=self.receive, **options
        )
        consumer.consume()
        return consumer

    def receive(self, message):
        self.threads.append(threading.current_thread())
        self.got.append(message)

    def send(self, *bodies, **fields):
        json = {"content_type": "application/json", **fields}
        self.broker.send("orders", [Envelope(body, **json) for body in bodies])

    def run(self, check, seconds=10.0):
        ends_at = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < ends_at, "not in time"
            self.hub.run_once()

    def close(self):
        self.connection.release()
        self.hub.close()
        self.app.close()


@pytest.fixture
def site():
    site = Site()
    yield site
    site.close()


def eventually(check, seconds=10.0):
    ends_at = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < ends_at, "not in time"
        time.sleep(0.01)


def counts(site):
    stats = site.broker.stats("orders")
    return (stats.active, stats.leased, stats.dead)


def test_celery_takes_the_loop():
    assert Transport.implements.asynchronous


def test_a_thread_receives_and_the_loop_delivers(site):
    site.consume()
    site.send(b"1", b"2", b"3")
    site.run(lambda: len(site.got) == 3)
    assert [message.payload for message in site.got] == [1, 2, 3]
    assert {*site.threads} == {threading.current_thread()}
    for message in site.got:
        message.ack()
    assert counts(site) == (0, 0, 0)


def test_one_turn_of_the_loop_delivers_all_that_was_received(site):
    """Celery's pool of processes looks at every pipe in each turn."""
    site.send(b"1", b"2", b"3")
    site.consume()
    eventually(lambda: counts(site)[1] == 3)
    while not site.got:
        site.hub.run_once()
    assert len(site.got) == 3


def acknowledge_in_the_loop(site, messages, monkeypatch):
    """Consume as Celery's ``solo`` does; returns how many were acknowledged at each delivery, and
    the numbers of messages that the receives brought.
    """
    acknowledged, seen, found = [], [], []

    def acknowledge(message):
        message.ack()
        acknowledged.append(message)

    def run(message):
        seen.append(len(acknowledged))
        site.hub.call_soon(acknowledge, message)

    site.send(*[b"1"] * messages)
    site.receive = run
    channel = site.connection.channel()
    channel.basic_qos(0, 4, False)
    fetch = channel._receive

    def counted(*arguments):
        holdings = fetch(*arguments)
        found.extend([len(holdings)] if holdings else [])
        return holdings

    monkeypatch.setattr(channel, "_receive", counted)
    Consumer(channel, [Queue("orders")], on_message=run).consume()
    site.run(lambda: len(acknowledged) == messages)
    return seen, found


def test_a_loop_that_runs_tasks_acknowledges_between_two_of_them(site, monkeypatch):
    seen, _ = acknowledge_in_the_loop(site, 12, monkeypatch)
    assert seen == list(range(12))


def test_one_receive_brings_what_several_acknowledgements_made_room_for(site, monkeypatch):
    """Not one message each: a receive costs more than a message."""
    _, found = acknowledge_in_the_loop(site, 40, monkeypatch)
    assert min(found[:-1]) >= 3


def receiving(site, monkeypatch):
    """The threads that receive from now on, one entry for each receive that brought something."""
    threads = []
    (channel,) = site.transport.channels
    fetch = channel._receive

    def noted(*arguments):
        holdings = fetch(*arguments)
        if holdings:
            threads.append(threading.current_thread())
        return holdings

    monkeypatch.setattr(channel, "_receive", noted)
    return threads


def settle_each(site):
    """Acknowledge as Celery's ``solo`` does, in the next turn of the loop."""
    receive = site.receive

    def run(message):
        receive(message)
        site.hub.call_soon(message.ack)

    site.receive = run


def test_while_messages_come_the_loop_receives_from_a_local_broker_itself(site, monkeypatch):
    """To hand over to the waiting thread and back would cost more than the receive."""
    settle_each(site)
    site.consume(prefetch_count=4)
    threads = receiving(site, monkeypatch)
    for count in (40, 80):
        site.send(*[b"1"] * 40)
        site.run(lambda count=count: len(site.got) == count)
    site.run(lambda: counts(site)[1] == 0)
    others = [each for each in threads if each is not threading.current_thread()]
    # It waits for the first ones, and may bring a second load before the loop has begun.
    assert len(others) < len(threads) / 2


def remotely(site, monkeypatch):
    """Have the transport take the broker for a remote one."""
    remote = replace(site.broker.capabilities, remote=True)
    monkeypatch.setattr(type(site.broker), "capabilities", remote)


def test_the_loop_receives_from_a_remote_broker_while_each_receive_brings_all(site, monkeypatch):
    """A queue that gave all that it was asked for has more: that is one round trip, not a wait."""
    remotely(site, monkeypatch)
    settle_each(site)
    site.consume(prefetch_count=4)
    threads = receiving(site, monkeypatch)
    site.send(*[b"1"] * 42)
    site.run(lambda: len(site.got) == 42)
    loops = [each for each in threads if each is threading.current_thread()]
    # The waiting thread may bring a second load before the loop has begun.
    assert len(loops) > len(threads) - len(loops)
    assert not site.transport._loop_receives, "the last receive brought less than it asked for"
    site.send(b"1")
    site.run(lambda: len(site.got) == 43)
    site.run(lambda: counts(site)[1] == 0)
    assert threads[-1] is not threading.current_thread()


def test_the_loop_does_not_wait_for_a_slow_network(site, monkeypatch):
    """No process of a prefork pool would get a task then, and no result be read."""
    remotely(site, monkeypatch)
    settle_each(site)
    receive = QueueConsumer.receive

    def slowly(source, limit, wait):
        deliveries = receive(source, limit, wait)
        source.waited = 0.005
        return deliveries

    monkeypatch.setattr(QueueConsumer, "receive", slowly)
    site.consume(prefetch_count=4)
    threads = receiving(site, monkeypatch)
    site.send(*[b"1"] * 42)
    site.run(lambda: len(site.got) == 42)
    assert threading.current_thread() not in threads


def test_the_loop_does_not_wait_for_one_of_several_remote_queues(site, monkeypatch):
    remotely(site, monkeypatch)
    settle_each(site)
    site.broker.declare("others")
    site.consume(prefetch_count=4)
    (channel,) = site.transport.channels
    channel.basic_consume("others", False, site.receive, "others")
    threads = receiving(site, monkeypatch)
    site.send(*[b"1"] * 42)
    site.run(lambda: len(site.got) == 42)
    assert threading.current_thread() not in threads


def test_a_blocking_drain_takes_over_what_the_loop_received(site, monkeypatch):
    """A loop that no longer turns leaves no turn to receive behind."""
    site.consume(prefetch_count=4)
    site.send(*[b"1"] * 3)
    site.run(lambda: site.got)
    site.transport._loop_receives = True
    site.send(*[b"1"] * 5)
    while len(site.got) < 8:
        for message in site.got:
            message.acknowledged or message.ack()
        site.connection.drain_events(timeout=5.0)


def test_an_error_of_a_receive_on_the_loop_gives_the_turn_back(site, monkeypatch):
    settle_each(site)
    site.consume(prefetch_count=4)
    site.send(*[b"1"] * 8)
    (channel,) = site.transport.channels
    monkeypatch.setattr(channel, "fetch", failing_once(channel.fetch))
    with pytest.raises(site.connection.connection_errors, match="unreachable"):
        site.run(lambda: False)
    assert not site.transport._loop_receives
    site.run(lambda: len(site.got) == 8)


def failing_once(fetch):
    """`fetch`, which fails once, on the main thread."""
    failed = []

    def first_fails(*arguments):
        if threading.current_thread() is threading.main_thread() and not failed:
            failed.append(1)
            raise BrokerUnavailable("the file is unreachable")
        return fetch(*arguments)

    return first_fails


def test_a_thread_that_waits_for_room_is_not_woken_by_each_change():
    changes = Changes()
    asked, room = [], threading.Event()

    def wanted():
        asked.append(threading.current_thread())
        return room.is_set()

    thread = threading.Thread(target=changes.wait_until, args=(wanted, 10.0))
    thread.start()
    eventually(lambda: asked)
    for _ in range(5):
        changes.note()
    assert asked.count(thread) == 1
    room.set()
    changes.note()
    thread.join(5.0)
    assert not thread.is_alive()
    changes.end()
    room.clear()
    changes.wait_until(wanted, 10.0)  # at once


def test_the_prefetch_count_is_kept_and_an_acknowledgement_makes_room(site):
    site.send(b"1", b"2", b"3")
    consumer = site.consume(prefetch_count=1)
    for number in (1, 2, 3):
        site.run(lambda number=number: len(site.got) == number)
        time.sleep(0.05)
        assert counts(site)[1] == 1
        site.got[-1].ack()
    consumer.cancel()


def test_nothing_turns_while_nothing_comes(site):
    site.consume()
    site.hub.run_once()
    turns, ends_at = 0, time.monotonic() + 1.0
    while time.monotonic() < ends_at:
        site.hub.run_once()
        turns += 1
    assert turns <= 5


def test_an_early_message_wakes_the_loop_at_its_time(site):
    due = time.time() + 0.5
    site.consume()
    site.send(b"1", headers={"eta": to_iso(due), "task": "shop.pay"})
    site.run(lambda: site.got)
    assert due <= time.time()
    assert site.got[0].headers["eta"] == to_iso(due), "the loop's timer is not late"


def test_an_error_of_a_receive_reaches_the_loop_once(site, monkeypatch):
    """As a connection error, on which Celery connects again."""
    site.consume()

    def fail(*_):
        raise BrokerUnavailable("the service is unreachable")

    receiver = site.transport.channels[0]._sources
    (source,) = receiver.values()
    monkeypatch.setattr(source, "receive", fail)
    site.transport.changes.note()
    with pytest.raises(site.connection.connection_errors, match="unreachable"):
        site.run(lambda: False)
    for _ in range(3):
        site.hub.run_once()


def test_a_consumer_that_is_cancelled_gets_nothing_more(site):
    consumer = site.consume()
    site.hub.run_once()
    consumer.cancel()
    site.send(b"1")
    time.sleep(0.2)
    for _ in range(3):
        site.hub.timer.call_after(0.01, lambda: None)
        site.hub.run_once()
    assert site.got == []
    eventually(lambda: counts(site) == (1, 0, 0))


def test_what_was_deleted_at_receipt_and_not_delivered_is_sent_again(site):
    channel = site.connection.channel()
    channel.basic_consume("orders", True, site.receive, "tag")
    site.send(b"1")
    eventually(lambda: counts(site) == (0, 0, 0))
    eventually(lambda: channel._ready)
    channel.basic_cancel("tag")
    assert site.got == []
    assert counts(site) == (1, 0, 0)


def test_closing_ends_the_thread_and_leaves_the_loop(site):
    site.consume()
    site.send(b"1")
    site.run(lambda: site.got)
    thread = site.transport._looped._thread
    assert thread.is_alive()
    before = set(site.hub.readers)
    site.connection.release()
    assert not thread.is_alive()
    assert len(before - set(site.hub.readers)) == 1
    assert counts(site) == (1, 0, 0), "what was not acknowledged is given back"


def test_a_loop_that_was_reset_keeps_the_descriptor_of_the_next_connection(site):
    site.hub.run_once()
    site.hub.reset()
    descriptor = site.transport._looped._bell.fileno()
    site.hub.add_reader(descriptor, print)
    site.connection.release()
    assert site.hub.readers[descriptor][0] is print


def test_a_blocking_drain_waits_for_the_same_thread(site):
    site.consume()
    site.send(b"1", b"2")
    site.connection.drain_events(timeout=5)
    site.connection.drain_events(timeout=5)
    assert [message.payload for message in site.got] == [1, 2]
    with pytest.raises(TimeoutError):
        site.connection.drain_events(timeout=0.05)


def test_what_was_received_before_the_loop_began_is_delivered_by_it(site):
    """Also if nothing further comes; and nothing further is received before that."""
    site.transport.unregister_from_event_loop(None, site.hub)
    site.send(b"1", b"2", b"3")
    site.consume()
    site.connection.drain_events(timeout=5)
    assert len(site.got) == 1
    site.connection.register_with_event_loop(site.hub)
    site.run(lambda: len(site.got) == 3)


def test_a_ring_just_after_a_wait_is_not_lost(site, monkeypatch):
    bell = site.transport._looped._bell
    monkeypatch.setattr(bell, "wait", lambda _: bell.ring())
    assert not site.transport._looped.wait(0.0)
    monkeypatch.undo()
    assert bell.wait(0.0)


@pytest.mark.parametrize("how", ["drain", "loop"])
def test_what_is_left_behind_a_consumer_that_raises_is_delivered(site, how):
    site.send(b"1", b"2", b"3")
    receive, site.receive = site.receive, lambda _: 1 / 0
    consumer = site.consume()
    eventually(lambda: counts(site)[1] == 3)
    with pytest.raises(ZeroDivisionError):
        if how == "drain":
            site.connection.drain_events(timeout=5)
        else:
            site.run(lambda: False)
    consumer.on_message = receive
    for tag in site.transport.channels[0]._sources:
        site.transport.channels[0]._sources[tag].callback = consumer._receive_callback
    site.run(lambda: len(site.got) == 2)


def test_a_thread_whose_messages_wait_rings_again(site):
    site.send(b"1")
    site.consume()
    eventually(lambda: site.transport.channels[0]._ready)
    site.transport._looped._bell.silence()
    site.run(lambda: site.got)


def test_a_drain_leaves_the_rest_to_the_loop(site):
    site.send(b"1", b"2")
    site.consume()
    eventually(lambda: counts(site)[1] == 2)
    site.connection.drain_events(timeout=5)
    site.run(lambda: len(site.got) == 2)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_touches_neither_the_loop_nor_its_threads(site):
    site.consume()
    site.hub.run_once()
    looped = site.transport._looped
    child = os.fork()
    if child == 0:
        looped.ring()
        left = site.transport.looped
        site.transport.close_connection(site.transport)
        os._exit(1 if left else 0)
    assert os.waitpid(child, 0)[1] == 0
    assert not looped._bell.wait(0.1), "the child has woken its parent"
    site.send(b"1")
    site.run(lambda: site.got)


def test_a_command_comes_before_a_task_that_was_sent_after_it(site):
    """Celery's `revoke_by_stamped_headers` must be known when the stamped task comes."""
    events = Exchange("commands", type="fanout")
    box = Queue("w@host.celery.pidbox", events, auto_delete=True, durable=False)
    came = []
    commands = Consumer(
        site.connection.channel(), [box], no_ack=True,
        on_message=lambda message: came.append(message.payload),
    )  # fmt: skip
    site.receive = lambda message: came.append(message.payload)
    with Connection(transport=Transport, transport_options={"broker": site.broker}) as sender:
        producer = Producer(sender.channel(), events)
        site.consume(no_ack=True)
        commands.consume()
        for number in range(0, 200, 2):
            producer.publish(number)
            site.send(b"%d" % (number + 1))
            if number % 20 == 0:
                site.run(lambda sent=number + 2: len(came) == sent)
        site.run(lambda: len(came) == 200)
    assert [each for each in came if each % 2] == list(range(1, 200, 2))
    places = {each: place for place, each in enumerate(came)}
    assert [n for n in range(0, 200, 2) if places[n] > places[n + 1]] == []


@pytest.mark.parametrize("error", [BrokerUnavailable("the file is away"), ValueError("a bug")])
def test_an_error_of_a_command_mailbox_loses_no_task(site, monkeypatch, caplog, error):
    """Not even one that was deleted at receipt, and is only in memory. The pump logs the error."""
    caplog.set_level(logging.INFO)
    exchange = Exchange("commands", type="fanout")
    box = Queue("w@host.celery.pidbox", exchange, auto_delete=True, durable=False)
    commands = Consumer(site.connection.channel(), [box], no_ack=True, on_message=print)
    site.consume(no_ack=True)
    commands.consume()
    monkeypatch.setattr(MailboxConsumer, "receive", raising(error))
    with Connection(transport=Transport, transport_options={"broker": site.broker}) as sender:
        Producer(sender.channel(), exchange).publish("command")
    site.send(b"1", b"2")
    site.run(lambda: len(site.got) == 2)
    assert sorted(message.payload for message in site.got) == [1, 2]
    eventually(lambda: str(error) in caplog.text)


def test_where_nothing_was_written_a_receive_of_tasks_asks_no_mailbox(site, monkeypatch):
    """Each of them would cost as much as the receive itself."""
    exchange = Exchange("commands", type="fanout")
    box = Queue("w@host.celery.pidbox", exchange, auto_delete=True, durable=False)
    commands = Consumer(site.connection.channel(), [box], no_ack=True, on_message=site.got.append)
    site.consume(no_ack=True)
    commands.consume()
    asked, receive = [], MailboxConsumer.receive
    monkeypatch.setattr(MailboxConsumer, "receive", lambda *each: asked.append(1) or receive(*each))
    site.send(*(b"%d" % number for number in range(50)))
    site.run(lambda: len(site.got) == 50)
    assert len(asked) < 10
    with Connection(transport=Transport, transport_options={"broker": site.broker}) as sender:
        Producer(sender.channel(), exchange).publish("command")
    site.run(lambda: len(site.got) == 51)


def raising(error):
    def receive(*_):
        raise error

    return receive
