"""Interrupts: raised in the right delivery, in a thread or in the main thread."""

import signal
import threading
import time

import pytest

from aztask.errors import TaskStopped, TimeLimitExceeded
from aztask.worker.pool.interrupt import SIGNAL, InterruptSlot, MainThread

PATIENCE = 10.0


class SlotThread:
    """A slot on a thread that runs delivery 7 until it is interrupted or told to end."""

    def __init__(self):
        self.slot = InterruptSlot(0)
        self.raised = None
        self.begun, self.leave = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        assert self.begun.wait(PATIENCE)

    def _run(self):
        try:
            self.slot.begin(7)
            self.begun.set()
            until = time.monotonic() + PATIENCE
            while not self.leave.is_set() and time.monotonic() < until:
                pass
        except TimeLimitExceeded as error:
            self.raised = error
        finally:
            self.slot.end()

    def end(self):
        self.leave.set()
        self.thread.join(PATIENCE)


def test_a_thread_is_interrupted():
    running = SlotThread()
    running.slot.interrupt(7, TimeLimitExceeded)
    running.thread.join(PATIENCE)
    assert isinstance(running.raised, TimeLimitExceeded)


def test_another_delivery_is_not():
    running = SlotThread()
    running.slot.interrupt(8, TimeLimitExceeded)
    running.end()
    assert running.raised is None


def test_after_the_end_nothing_is_interrupted():
    running = SlotThread()
    running.end()
    running.slot.interrupt(7, TimeLimitExceeded)
    assert running.raised is None


@pytest.fixture
def main_slot():
    before = signal.getsignal(SIGNAL)
    yield InterruptSlot(0, main=MainThread())
    signal.signal(SIGNAL, before)


def test_the_main_thread_is_interrupted_in_a_blocking_call(main_slot):
    main_slot.begin(7)
    timer = threading.Timer(0.05, lambda: main_slot.interrupt(7, TaskStopped))
    timer.start()
    started = time.monotonic()
    with pytest.raises(TaskStopped):
        time.sleep(PATIENCE)
    assert time.monotonic() - started < PATIENCE / 2
    main_slot.end()
    timer.join()


def test_a_signal_after_the_end_raises_nothing(main_slot):
    main_slot.begin(7)
    main_slot.end()
    main_slot.interrupt(7, TaskStopped)
    signal.raise_signal(SIGNAL)
