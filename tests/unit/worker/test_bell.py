"""The bells: a ring ends a wait, and rings count once."""

import selectors
import signal

import pytest

from aztask.worker.mailbox import EventBell, SocketBell


@pytest.fixture(params=[EventBell, SocketBell])
def bell(request):
    made = request.param()
    yield made
    made.close()


def rings(bell):
    with selectors.DefaultSelector() as selector:
        selector.register(bell, selectors.EVENT_READ)
        return bool(selector.select(0))


def test_a_ring_is_heard_until_it_is_quiet(bell):
    assert not rings(bell)
    bell.ring()
    bell.ring()
    assert rings(bell)
    bell.quiet()
    assert not rings(bell)
    bell.quiet()


def test_it_never_waits_however_often_it_rings(bell):
    for _ in range(100_000):
        bell.ring()
    bell.quiet()
    assert not rings(bell)


def test_a_ring_after_its_end_does_no_harm(bell):
    bell.close()
    bell.ring()


def test_a_pair_of_sockets_hears_signals():
    bell = SocketBell()
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        bell.hear_signals()
        signal.raise_signal(signal.SIGUSR2)
        assert rings(bell)
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR2, before)
        bell.close()
