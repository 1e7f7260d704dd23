"""The board: what a pool process runs, read by the worker at any instant."""

import os
import signal
import time

from aztask.worker.pool.link import Board


def test_what_runs_since_when():
    board = Board.create(3)
    board.note(0, 7, 1.5)
    board.note(2, 8, 2.5)
    assert board.running() == {7: 1.5, 8: 2.5}
    board.clear(0)
    assert board.running() == {8: 2.5}
    board.close()


def test_a_number_is_never_seen_with_an_earlier_time():
    """Read while another process writes: delivery n starts at n here, so no time is below it."""
    board = Board.create(1)
    child = os.fork()
    if not child:
        number = 0
        while True:
            number += 1
            board.note(0, number, float(number))
            board.clear(0)
    try:
        seen, give_up_at = 0, time.monotonic() + 20.0
        while seen < 200_000:
            assert time.monotonic() < give_up_at
            for number, at in board.running().items():
                assert at >= number
                seen += 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        board.close()
