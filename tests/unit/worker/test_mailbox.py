"""The mailbox: what wakes the supervisor's loop."""

import signal
import socket
import threading
import time

import pytest

from aztask.worker.mailbox import EventMailbox

LONG = 30.0


@pytest.fixture
def mailbox():
    made = EventMailbox()
    yield made
    made.close()


def seconds_of(call):
    started = time.monotonic()
    call()
    return time.monotonic() - started


def test_posted_calls_run_in_order_those_they_post_included(mailbox):
    ran = []
    mailbox.post(lambda: (ran.append(1), mailbox.post(lambda: ran.append(3))))
    mailbox.post(lambda: ran.append(2))
    mailbox.wait(LONG)
    assert ran == [1, 2, 3]


def test_a_post_of_another_thread_ends_the_wait(mailbox):
    ran = []
    timer = threading.Timer(0.05, lambda: mailbox.post(lambda: ran.append(1)))
    timer.start()
    assert seconds_of(lambda: mailbox.wait(LONG)) < LONG / 2
    assert ran == [1]
    timer.join()


def test_a_signal_handler_ends_the_wait(mailbox):
    before = signal.signal(signal.SIGALRM, lambda *_: mailbox.wake())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert seconds_of(lambda: mailbox.wait(LONG)) < LONG / 2
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_wake_before_the_wait_counts_once(mailbox):
    mailbox.wake()
    mailbox.wake()
    assert seconds_of(lambda: mailbox.wait(LONG)) < LONG / 2
    assert seconds_of(lambda: mailbox.wait(0.05)) >= 0.04


def test_a_watched_socket_calls_until_it_is_unwatched(mailbox):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        got = []
        mailbox.watch(ours, lambda: got.append(ours.recv(10)))
        theirs.send(b"one")
        mailbox.wait(LONG)
        mailbox.unwatch(ours)
        theirs.send(b"two")
        mailbox.wait(0.0)
    assert got == [b"one"]


def test_a_late_post_to_a_closed_mailbox_does_no_harm():
    mailbox = EventMailbox()
    mailbox.close()
    mailbox.post(lambda: None)
    mailbox.close()
