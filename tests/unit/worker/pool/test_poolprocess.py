"""The pool process: signals, imports that fail, and its end, each in a real process."""

import json
import socket
import subprocess
import sys

import pytest

from aztask.worker.pool.link import Board
from aztask.worker.pool.packets import Packets, socket_pair

CHILD = """
import json, sys
from aztask.worker.pool.poolprocess import ProcessEnds, ProcessMain
setup = json.loads(sys.argv[1])
ProcessMain(setup, ProcessEnds.of_descriptors(setup)).run()
print("run has ended")
"""
APP = """
from aztask import App
app = App("shop", broker="local://:memory:")

@app.task
def add(a, b):
    return a + b
"""


class Started:
    """A pool process, and the worker's ends of its sockets."""

    def __init__(self, folder, app):
        self.board = Board.create(1)
        ends = [socket_pair() for _ in range(3)]
        self.inbox, self.outbox, self.control = (Packets(ours) for ours, _ in ends)
        self.outbox.socket.settimeout(30.0)
        numbers = [theirs.fileno() for _, theirs in ends]
        setup = {"app": app, "slots": 1, "worker": 1, "name": "w7", "board": self.board.descriptor}
        setup |= dict(zip(("inbox", "outbox", "control"), numbers, strict=True))
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, json.dumps(setup)],
            cwd=folder,
            pass_fds=[*numbers, self.board.descriptor],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _, theirs in ends:
            theirs.close()

    def close(self):
        self.process.kill()
        self.process.communicate()
        for end in (self.inbox, self.outbox, self.control):
            end.close()
        self.board.close()


@pytest.fixture
def start(tmp_path):
    made = []
    (tmp_path / "shop.py").write_text(APP)

    def started(app="shop:app"):
        made.append(Started(tmp_path, app))
        return made[-1]

    yield started
    for each in made:
        each.close()


def test_it_reports_that_it_is_ready_and_ends_when_it_is_retired(start):
    child = start()
    assert child.outbox.receive() == ["ready"]
    child.inbox.send([])
    out, _ = child.process.communicate(timeout=30)
    assert (child.process.returncode, out) == (0, "run has ended\n")


def test_an_app_that_cannot_be_imported_is_reported(start):
    child = start("nosuch:app")
    kind, text = child.outbox.receive()
    assert kind == "broken"
    assert "nosuch" in text


def test_it_ends_when_the_worker_closes_the_control_socket(start):
    child = start()
    assert child.outbox.receive() == ["ready"]
    child.control.socket.shutdown(socket.SHUT_RDWR)
    assert child.process.wait(30) == 0
