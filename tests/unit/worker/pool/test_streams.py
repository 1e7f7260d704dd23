"""Values over plain streams: whole, in order, taken back exactly, not torn by an interrupt."""

from __future__ import annotations

import ctypes
import inspect
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from failingcalls import strike_each

from aztask.worker.pool.packets import PACKET_BYTES
from aztask.worker.pool.streams import (
    EPOCHS,
    LONGEST,
    StreamPackets,
    TicketInbox,
    TicketOutbox,
    stream_pair,
)

LARGE = b"x" * PACKET_BYTES


class Ends:
    """Both ends of a link: the worker's, which never wait, and the process's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (ours, theirs), (self.tickets, duplicate) = stream_pair(), stream_pair()
        self.worker = StreamPackets(ours, folder, waits=False)
        self.process = StreamPackets(theirs, folder, waits=True)
        reading = socket.socket(fileno=os.dup(duplicate.fileno()))
        self.inbox = TicketInbox(reading, self.process)
        self.outbox = TicketOutbox(self.tickets, duplicate, self.worker, 1_000)
        self._open: list[Any] = [self.worker, self.process, self.outbox, reading]

    def take(self) -> Any:
        return self.inbox.receive(wait=False)

    def close(self) -> None:
        for each in self._open:
            each.close()


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path)
    yield made
    made.close()


def test_values_arrive_whole_and_in_order_both_ways(ends: Ends) -> None:
    values: list[Any] = [["small", 1], [1, LARGE], "\ud800", [2, 5 * LARGE], LARGE[:-5], []]
    for value in values:
        assert ends.worker.send(value)
        assert ends.process.send(value)
    assert [ends.process.receive() for _ in values] == values
    assert [ends.worker.receive(wait=False) for _ in values] == values
    with pytest.raises(BlockingIOError):
        ends.worker.receive(wait=False)
    assert list(ends.folder.iterdir()) == [], "the reader of a large value removes its file"


def test_the_end_of_the_peer_is_none(ends: Ends) -> None:
    ends.worker.send(["last"])
    ends.worker.close()
    assert ends.process.receive() == ["last"]
    assert ends.process.receive() is None


def test_what_a_full_stream_took_in_part_goes_on_with_the_next_flush(ends: Ends) -> None:
    value, sent = LARGE[:-5], 0
    while ends.worker.send([sent, value]):
        sent += 1
    assert not ends.worker.flush()
    found = []
    while len(found) < sent:
        ends.worker.flush()
        found.append(ends.process.receive())
    assert [number for number, _ in found] == list(range(sent))
    assert ends.worker.flush()
    assert ends.worker.send(["again"])
    assert ends.process.receive() == ["again"]


def test_a_full_disk_sends_large_values_through_the_stream(tmp_path: Path) -> None:
    made = Ends(tmp_path / "missing")
    try:
        sender = threading.Thread(target=made.process.send, args=(["large", 20 * LARGE],))
        sender.start()
        found = None
        while found is None:
            try:
                found = made.worker.receive(wait=False)
            except BlockingIOError:
                sender.join(0.001)
        assert found == ["large", 20 * LARGE]
        sender.join()
    finally:
        made.close()


def test_what_something_else_wrote_is_an_error_and_not_a_wait(ends: Ends) -> None:
    os.write(ends.process.fileno(), (LONGEST + 1).to_bytes(4, "little") + b"?")
    with pytest.raises(ValueError, match="something else"):
        ends.worker.receive(wait=False)


class _Interrupt(Exception):
    pass


def test_an_interrupt_while_a_task_sends_tears_no_value(ends: Ends) -> None:
    """Interrupts of a thread come at any bytecode: each value arrives whole, once, in order."""
    rounds = 300
    ready = threading.Event()

    def send() -> None:
        numbers = iter(range(rounds))
        while True:
            with suppress(_Interrupt):
                ready.set()
                for number in numbers:
                    ends.process.send([number, LARGE[:-9]])
                return

    thread = threading.Thread(target=send)
    thread.start()
    ready.wait()
    found: list[int] = []
    while thread.is_alive():
        interrupt = ctypes.py_object(_Interrupt)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), interrupt)
        _drain(ends, found)
    ends.process.send(["last"])
    _drain(ends, found)
    assert found == sorted(set(found))
    assert len(found) > rounds // 10


def _drain(ends: Ends, found: list[int]) -> None:
    try:
        while True:
            number, *value = ends.worker.receive(wait=False)
            if value:
                assert value == [LARGE[:-9]]
                found.append(number)
    except BlockingIOError:
        pass


def test_deliveries_are_taken_in_order(ends: Ends) -> None:
    for number in (1, 2):
        assert ends.outbox.send([number, "fields"])
    assert [ends.take(), ends.take()] == [[1, "fields"], [2, "fields"]]
    with pytest.raises(BlockingIOError):
        ends.take()


def test_an_error_anywhere_in_a_receive_loses_no_delivery_and_no_value(ends: Ends) -> None:
    """A ticket without its delivery would leave the process one behind: the last seems to run."""
    for number in range(4):
        ends.outbox.send([number])
    ends.outbox.unread()  # their frames come first, and are passed over
    for number, value in enumerate((LARGE, "small", b"")):
        ends.outbox.send([number, value])
        ends.process.send([number, value])
    ends.outbox.send([])
    source = inspect.getsourcefile(StreamPackets) or ""

    def next_answer() -> Any:
        with suppress(BlockingIOError):
            return ends.worker.receive(wait=False)

    for take in (lambda: ends.take() or None, next_answer):
        found = strike_each(take, source)
        assert [value for value, _ in found] == [[0, LARGE], [1, "small"], [2, b""]]
        assert found[0][1] >= 3, "it was struck in each function on the way"


def test_what_is_taken_back_is_never_read(ends: Ends) -> None:
    for number in range(1, 6):
        ends.outbox.send([number])
    assert [ends.take(), ends.take()] == [[1], [2]]
    assert ends.outbox.unread() == [3, 4, 5]
    assert ends.outbox.unread() == []
    with pytest.raises(BlockingIOError):
        ends.take()
    ends.outbox.send([6])
    assert ends.take() == [6]


def test_the_ends_of_slots_stay_when_deliveries_are_taken_back(ends: Ends) -> None:
    ends.outbox.send([1])
    ends.outbox.send([])
    ends.outbox.send([2])
    ends.outbox.send([])
    assert ends.outbox.unread() == [1, 2]
    assert [ends.take(), ends.take()] == [[], []]


def test_a_dead_process_leaves_what_it_had_not_read(ends: Ends) -> None:
    for number in range(1, 4):
        ends.outbox.send([number])
    ends.outbox.send([])
    ends.take()
    ends.process.close()
    assert ends.outbox.unread() == [2, 3]


def test_a_process_that_hangs_is_not_given_more_than_tickets_can_tell_apart(ends: Ends) -> None:
    for number in range(EPOCHS - 1):
        assert ends.outbox.send([number])
        assert ends.outbox.unread() == [number]
    assert not ends.outbox.send([1_000])
    assert ends.outbox.unread() == []


def test_each_delivery_goes_to_the_process_or_back_and_never_to_both(ends: Ends) -> None:
    """A process that takes, and a worker that takes back at the same time."""
    taken: list[int] = []

    def take() -> None:
        while packet := ends.inbox.receive():
            taken.append(packet[0])

    thread = threading.Thread(target=take)
    thread.start()
    back: list[int] = []
    sent = 0
    while sent < 3_000:
        sent += ends.outbox.send([sent])
        if sent % 7 == 0:
            back += ends.outbox.unread()
    while not ends.outbox.send([]):
        ends.outbox.flush()
    ends.outbox.flush()
    thread.join(30)
    back += ends.outbox.unread()
    assert sorted(taken + back) == list(range(3_000))
    assert back
    assert taken == sorted(taken)
