"""``--pool solo``: pdb on a terminal and debugpy's own protocol, for longer than a lease."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from harness import Site, living_pool_processes, wait_until

from aztask.errors import TaskFailed
from aztask.stores.events.sink import read_events

APP = """
import os
from ledger_app import app, note
from aztask import RetryPolicy

@app.task(name="debugged", soft_time_limit=0.5, time_limit=1.0, retry=RetryPolicy(max_retries=0))
def debugged(key, stops):
    note("start", key)
    total = 41
    if stops:
        breakpoint()
    total += 1  # here
    note("end", key)
    return total

@app.task(name="ident")
def ident(key):
    import threading
    return [os.getpid(), threading.current_thread() is threading.main_thread()]

if "DEBUGPY_PORT" in os.environ:
    @app.lifespan
    def debugger():
        import debugpy
        debugpy.listen(("127.0.0.1", int(os.environ["DEBUGPY_PORT"])))
        note("listens", "debugpy")
        yield
"""
ON_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "aztask", *sys.argv[1:]])
"""
"""Makes the terminal that of its session, as a shell does."""

LEASE = 1.0
STOPPED = 4.0
"""For how long a debugger waits: longer than lease and time limits."""


@pytest.fixture
def app_site(site: Site) -> Site:
    (site.folder / "debugged_app.py").write_text(APP)
    site.module = "debugged_app:app"
    site.extra["PYTHONPATH"] = os.pathsep.join(
        (os.fspath(site.folder), site.environment["PYTHONPATH"])
    )
    return site


class Terminal:
    """A worker whose input and output are a terminal, as a person starts it."""

    def __init__(self, site: Site, *arguments: str, **environment: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_TERMINAL, "worker", "-A", site.module, "--pool", "solo",
             *arguments],
            env={**site.environment, "TERM": "dumb", **environment},
            cwd=site.folder,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.text = ""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        while True:
            try:
                found = os.read(self._master, 65536)
            except OSError:  # its last process has ended
                return
            if not found:
                return
            self.text += found.decode(errors="replace")

    def expect(self, text: str, after: int = 0, seconds: float = 30.0) -> None:
        try:
            wait_until(lambda: text in self.text[after:], seconds, repr(text))
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text[-3000:]}") from None

    def type(self, line: str) -> int:
        before = len(self.text)
        os.write(self._master, f"{line}\n".encode())
        return before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        self._reading.join(5)
        os.close(self._master)


@contextmanager
def terminal(site: Site, *arguments: str, **environment: str) -> Iterator[Terminal]:
    made = Terminal(site, "--lease", f"{LEASE:g}s", "-Q", "default", *arguments, **environment)
    try:
        yield made
    finally:
        made.close()
        wait_until(lambda: not living_pool_processes(site.folder), 20, "no pool process is left")


def lost(site: Site) -> list[str]:
    return [each.event for each in read_events(site.events) if each.event == "lease_lost"]


def test_pdb_on_a_terminal_for_longer_than_the_lease(app_site: Site) -> None:
    app = app_site.app()
    with terminal(app_site) as worker:
        worker.expect("time limits are off")
        app.send("debugged", ["a", True], task_id="a")
        worker.expect("(Pdb)")
        time.sleep(STOPPED)
        assert app.broker.stats("default").leased == 1, worker.text
        worker.expect("41", worker.type("p total"))
        worker.type("total = 99")
        worker.type("c")
        assert app.result("a").get(timeout=30) == 100
        pid, main = app.send("ident", ["i"], task_id="i").get(timeout=30)
        assert main, "a task runs in the main thread"
        assert pid != worker.process.pid, "the supervisor stays"
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(30) == 0, worker.text
    assert app_site.counts("start") == {"a": 1}
    assert not lost(app_site)


def test_max_lease_ends_a_run_at_a_breakpoint(app_site: Site) -> None:
    app = app_site.app()
    with terminal(app_site, "--max-lease", "4s") as worker:
        worker.expect("a run still ends at max_lease, 4 s")
        app.send("debugged", ["a", True], task_id="a")
        worker.expect("(Pdb)")
        with pytest.raises(TaskFailed) as failure:
            app.result("a").get(timeout=30)
        assert failure.value.error_type == "MaxLeaseExceeded"
    assert app_site.counts("start") == {"a": 1}


def test_a_killed_worker_leaves_no_process_at_the_breakpoint(app_site: Site) -> None:
    app = app_site.app()
    with terminal(app_site) as worker:
        app.send("debugged", ["a", True], task_id="a")
        worker.expect("(Pdb)")
        worker.process.kill()
        worker.process.wait(30)
        wait_until(lambda: not living_pool_processes(app_site.folder), 20, "it ends too")


class Debugger:
    """A client of the Debug Adapter Protocol, as an editor is one."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._file = self._socket.makefile("rb")
        self._sequence = 0
        self._events: list[dict[str, Any]] = []
        self._answers: dict[int, dict[str, Any]] = {}

    def send(self, command: str, **arguments: Any) -> int:
        self._sequence += 1
        request = {"seq": self._sequence, "type": "request", "command": command}
        data = json.dumps({**request, "arguments": arguments}).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
        return self._sequence

    def ask(self, command: str, **arguments: Any) -> Any:
        return self.answer(self.send(command, **arguments))

    def answer(self, number: int) -> Any:
        while number not in self._answers:
            self._receive()
        found = self._answers.pop(number)
        assert found["success"], found
        return found.get("body")

    def event(self, name: str) -> dict[str, Any]:
        while True:
            for each in self._events:
                if each["event"] == name:
                    self._events.remove(each)
                    return each.get("body", {})
            self._receive()

    def _receive(self) -> None:
        length = 0
        while (line := self._file.readline().strip()) or not length:
            if line.lower().startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        message = json.loads(self._file.read(length))
        if message["type"] == "event":
            self._events.append(message)
        elif message["type"] == "response":
            self._answers[message["request_seq"]] = message

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_a_breakpoint_of_debugpy_suspends_all_threads_and_the_lease_goes_on(app_site: Site) -> None:
    app, port = app_site.app(), free_port()
    source = app_site.folder / "debugged_app.py"
    line = next(n for n, text in enumerate(APP.splitlines(), 1) if "# here" in text)
    with terminal(app_site, DEBUGPY_PORT=str(port)) as worker:
        wait_until(lambda: app_site.lines("listens"), 60, "the debugger listens")
        debugger = Debugger(port)
        debugger.ask("initialize", adapterID="test", clientID="test", pathFormat="path")
        attach = debugger.send("attach", justMyCode=False, subProcess=False)
        debugger.event("initialized")
        debugger.ask("setBreakpoints", source={"path": str(source)}, breakpoints=[{"line": line}])
        debugger.ask("configurationDone")
        debugger.answer(attach)
        app.send("debugged", ["a", False], task_id="a")
        stopped = debugger.event("stopped")
        assert stopped["allThreadsStopped"], stopped
        time.sleep(STOPPED)
        assert app.broker.stats("default").leased == 1, worker.text
        frames = debugger.ask("stackTrace", threadId=stopped["threadId"])["stackFrames"]
        assert frames[0]["line"] == line
        frame = frames[0]["id"]
        assert debugger.ask("evaluate", expression="total", frameId=frame)["result"] == "41"
        debugger.ask("evaluate", expression="total = 7", frameId=frame, context="repl")
        debugger.ask("continue", threadId=stopped["threadId"])
        assert app.result("a").get(timeout=30) == 8
        debugger.close()
    assert app_site.counts("start") == {"a": 1}
    assert not lost(app_site)
