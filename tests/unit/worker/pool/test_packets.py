"""Values between worker and pool process: large ones travel in files, which never stay."""

import inspect
import os
import resource
from contextlib import suppress
from pathlib import Path

import pytest
from failingcalls import strike_each

from aztask.worker.pool.packets import PACKET_BYTES, Packets, socket_pair

LARGE = b"x" * PACKET_BYTES


@pytest.fixture
def ends():
    left, right = (Packets(end) for end in socket_pair())
    yield left, right
    left.close()
    right.close()


def open_files():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_values_arrive_whole_and_in_order(ends):
    left, right = ends
    values = [["small", 1], [1, LARGE], "\ud800", [2, 5 * LARGE], LARGE[:-5], []]
    for value in values:
        assert left.send(value)
    assert [right.receive() for _ in values] == values


def test_a_large_value_leaves_no_open_file_read_or_not(ends):
    left, right = ends
    before = open_files()
    for number in range(3):
        assert left.send([number, LARGE])
    assert open_files() == before
    assert right.send(LARGE)
    assert left.receive() == LARGE
    assert right.receive() == [0, LARGE]
    assert open_files() == before
    right.close()
    assert open_files() == before - 1


def test_what_does_not_fit_is_told(ends):
    left, right = ends
    left.socket.setblocking(False)
    before, sent = open_files(), 0
    while left.send([sent, LARGE]):
        sent += 1
    assert sent > 10
    assert open_files() == before
    assert [right.receive() for _ in range(sent)] == [[number, LARGE] for number in range(sent)]
    assert left.send(["again", LARGE])


def test_a_descriptor_that_is_read_is_not_for_programs_that_tasks_start(ends, monkeypatch):
    left, right = ends
    seen = []
    monkeypatch.setattr(
        "aztask.worker.pool.packets._read_file", lambda attached: seen.extend(attached) or b"\x01"
    )
    left.send(LARGE)
    assert right.receive() == 1
    (_, _, data), *_ = seen
    descriptor = int.from_bytes(data[:4], "little")
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_no_number_left_for_a_file_is_an_error_not_another_value(ends):
    left, right = ends
    left.send(LARGE)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="too many open files"):
            right.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_error_anywhere_in_a_receive_loses_no_value(ends):
    left, right = ends
    values = [[0, LARGE], ["small", 1], [2, LARGE]]
    for value in values:
        left.send(value)

    def take():
        with suppress(BlockingIOError):
            return right.receive(wait=False)

    found = strike_each(take, inspect.getsourcefile(Packets))
    assert [value for value, _ in found] == values
    assert found[0][1] >= 2, "it was struck in each function on the way"
    assert not right.buffered


def test_a_peer_that_is_gone_is_noticed(ends):
    left, right = ends
    right.close()
    with pytest.raises(OSError, match="pipe"):
        left.send(1)
    with pytest.raises(OSError, match="pipe"):
        left.send(LARGE)
    assert left.receive(wait=False) is None
