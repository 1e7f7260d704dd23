"""Storage queues behind a network that loses, delays and cuts: outcomes as docs/rules.md says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from azurite import Azurite, running
from proxy import Proxy
from storage import Storage, broker_at

from aztask.errors import AlreadySettled, BrokerUnavailable, ConfigurationError, SendUnconfirmed
from aztask.message.envelope import Envelope
from aztask.queues.delivery import Lost, Renewed, Settled, Unknown
from aztask.settlement import Abandon, Complete, DeadLetter, Resubmit, Settlement, with_envelope
from aztask.support.clock import Clock

CLONE = Envelope(b"clone", message_id="m:0:1")


@pytest.fixture
def storage(azurite: Azurite) -> Iterator[Storage]:
    proxy = Proxy(azurite.port)
    made = Storage(
        azurite,
        proxy,
        broker_at(azurite.connection_string_at(proxy.port)),
        broker_at(azurite.connection_string),
    )
    yield made
    made.close()


def once(method: str, wish: str | float):
    """A hook that disturbs the first request of this method."""
    done: list[bytes] = []

    def hook(line: bytes, number: int) -> str | float | None:
        if done or not line.startswith(method.encode()):
            return None
        done.append(line)
        return wish

    return hook


def renewed(receiver, deliveries) -> None:
    """Renew as the lease keeper does: again where the answer is not there yet."""
    left = list(deliveries)
    while left:
        answers = receiver.renew(left)
        assert all(isinstance(each, Renewed) or each.untouched for each in answers), answers
        left = [
            each
            for each, answer in zip(left, answers, strict=True)
            if not isinstance(answer, Renewed)
        ]


def test_a_lost_reply_to_a_send_is_unconfirmed_and_says_what_to_send_again(storage):
    queue = storage.queue()
    storage.proxy.hook = once("POST", "drop-reply")
    with pytest.raises(SendUnconfirmed) as caught:
        storage.broker.send(queue, [Envelope(b"x", message_id="m")])
    assert [each.message_id for each in caught.value.unconfirmed] == ["m"]
    assert storage.total(queue) == 1  # sent once: nothing repeated it silently
    storage.broker.send(queue, caught.value.unconfirmed)
    receiver = storage.receiver(queue)
    found = receiver.receive(10, 5.0)
    assert {each.envelope.message_id for each in found} == {"m"}


def test_of_a_batch_only_what_is_unconfirmed_is_to_be_sent_again(storage):
    queue = storage.queue()
    storage.proxy.hook = once("POST", "drop-reply")
    batch = [Envelope(b"%d" % n, message_id=f"m{n}") for n in range(20)]
    with pytest.raises(SendUnconfirmed, match="1 of 20") as caught:
        storage.broker.send(queue, batch)
    assert len(caught.value.unconfirmed) == 1
    assert storage.total(queue) == 20


def test_a_send_that_cannot_connect_stores_nothing(storage):
    queue = storage.queue()
    storage.proxy.set("reset")
    with pytest.raises((BrokerUnavailable, SendUnconfirmed)):
        storage.broker.send(queue, [Envelope(b"x")])
    storage.proxy.set("pass")
    assert storage.total(queue) == 0


def test_a_send_to_a_port_where_nobody_listens_is_unavailable(storage):
    queue = storage.queue()
    broker = broker_at(storage.azurite.connection_string_at(1))
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable, match="try again"):
        broker.send(queue, [Envelope(b"x")])
    assert time.monotonic() - began < 10.0
    broker.close()


def test_a_lost_reply_to_a_receive_leaves_the_message_for_later(storage):
    queue = storage.queue()
    storage.direct.send(queue, [Envelope(b"x")])
    receiver = storage.receiver(queue, lease=2.0)
    storage.proxy.hook = once("GET", "drop-reply")
    with pytest.raises(BrokerUnavailable):
        receiver.receive(1, 5.0)
    assert storage.one(receiver).delivery_count == 2


def test_a_lost_reply_to_a_renewal_makes_the_lease_unknown(storage):
    queue, receiver, delivery = storage.held(lease=2.0)
    deadline = delivery.deadline
    storage.proxy.hook = once("PUT", "drop-reply")
    (answer,) = receiver.renew([delivery])
    assert isinstance(answer, Unknown)
    assert not answer.untouched
    assert delivery.deadline == deadline
    settled = receiver.settle([(delivery, Complete())])[0]
    assert isinstance(settled, Unknown), "the token is one that only the lost answer had"
    again = storage.one(storage.receiver(queue, direct=True))
    assert again.delivery_count == 2


def test_a_renewal_that_never_left_may_be_asked_again(storage):
    _, receiver, delivery = storage.held()
    storage.proxy.close()
    (answer,) = receiver.renew([delivery])
    assert isinstance(answer, Unknown)
    assert answer.untouched


def test_a_late_reply_to_a_renewal_loses_nothing(storage):
    """Asked again while the first answer is late: its refusal proves that the first took effect."""
    queue, receiver, delivery = storage.held(lease=6.0)
    deadline = delivery.deadline
    storage.proxy.hook = once("PUT", 4.0)
    renewed(receiver, [delivery])
    assert delivery.deadline > deadline
    assert receiver.settle([(delivery, Complete())]) == [Settled()]  # waits for the token
    assert storage.total(queue) == 0


@pytest.mark.parametrize(
    ("method", "settlement", "left"),
    [
        ("DELETE", Complete(), []),
        ("PUT", Abandon(), [b"x"]),
        ("PUT", with_envelope(Resubmit(), CLONE, 0.0), [b"clone"]),
        ("DELETE", DeadLetter("why"), []),
    ],
    ids=["complete", "abandon", "resubmit", "dead-letter"],
)
def test_a_lost_reply_to_a_settlement_is_found_settled(
    storage, method: str, settlement: Settlement, left: list[bytes]
):
    queue, receiver, delivery = storage.held()
    storage.proxy.hook = once(method, "drop-reply")
    assert receiver.settle([(delivery, settlement)]) == [Settled()]
    assert storage.bodies(queue) == left
    dead = storage.direct.peek(queue, dead_letter=True)
    assert len(dead) == isinstance(settlement, DeadLetter)


@pytest.mark.parametrize("wish", ["drop-reply", "reset", 4.0])
def test_one_disturbed_settlement_of_a_batch_disturbs_no_other(storage, wish):
    queue, receiver, deliveries = storage.held_all(20)
    storage.proxy.hook = once("DELETE", wish)
    answers = receiver.settle([(delivery, Complete()) for delivery in deliveries])
    assert answers == [Settled()] * 20
    assert storage.total(queue) == 0
    assert storage.proxy.counts["DELETE"] <= 21
    with pytest.raises(AlreadySettled):
        receiver.settle([(delivery, Complete()) for delivery in deliveries])


def test_of_a_batch_the_lost_leases_are_told_apart(storage):
    queue, receiver, deliveries = storage.held_all(12)
    other = storage.receiver(queue, direct=True)
    for delivery in deliveries[3:5]:  # somebody else's doing
        other._messages.delete(delivery.position, delivery.token, seconds=5.0)
    answers = receiver.settle([(delivery, Complete()) for delivery in deliveries])
    assert [isinstance(each, Lost) for each in answers] == [n in (3, 4) for n in range(12)]
    assert [isinstance(each, Settled) for each in answers] == [n not in (3, 4) for n in range(12)]


def test_a_batch_into_a_black_hole_neither_hangs_nor_settles(storage):
    queue, receiver, deliveries = storage.held_all(20, lease=4.0)
    storage.proxy.set("blackhole")
    began = time.monotonic()
    answers = receiver.settle([(delivery, Complete()) for delivery in deliveries])
    assert time.monotonic() - began < 6.0
    assert all(isinstance(each, Lost | Unknown) for each in answers)
    storage.proxy.set("reset")
    storage.proxy.set("pass")
    assert storage.total(queue) == 20
    assert len(storage.receiver(queue).receive(32, 5.0)) > 0


def test_a_dead_letter_that_cannot_be_stored_leaves_the_original(storage):
    queue, receiver, delivery = storage.held(lease=3.0)
    storage.direct._client.queue(f"{queue}-poison").delete_queue()
    (answer,) = receiver.settle([(delivery, DeadLetter("why"))])
    assert isinstance(answer, Unknown)
    assert "poison" in answer.reason
    assert storage.total(queue) == 1


def test_a_black_hole_neither_hangs_nor_settles(storage):
    queue, receiver, delivery = storage.held(lease=3.0)
    storage.proxy.set("blackhole")
    began = time.monotonic()
    (renewal,) = receiver.renew([delivery])
    assert isinstance(renewal, Unknown)
    assert time.monotonic() - began < 1.5  # others wait for their renewals
    (answer,) = receiver.settle([(delivery, Complete())])
    assert isinstance(answer, Lost | Unknown)
    assert time.monotonic() - began < 4.0
    storage.proxy.set("reset")
    storage.proxy.set("pass")
    assert storage.one(storage.receiver(queue)).delivery_count == 2


def test_latency_costs_time_and_nothing_else(storage):
    queue = storage.queue()
    storage.proxy.delay = 5.0
    storage.broker.send(queue, [Envelope(b"%d" % n) for n in range(8)])
    receiver = storage.receiver(queue, lease=60.0)
    taken = receiver.receive(8, 20.0)
    renewed(receiver, taken)
    answers = receiver.settle([(each, Complete()) for each in taken])
    assert answers == [Settled()] * 8
    assert storage.total(queue) == 0


def test_half_closed_and_reset_idle_connections_are_not_used_again(storage):
    queue = storage.queue()
    for disturb in (storage.proxy.half_close, storage.proxy.reset_all):
        storage.broker.send(queue, [Envelope(b"x")])
        disturb()
        time.sleep(0.1)
    storage.broker.send(queue, [Envelope(b"x")])
    assert storage.total(queue) == 3


def test_a_settlement_cut_off_by_a_reset_is_tried_again(storage):
    queue, receiver, delivery = storage.held()
    storage.proxy.set("reset")

    def back() -> None:
        time.sleep(1.0)
        storage.proxy.set("pass")

    threading.Thread(target=back).start()
    assert receiver.settle([(delivery, Complete())]) == [Settled()]
    assert storage.total(queue) == 0


def test_a_wrong_key_is_refused_without_showing_it(storage):
    key = "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3JldA=="
    text = storage.azurite.connection_string.replace(
        storage.azurite.connection_string.partition("AccountKey=")[2].partition(";")[0], key
    )
    broker = broker_at(text)
    with pytest.raises(ConfigurationError, match="refused the credential") as caught:
        broker.send("any-queue", [Envelope(b"x")])
    assert key not in str(caught.value)
    broker.close()


class Days:
    """A clock that is moved together with Azurite's."""

    def __init__(self, azurite: Azurite) -> None:
        self._azurite = azurite
        self.ahead = 0.0
        self.clock = Clock(
            monotonic=lambda: time.monotonic() + self.ahead,
            wall=lambda: time.time() + self.ahead,
        )

    def pass_days(self, days: float) -> None:
        self._azurite.advance(days * 86400)
        self.ahead += days * 86400


