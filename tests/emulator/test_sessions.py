"""Sessions, over the wire: named, next available, state, locks and their loss."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest
from azure.servicebus import NEXT_AVAILABLE_SESSION, AutoLockRenewer, ServiceBusMessage
from azure.servicebus.exceptions import (
    OperationTimeoutError,
    ServiceBusError,
    SessionCannotBeLockedError,
    SessionLockLostError,
)

WAIT = 5


def send(client, name, *pairs):
    with client.get_queue_sender(name) as sender:
        sender.send_messages(
            [ServiceBusMessage(text, session_id=session) for session, text in pairs]
        )


def test_named_sessions_state_and_order(client, queue):
    name = queue(sessions=True)
    send(client, name, ("s1", "a"), ("s2", "x"), ("s1", "b"))
    with client.get_queue_receiver(name, session_id="s1") as receiver:
        session = receiver.session
        assert session.session_id == "s1"
        got = receiver.receive_messages(2, max_wait_time=WAIT)
        assert [(str(one), one.session_id) for one in got] == [("a", "s1"), ("b", "s1")]
        assert not session.get_state()
        session.set_state(b"half-way")
        assert session.get_state() == b"half-way"
        before = session.locked_until_utc
        assert session.renew_lock() >= before
        with pytest.raises(SessionCannotBeLockedError):
            client.get_queue_receiver(name, session_id="s1").__enter__()
        receiver.complete_message(got[0])
        receiver.defer_message(got[1])
        (deferred,) = receiver.receive_deferred_messages(got[1].sequence_number)
        receiver.complete_message(deferred)
        assert receiver.peek_messages(5, sequence_number=1) == []
    assert sorted(client.list_queue_sessions(name)) == ["s1", "s2"]
    with client.get_queue_receiver(name, session_id="s1") as receiver:
        assert receiver.session.get_state() == b"half-way"
        receiver.session.set_state(None)
    assert list(client.list_queue_sessions(name)) == ["s2"]


def test_next_available_session(client, queue):
    name = queue(sessions=True)
    send(client, name, ("only", "a"))
    with client.get_queue_receiver(name, session_id=NEXT_AVAILABLE_SESSION) as receiver:
        assert receiver.session.session_id == "only"
        (message,) = receiver.receive_messages(1, max_wait_time=WAIT)
        with pytest.raises(OperationTimeoutError):
            client.get_queue_receiver(
                name, session_id=NEXT_AVAILABLE_SESSION, max_wait_time=1
            ).__enter__()
        receiver.abandon_message(message)
        (again,) = receiver.receive_messages(1, max_wait_time=WAIT)
        assert again.delivery_count == 1
        receiver.dead_letter_message(again, reason="enough")
    with client.get_queue_receiver(name, sub_queue="deadletter") as dead:
        (letter,) = dead.receive_messages(1, max_wait_time=WAIT)
        assert (letter.dead_letter_reason, letter.session_id) == ("enough", "only")
        dead.complete_message(letter)


def test_a_lost_session_lock(client, queue):
    name = queue(sessions=True, lock_seconds=1)
    send(client, name, ("s", "a"))
    receiver = client.get_queue_receiver(name, session_id="s").__enter__()
    (message,) = receiver.receive_messages(1, max_wait_time=WAIT)
    time.sleep(1.2)
    with pytest.raises(SessionLockLostError):
        receiver.complete_message(message)
    with client.get_queue_receiver(name, session_id="s") as other:
        (again,) = other.receive_messages(1, max_wait_time=WAIT)
        assert again.delivery_count == 1
        other.complete_message(again)
    receiver.close()


def test_the_renewer_keeps_a_session(client, queue):
    name = queue(sessions=True, lock_seconds=1.5)
    send(client, name, ("s", "a"))
    with client.get_queue_receiver(name, session_id="s") as receiver, AutoLockRenewer() as renewer:
        renewer.register(receiver, receiver.session, max_lock_renewal_duration=30)
        (message,) = receiver.receive_messages(1, max_wait_time=WAIT)
        time.sleep(2.5)
        receiver.complete_message(message)


def test_receivers_must_fit_the_queue(client, queue):
    plain, with_sessions = queue(), queue(sessions=True)
    with pytest.raises(ServiceBusError):
        client.get_queue_receiver(plain, session_id="s").__enter__()
    with pytest.raises(ServiceBusError):
        client.get_queue_receiver(with_sessions).__enter__()
    with client.get_queue_sender(with_sessions) as sender, pytest.raises(ServiceBusError):
        sender.send_messages(ServiceBusMessage("without a session"))


def test_a_session_id_is_a_text(client, queue):
    with pytest.raises(ServiceBusError, match="session id"):
        client.get_queue_receiver(queue(sessions=True), session_id=1).__enter__()


def test_a_receiver_that_deletes_outlives_its_sessions_lock(client, queue):
    """A receive-and-delete link settles nothing, and its client cannot renew a lock."""
    name = queue(sessions=True, lock_seconds=1)
    send(client, name, ("s", "first"), ("s", "second"))
    with client.get_queue_receiver(
        name, session_id="s", receive_mode="receiveanddelete", max_wait_time=3
    ) as receiver:
        assert [str(message) for message in receiver] == ["first", "second"]  # and waits for more
    with client.get_queue_receiver(name, session_id="s") as receiver:
        assert receiver.session.session_id == "s"  # it is free again


def test_sessions_are_listed_by_when_their_state_was_set(client, queue):
    name = queue(sessions=True)
    times = []
    for session in ("old", "new"):
        with client.get_queue_receiver(name, session_id=session) as receiver:
            times.append(datetime.now(UTC))
            receiver.session.set_state(b"state")
            time.sleep(0.01)
    send(client, name, ("only-messages", "x"))
    since = [list(client.list_queue_sessions(name, state_updated_after=at)) for at in times]
    assert [sorted(names) for names in since] == [["new", "old"], ["new"]]
    assert sorted(client.list_queue_sessions(name)) == ["new", "old", "only-messages"]
    with client.get_queue_receiver(name, session_id="new") as receiver:
        receiver.session.set_state(None)
    assert list(client.list_queue_sessions(name, state_updated_after=times[0])) == ["old"]
