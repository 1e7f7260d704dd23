"""What is the local broker's own: waiting, transactions, names, and its payload."""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from aztask.errors import (
    AlreadySettled,
    BrokerError,
    ConfigurationError,
    EncodeError,
    InvalidQueueName,
    MessageTooLarge,
)
from aztask.message.envelope import Envelope
from aztask.queues.base import ANY_SESSION, Broker, QueueOptions, Settled, Transactional
from aztask.queues.engine import Database, NewMessage
from aztask.queues.local.broker import LocalBroker
from aztask.queues.local.kind import KIND
from aztask.queues.local.payload import MESSAGE_LIMIT, envelope_of, payload_of
from aztask.settlement import Abandon, Complete, Resubmit, with_envelope
from aztask.support.clock import Clock

LONG = 30.0


@pytest.fixture
def database(tmp_path):
    database = Database(str(tmp_path / "queues.db"))
    yield database
    database.close()


@pytest.fixture
def broker(database):
    return LocalBroker(database)


@pytest.fixture
def other(database):
    """As another process would have it: the same file through another connection."""
    elsewhere = Database(database.path)
    yield LocalBroker(elsewhere)
    elsewhere.close()


def test_it_is_a_broker_that_can_join_transactions(broker, database):
    assert isinstance(broker, Broker)
    assert isinstance(broker, Transactional)
    assert broker.transaction_key == database.key


# -- waiting -----------------------------------------------------------------------------------


def received_while_waiting(receiver, act):
    """What a waiting receive returns after `act`, which happens while it waits."""
    got = []
    thread = threading.Thread(target=lambda: got.extend(receiver.receive(1, LONG)))
    thread.start()
    time.sleep(0.05)
    started = time.monotonic()
    act()
    thread.join(LONG)
    assert time.monotonic() - started < LONG / 2
    return [delivery.envelope.body for delivery in got]


def test_a_send_wakes_a_waiting_receiver(broker):
    receiver = broker.receiver("q", lease=60.0)
    assert received_while_waiting(receiver, lambda: broker.send("q", [Envelope(b"x")])) == [b"x"]


def test_a_send_from_elsewhere_is_found(broker, other):
    receiver = broker.receiver("q", lease=60.0)
    assert received_while_waiting(receiver, lambda: other.send("q", [Envelope(b"x")])) == [b"x"]


def test_a_message_that_falls_due_is_found(broker):
    receiver = broker.receiver("q", lease=60.0)
    act = lambda: broker.send("q", [Envelope(b"x", delay=0.05)])  # noqa: E731
    assert received_while_waiting(receiver, act) == [b"x"]


def test_a_lease_that_lapses_is_found(broker, other):
    broker.send("q", [Envelope(b"x")])
    other.receiver("q", lease=0.15).receive(1, 0.0)
    receiver = broker.receiver("q", lease=60.0)
    assert received_while_waiting(receiver, lambda: None) == [b"x"]


def test_a_session_given_back_is_found(broker, other):
    held = other.receiver("q", lease=60.0, session="a")
    other.send("q", [Envelope(b"x", session="a")])
    assert held.receive(1, 0.0)
    receiver = broker.receiver("q", lease=60.0, session=ANY_SESSION)
    assert received_while_waiting(receiver, held.close) == [b"x"]


@pytest.mark.parametrize("closing", ["receiver", "broker"])
def test_closing_ends_the_waiting(broker, closing):
    receiver = broker.receiver("q", lease=60.0)
    assert (
        received_while_waiting(receiver, {"receiver": receiver, "broker": broker}[closing].close)
        == []
    )
    assert receiver.receive(1, LONG) == []


def test_a_sent_message_is_not_seen_before_its_transaction_ends(broker, other):
    receiver = other.receiver("q", lease=60.0)
    with broker.transaction():
        broker.send("q", [Envelope(b"x")])
        assert other.engine.pending("q") == math.inf
    assert receiver.receive(1, LONG)[0].envelope.body == b"x"


# -- transactions --------------------------------------------------------------------------------


def test_a_settlement_taken_back_can_be_done_again(broker):
    broker.send("q", [Envelope(b"x")])
    receiver = broker.receiver("q", lease=60.0)
    (delivery,) = receiver.receive(1, 0.0)
    for settlement in (Complete(), Abandon()):
        with pytest.raises(ZeroDivisionError), broker.transaction():
            assert receiver.settle([(delivery, settlement)]) == [Settled()]
            with pytest.raises(AlreadySettled):
                receiver.settle([(delivery, Complete())])
            1 / 0  # noqa: B018
    assert receiver.settle([(delivery, Complete())]) == [Settled()]
    with pytest.raises(AlreadySettled):
        receiver.settle([(delivery, Complete())])


