"""Pool processes that cannot be started: the worker says so, and tries again later."""

import json
import logging
import select
import signal
import sys

import pytest
from poolends import Watching

from aztask.worker.pool.forking import ForkedStarter, ForkServerHandle, next_server
from aztask.worker.pool.link import PoolPlan
from aztask.worker.pool.packets import socket_pair
from aztask.worker.pool.pool import Pool


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """An interpreter that ends as soon as it was asked for something."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nsleep 0.1\nexit 1\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))


def answered(server):
    """Wait until the server says something, or is gone."""
    poll = select.poll()
    poll.register(server, select.POLLIN)
    assert poll.poll(5000)


@pytest.mark.usefixtures("broken")
def test_what_a_server_was_asked_for_ends_with_it():
    server = next_server()
    forked = server.fork({}, [])
    forked.kill()
    forked.wait()
    assert server.gone
    assert (forked.ended, forked.pid, forked.status) == (True, 0, None)
    with pytest.raises(OSError, match=r"pipe|not connected"):
        server.fork({}, [])
    server.close()


@pytest.mark.usefixtures("broken")
def test_starts_that_fail_are_tried_again_after_longer_and_longer(caplog):
    clock, mailbox, tries = Clock(), Watching(), []
    pool = Pool(PoolPlan("shop:app", 2, 1), ForkedStarter(mailbox), clock=clock)
    while clock.now < 20:
        pool.fill()
        for server, readable in list(mailbox.watched.items()):
            tries.append(clock.now)
            answered(server)
            readable()
            (process,) = pool.take_ended()
            assert process.ending() == "the pool process ended together with the pool's fork server"
            pool.ended(process)
            assert mailbox.watched == {}, "it has ended, and another one is started"
        clock.now += 0.5
    pool.close()
    assert tries == [0, 1, 3, 7, 15]
    assert not caplog.records


def test_a_server_that_does_not_answer_is_resumed_then_killed(tmp_path, monkeypatch, caplog):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nsleep 60\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    server = next_server()
    for now in (0.0, 100.0):
        server.check(now)  # nothing was asked for
    forked = server.fork({}, [])
    for now in (101.0, 105.9):
        server.check(now)
    assert caplog.text == ""
    server.check(106.0)
    assert "it is resumed (SIGCONT)" in caplog.text
    server.check(110.9)
    assert "it is replaced" not in caplog.text
    server.check(111.0)
    assert "it is replaced with its pool" in caplog.text
    assert server._process.wait(5) == -signal.SIGKILL
    server.close()
    forked.close()


def test_a_server_that_answers_slowly_is_left_alone(caplog):
    ends, signals = [], []

    class Busy:
        def kill(self):
            signals.append("kill")

        def send_signal(self, sig):
            signals.append(sig)

        def wait(self, timeout=None):
            return 0

    ours, theirs = socket_pair()
    ours.setblocking(False)
    ends.append(theirs)
    server = ForkServerHandle(ours, Busy())
    count = 10
    for _ in range(count):
        server.fork({}, [])
    for number in range(1, count):
        for second in range(4):
            server.check(4.0 * number + second)
            assert server.read() == []
        ends[0].send(json.dumps({"number": number, "failed": "too busy"}).encode())
        assert [forked.number for forked in server.read()] == [number]
    assert signals == [] and caplog.text == ""
    for now in (40.0, 45.0):
        server.check(now)
    assert signals == [signal.SIGCONT], "the last one is still owed"
    server.close()
    ends[0].close()


def test_an_interpreter_that_is_not_there_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    pool = Pool(PoolPlan("shop:app", 2, 1), ForkedStarter(Watching()), clock=Clock())
    with caplog.at_level(logging.ERROR):
        pool.fill()
    pool.close()
    assert pool.processes == []
    assert "a pool process cannot start: " in caplog.text