@pytest.mark.parametrize("resubmitted", [False, True], ids=["sent", "resubmitted"])
def test_delayed_for_eight_days(tmp_path: Path, resubmitted: bool):
    """Longer than the service hides a message: the delay is chained, and nobody sees the links."""
    delay = 8 * 86400.0
    with running(tmp_path) as server:
        days = Days(server)
        broker = broker_at(server.connection_string, clock=days.clock)
        broker.declare("late")
        receiver = broker.receiver("late", lease=30.0)
        if resubmitted:
            broker.send("late", [Envelope(b"x")])
            (first,) = receiver.receive(1, 5.0)
            receiver.settle([(first, with_envelope(Resubmit(delay), Envelope(b"x"), delay))])
        else:
            broker.send("late", [Envelope(b"x", delay=delay)])
        days.pass_days(7.01)
        assert receiver.receive(1, 0.3) == []
        assert broker.stats("late").total == 1
        days.pass_days(0.98)
        assert receiver.receive(1, 0.3) == []
        days.pass_days(0.02)
        (delivery,) = receiver.receive(1, 5.0)
        assert delivery.envelope == Envelope(b"x")
        assert delivery.delivery_count == (2 if resubmitted else 1)
        assert receiver.settle([(delivery, Complete())]) == [Settled()]
        broker.close()


def test_a_backlog_older_than_seven_days_is_all_there(tmp_path: Path):
    with running(tmp_path) as server:
        days = Days(server)
        broker = broker_at(server.connection_string, clock=days.clock)
        broker.declare("old")
        broker.send("old", [Envelope(b"%d" % n) for n in range(40)])
        receiver = broker.receiver("old", lease=30.0)
        (dead,) = receiver.receive(1, 5.0)
        receiver.settle([(dead, DeadLetter("why"))])
        days.pass_days(20)
        taken = receiver.receive(32, 5.0) + receiver.receive(32, 5.0)
        assert len(taken) == 39
        assert len(broker.peek("old", dead_letter=True)) == 1
        broker.close()