def test_a_send_taken_back_leaves_no_queue_behind_and_can_be_repeated(broker):
    with pytest.raises(ZeroDivisionError), broker.transaction():
        broker.send("new", [Envelope(b"x")])
        1 / 0  # noqa: B018
    assert broker.queues() == []
    broker.send("new", [Envelope(b"x")])
    assert broker.stats("new").active == 1


def test_a_queue_deleted_elsewhere_is_made_again_by_a_send(broker, other):
    broker.send("q", [Envelope(b"x")])
    other.delete("q")
    broker.send("q", [Envelope(b"y")])
    assert [peeked.envelope.body for peeked in other.peek("q")] == [b"y"]


def test_a_resubmission_is_atomic(broker):
    broker.send("q", [Envelope(b"x")])
    receiver = broker.receiver("q", lease=60.0)
    (delivery,) = receiver.receive(1, 0.0)
    with pytest.raises(EncodeError):
        receiver.settle([(delivery, with_envelope(Resubmit(), Envelope(b"c", {"a": {1}}), 0.0))])
    with pytest.raises(ConfigurationError, match="clone"):
        receiver.settle([(delivery, Resubmit())])
    assert broker.stats("q").leased == 1
    clone = with_envelope(Resubmit(), Envelope(b"c"), 5.0)
    assert receiver.settle([(delivery, clone)]) == [Settled()]
    assert broker.stats("q").scheduled == 1


# -- deadlines and settings ------------------------------------------------------------------------


def test_deadlines_count_from_before_the_request(database):
    ticks = iter(range(1000, 2000))
    clock = Clock(monotonic=lambda: float(next(ticks)), wall=lambda: 0.0)
    broker = LocalBroker(database, clock=clock)
    broker.send("q", [Envelope(b"x")])
    receiver = broker.receiver("q", lease=500.0)
    before = clock.monotonic()
    (delivery,) = receiver.receive(1, 0.0)
    assert before < delivery.deadline - 500.0 <= before + 1
    (looked,) = broker.engine.peek("q")
    assert delivery.deadline < looked.lease_until
    before = clock.monotonic()
    (renewed,) = receiver.renew([delivery], 600.0)
    assert renewed.deadline == delivery.deadline == before + 1 + 600.0
    assert delivery.lease_seconds == 600.0


def test_declaring_again_applies_what_is_given(broker):
    broker.send("q", [Envelope(b"x")])
    broker.declare("q", QueueOptions(duplicate_window=60.0))
    broker.declare("q", QueueOptions(lease=5.0))
    settings = broker.engine.queue("q")
    assert (settings.duplicate_window, settings.lease_seconds) == (60.0, 5.0)


def test_any_session_goes_on_to_the_next_one(broker):
    broker.declare("q", QueueOptions(sessions=True))
    broker.send("q", [Envelope(b"1", session="a"), Envelope(b"2", session="b")])
    receiver = broker.receiver("q", lease=60.0, session=ANY_SESSION)
    (first,) = receiver.receive(5, 0.0)
    assert receiver.receive(5, 0.0) == []
    receiver.settle([(first, Complete())])
    (second,) = receiver.receive(5, 0.0)
    assert {first.session, second.session} == {"a", "b"}


def test_a_receiver_is_closed_in_peace_after_its_database(broker, database):
    receiver = broker.receiver("q", lease=60.0, session=ANY_SESSION)
    broker.send("q", [Envelope(b"x", session="a")])
    assert receiver.receive(1, 0.0)
    database.close()
    receiver.close()


def test_a_forked_child_closes_without_touching_its_parents_session(broker):
    receiver = broker.receiver("q", lease=60.0, session=ANY_SESSION)
    broker.send("q", [Envelope(b"x", session="a")])
    (delivery,) = receiver.receive(1, 0.0)
    child = os.fork()
    if child == 0:
        receiver.close()
        broker.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert receiver.settle([(delivery, Complete())]) == [Settled()]


def test_positions_from_anywhere_do_no_harm(broker):
    broker.send("q", [Envelope(b"x")])
    receiver = broker.receiver("q", lease=60.0)
    assert receiver.receive_deferred([0, -5, 2**80, "12"]) == []
    assert broker.peek("q", after=2**80) == []
    assert len(broker.peek("q", after=-(2**80))) == 1
    for position in ("x", "9" * 5000):
        with pytest.raises(ConfigurationError, match="position"):
            broker.peek("q", after=position)


def test_a_closed_broker_says_so(broker):
    broker.close()
    for use in (lambda: broker.send("q", []), broker.queues, lambda: broker.stats("q")):
        with pytest.raises(BrokerError, match="closed"):
            use()


