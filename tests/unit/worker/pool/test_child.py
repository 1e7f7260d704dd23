"""The pool process: signals, imports that fail, and its end, each in a real process."""

import json
import signal
import socket
import subprocess
import sys

import pytest

from aztask.worker.pool.board import Board
from aztask.worker.pool.child import end_as_usual
from aztask.worker.pool.packets import Packets, socket_pair

CHILD = """
import json, sys
from aztask.worker.pool.child import Child
Child(json.loads(sys.argv[1])).run()
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


def test_sigterm_and_ctrl_c_do_nothing_here_and_end_programs_as_usual():
    script = (
        "import os, signal, subprocess, sys\n"
        "from aztask.worker.pool.child import leave_ending_to_worker\n"
        "leave_ending_to_worker()\n"
        "os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGINT)\n"
        "program = subprocess.Popen(['sleep', '60'])\n"
        "program.terminate()\n"
        "print(program.wait(30), flush=True)\n"
        "if (pid := os.fork()) == 0:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.split() == ["-15", "-15"]


def test_the_usual_handlers_are_restored():
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        end_as_usual()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
