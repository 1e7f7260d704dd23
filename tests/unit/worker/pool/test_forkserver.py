"""The fork server in a process of its own: what it answers, and that it ends with the worker."""

import json
import os
import select
import socket
import subprocess
import sys
import threading

import pytest

from aztask.worker.pool import forkserver
from aztask.worker.pool.link import Board
from aztask.worker.pool.packets import socket_pair

PATIENCE = 30_000


class Served:
    """A fork server, as the worker has it."""

    def __init__(self):
        self.end, theirs = socket_pair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", forkserver.__name__, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
            )

    def ask(self, **setup):
        """Ask for a pool process whose app does not exist: it starts, reports that, and ends."""
        pairs = [socket_pair() for _ in range(3)]
        board = Board.create(1)
        setup = {
            "app": "nosuch_app_at_all", "slots": 1, "worker": os.getpid(), "name": "w",
            "path": sys.path, "log": ["plain", 20], **setup,
        }  # fmt: skip
        numbers = [*(theirs.fileno() for _, theirs in pairs), board.descriptor]
        socket.send_fds(self.end, [json.dumps(setup).encode()], numbers)
        for pair in pairs:
            for end in pair:
                end.close()
        board.close()

    def answer(self):
        poll = select.poll()
        poll.register(self.end, select.POLLIN)
        assert poll.poll(PATIENCE)
        data, descriptors, _, _ = socket.recv_fds(self.end, 4096, 1)
        for each in descriptors:
            os.close(each)
        return json.loads(data), len(descriptors)

    def close(self):
        self.end.close()
        self.process.wait(30)


@pytest.fixture
def served():
    made = Served()
    yield made
    made.close()


def test_a_start_comes_with_a_descriptor_and_an_end_with_its_status(served):
    served.ask(number=1)
    (started, descriptors), (ended, none) = served.answer(), served.answer()
    assert (started["number"], descriptors) == (1, 1)
    assert started["pid"] != served.process.pid
    assert (ended["number"], none) == (1, 0)
    assert isinstance(ended["status"], int)


def test_each_request_has_its_own_process(served):
    pids = set()
    for number in (1, 2):
        served.ask(number=number)
        pids.add(served.answer()[0]["pid"])
        served.answer()
    assert len(pids) == 2


def test_it_ends_when_the_worker_closes_its_socket(served):
    served.end.close()
    assert served.process.wait(30) == 0


def test_threads_of_this_process_are_noticed():
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait)
    thread.start()
    assert forkserver.has_threads()
    leave.set()
    thread.join()