def test_a_delivery_of_another_kind_is_refused(broker):
    broker.send("q", [Envelope(b"x")])
    receiver = broker.receiver("q", lease=60.0)
    (delivery,) = receiver.receive(1, 0.0)
    foreign = object.__new__(type(delivery).__mro__[1])
    with pytest.raises(ConfigurationError, match="another broker"):
        receiver.settle([(foreign, Complete())])


@pytest.mark.parametrize("delay", [-1.0, math.nan, math.inf])
def test_a_delay_that_cannot_be_is_refused(broker, delay):
    with pytest.raises(ConfigurationError, match="delay"):
        broker.send("q", [Envelope(b"x", delay=delay)])


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "0", "a-b", "a.b_c", "_x", ".x", "a" * 63, "1-2-3"])
def test_names_that_are_allowed(name):
    KIND.check_name(name)


@pytest.mark.parametrize(
    "name",
    ["", "-a", "a-", "a--b", "A", "a b", "a/b", "../x", "a" * 64, "é", "a\n", "\x1b[31m", "\u0660"],
)
def test_names_that_are_not(name):
    with pytest.raises(InvalidQueueName, match="1 to 63 lower-case letters") as caught:
        KIND.check_name(name)
    assert str(caught.value).isprintable()


def test_a_name_of_a_megabyte_makes_no_error_of_a_megabyte():
    with pytest.raises(InvalidQueueName) as caught:
        KIND.check_name("a" * 1_000_000)
    assert len(str(caught.value)) < 300


def test_a_name_that_cannot_be_is_shown_escaped(broker):
    with pytest.raises(InvalidQueueName) as caught:
        broker.stats("\x1b[31mred\n")
    assert str(caught.value).isprintable()


# -- payload ---------------------------------------------------------------------------------------

text = st.text(st.characters(exclude_categories=["Cs"]))
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | text
    | st.binary()
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3)
)
envelopes = st.builds(
    Envelope,
    st.binary(),
    st.dictionaries(text, values, max_size=4),
    text,
    text,
    text,
    st.none() | text,
    st.none() | text,
    st.none() | text,
    st.none() | text,
    st.just(0.0),
    st.none() | st.floats(allow_nan=False),
    st.dictionaries(text, values, max_size=2),
)


@given(envelopes)
def test_an_envelope_survives_its_payload(envelope):
    assert envelope_of(payload_of(envelope)) == envelope


@given(st.binary())
def test_any_bytes_are_some_envelope(payload):
    envelope = envelope_of(payload)
    assert envelope.body == payload
    assert envelope.content_type == "application/octet-stream"


@pytest.mark.parametrize(
    "headers",
    [{"a": "\ud800"}, {"a": 2**64}, {"a": object()}, {"a": {1, 2}}],
    ids=["half a character", "too large", "object", "set"],
)
def test_headers_that_cannot_be_written_are_refused(headers):
    with pytest.raises(EncodeError, match="'m'"):
        payload_of(Envelope(b"x", headers, "m"))


def test_headers_of_any_depth_are_refused_in_plain_words():
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(EncodeError):
        payload_of(Envelope(b"x", {"deep": nested}))
    while nested:  # taken apart one by one: freeing them at once would recurse as deep
        nested = nested.pop()


def test_the_limit_counts_headers_too():
    with pytest.raises(MessageTooLarge, match="reference"):
        payload_of(Envelope(b"", {"big": bytes(MESSAGE_LIMIT)}))


def test_somebody_elses_payload_is_delivered_as_bytes(broker):
    broker.declare("q")
    broker.engine.send("q", [NewMessage(b"not ours")])
    (delivery,) = broker.receiver("q", lease=60.0).receive(1, 0.0)
    assert delivery.envelope == Envelope(b"not ours", content_type="application/octet-stream")


def test_the_first_send_in_a_transaction_does_not_deadlock_with_a_new_receiver(
    tmp_path: Path,
) -> None:
    database = Database(str(tmp_path / "queues.db"))
    broker = LocalBroker(database)
    broker.declare("a")
    inside, done = threading.Event(), threading.Event()

    def send() -> None:
        with broker.transaction():
            inside.set()
            time.sleep(0.3)  # the other thread waits for the database now
            broker.send("a", [Envelope(b"x")])
        done.set()

    threads = [
        threading.Thread(target=send, daemon=True),
        threading.Thread(target=broker.wakeup, args=["b"], daemon=True),
    ]
    threads[0].start()
    assert inside.wait(5)
    threads[1].start()
    assert done.wait(5), "the two wait for each other"
    database.close()
