"""Several supervisors for one ``aztask worker``: the process that starts and replaces them.

A supervisor works on one core. The overseer starts several, each a whole worker with a pool of its
own, named NAME.1, NAME.2 and so on. It imports no app and opens no broker.

Rules
1. The first supervisor starts alone. When it has checked app and queues, the others start: so a
   mistake in the settings is one line, not one from each. It alone logs banner and warnings.
2. A terminal and a service manager send signals to every process of a worker. The supervisors do
   nothing then. They obey the overseer, which passes each signal on once.
3. A supervisor that dies is replaced after a growing pause, under the same name. Its messages come
   back when their leases end, as those of any worker that dies.
4. If the first one never was up, or one ends because of its settings (`SETTINGS`), the command ends
   with its exit code: the next one would fail as well. The others drain.
5. One that ends by itself (``--burst``, ``--max-tasks``) is not replaced. The overseer ends with
   the last one.
6. A supervisor whose overseer has died drains: nothing would replace it, or stop it.

Both ends of a socket that only the two have speak in lines of JSON.

| from the overseer | |
|---|---|
| `{"stop": 15}` | a signal |
| `{"ask": "metrics"}` | answered by `{"metrics": ...}` |

| from the supervisor | |
|---|---|
| `{"up": 4}` | it works from now on; so many supervisors are wanted |
| `{"live": "", "ready": "", "failing": ""}` | every second with ``--http``: what its probes say |
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Final

from aztask.support import chance
from aztask.support.display import mask
from aztask.support.forks import in_forked_child
from aztask.support.parts import CALM_SECONDS, Part, pause_after, reason_of
from aztask.worker.firstprocess import SIGNAL_EXIT
from aztask.worker.platform import connected_pair, given_socket, shares_sockets, taken_socket
from aztask.worker.pool.watcher import start_python
from aztask.worker.stopsignals import (
    Stoppable,
    end_now,
    held_back,
    leave_ending_to_worker,
    let_through,
)

logger = logging.getLogger("aztask.worker")

VARIABLE: Final = "AZTASK_OVERSEEN"
"""Set for a supervisor that finds its place on its input."""

SETTINGS: Final = frozenset({2, 4, 5})
"""Exit codes of `aztask.operate.cli.failures`: usage, configuration, not found."""

LOOK_SECONDS: Final = 0.1
"""A signal waits for so long at most."""

REPORT_SECONDS: Final = 1.0
LATE_SECONDS: Final = 5.0
"""After this silence a supervisor is not ready, and its metrics are not waited for."""

STUCK_SECONDS: Final = 60.0
"""After this silence it is not live, also if it has not come up; as a single worker's loop."""

ANSWER_SECONDS: Final = 3.0
"""For the metrics of all, within what the client of a page waits."""

PROBES: Final = ("live", "ready", "failing")
STARTING: Final = "it starts"


class LineSocket:
    """One end of the socket between overseer and supervisor. One thread receives, any may send."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.ended = False
        self._rest = b""
        self._lock = threading.Lock()

    def send(self, value: Mapping[str, Any]) -> None:
        """Send a value, unless the other side has ended."""
        with self._lock, suppress(OSError):
            self.end.sendall(json.dumps(value).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """What has arrived, after waiting for some of it; `ended` after the last."""
        try:
            data = self.end.recv(1 << 16)
        except OSError:
            data = b""
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


# -- the supervisor's side


class OverseerLink:
    """A supervisor's link to its overseer.

    * `name`, `number`: the supervisor's. `total`: of all; 0: the first one decides.
    * `speaks`: whether it logs banner and warnings.
    """

    def __init__(self, end: socket.socket, place: Mapping[str, Any]) -> None:
        self.name: str = place["name"]
        self.number: int = place["number"]
        self.total: int = place["total"]
        self.speaks: bool = place["speaks"]
        self._line = LineSocket(end)
        self._worker: Stoppable | None = None
        self._probes: Mapping[str, Callable[[], str]] = {}
        self._part = Part("overseer")
        in_forked_child(end.close)  # else it would stay open in the pool

    @classmethod
    def of_process(cls) -> OverseerLink | None:
        """The link of this process, if an overseer has started it."""
        if not os.environ.pop(VARIABLE, ""):
            return None
        leave_ending_to_worker()
        let_through()
        line = sys.stdin.buffer.readline()
        if not line.endswith(b"\n"):  # the overseer has ended
            end_now(signal.SIGTERM)
        place = json.loads(line)
        return cls(taken_socket(place["end"]), place)

    def start(self) -> None:
        """Obey from now on, on a thread. No process may be forked off this one before."""
        self._part.thread(self._run, "aztask-overseer").start()

    def up(self, total: int, worker: Stoppable) -> None:
        """Tell that the supervisor works from now on. worker: what orders drain and end."""
        self._worker = worker
        self._line.send({"up": total})

    def serve(self, probes: Mapping[str, Callable[[], str]]) -> None:
        """Report the `PROBES` among these every second, and answer for ``metrics``."""
        self._probes = probes

    def _run(self) -> None:
        due = 0.0
        while not self._line.ended:
            self._part.rest()
            ready, _, _ = select.select([self._line.end], [], [], REPORT_SECONDS)
            self._part.begin()
            for order in self._line.receive() if ready else ():
                self._obey(order)
            if self._probes and time.monotonic() >= due:
                due = time.monotonic() + REPORT_SECONDS
                self._line.send({name: self._said(name) for name in PROBES})
        logger.warning("the process that has started %s is gone: it drains", self.name)
        self._stop(signal.SIGTERM)

    def _obey(self, order: Mapping[str, Any]) -> None:
        if "stop" in order:
            self._stop(order["stop"])
        elif "ask" in order:
            self._line.send({"metrics": self._said("metrics") if self._probes else ""})

    def _said(self, name: str) -> str:
        try:
            return self._probes[name]()
        except Exception as error:  # noqa: BLE001  # orders must be obeyed, whatever metrics do
            self._part.failed(error)
            return "" if name == "metrics" else f"its probe {name} failed: {reason_of(error)}"

    def _stop(self, number: int) -> None:
        if self._worker is None:
            end_now(number, told=self.speaks)
        else:
            self._worker.stop(number)


# -- the overseer's side


class OverseenSupervisor:
    """One supervisor, as its overseer sees it: its process, and what it has told.

    up: whether it, or one before it in this place, has worked. done: it is not started again.
    """

    def __init__(self, name: str, number: int) -> None:
        self.name = f"{name}.{number}"
        self.number = number
        self.up = self.done = False
        self.wanted = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.due_at = self._heard_at = self._began_at = time.monotonic()
        self._failures = 0
        self._probes: dict[str, str] = {"ready": STARTING}
        self.line: LineSocket | None = None
        self.metrics: SimpleQueue[str] = SimpleQueue()

    def start(self, arguments: Sequence[str], total: int) -> None:
        """Start its process. total: of all, 0 if that is not known yet. Raises OSError."""
        self._heard_at = self._began_at = time.monotonic()
        self._probes = {"ready": STARTING}
        ours, theirs = connected_pair()
        with ExitStack() as unused, theirs:
            unused.callback(ours.close)
            with held_back():
                process = start_python(
                    ["-m", "aztask", *arguments],
                    environment={**os.environ, VARIABLE: "1"},
                    stdin=subprocess.PIPE,
                    pass_fds=() if shares_sockets() else (theirs.fileno(),),
                )
            place = {
                "name": self.name,
                "number": self.number,
                "total": total,
                "speaks": self.number == 1 and not self.up,
                "end": given_socket(theirs, process.pid),
            }
            if (pipe := process.stdin) is not None:
                with suppress(OSError), pipe:  # it may have ended
                    pipe.write(json.dumps(place).encode() + b"\n")
            unused.pop_all()
        self.process, self.line = process, LineSocket(ours)

    def listen(self) -> None:
        """Take over what it has told."""
        line = self.line
        if line is None:
            return
        for told in line.receive():
            self._heard_at = time.monotonic()
            if "up" in told:
                self.up, self.wanted = True, told["up"]
                self._probes = {}
            elif "metrics" in told:
                self.metrics.put(told["metrics"])
            else:
                self._probes = told

    def send(self, order: Mapping[str, Any]) -> None:
        """Send an order; one that does not run gets none."""
        if (line := self.line) is not None:
            line.send(order)

    def ended(self) -> int | None:
        """The exit code of a process that has ended since the last call, negative for a signal."""
        if self.process is None or (code := self.process.poll()) is None:
            return None
        if self.line is not None:
            self.line.end.setblocking(False)
            while not self.line.ended:  # what it told before its end
                self.listen()
            self.line.end.close()
        self.process = self.line = None
        return code

    def put_off(self) -> float:
        """Start it again after a pause, whose seconds are returned."""
        now = time.monotonic()
        self._failures = 0 if now - self._began_at > CALM_SECONDS else self._failures
        pause = pause_after(self._failures)
        self._failures += 1
        self.due_at = now + pause
        self._probes = {"ready": "it has died and is started again"}
        return pause

    @property
    def silent(self) -> float:
        """Seconds since it has told something."""
        return time.monotonic() - self._heard_at if self.process is not None else 0.0

    def probe(self, name: str) -> list[str]:
        """What a probe says of it, line by line; nothing if all is well."""
        if self.done:
            return []
        text = self._probes.get(name, STARTING if name == "ready" else "")
        longest = {"live": STUCK_SECONDS, "ready": LATE_SECONDS}.get(name)
        if longest is not None and self.silent > longest and text != STARTING:
            text = f"it has told nothing for {self.silent:.0f} s"
        return [f"supervisor {self.number}: {line}" for line in text.splitlines()]


class Overseer:
    """Runs several supervisors as one worker: `run` returns when all have ended."""

    def __init__(self, arguments: Sequence[str], name: str, total: int) -> None:
        """Nothing is started yet.

        * `arguments`: the command line of the worker, which each supervisor gets, too.
        * `name`: the worker's; "": made of host and process id. `total`: 0 lets the first
          supervisor decide.
        """
        own = mask(name) or f"{socket.gethostname()}-{os.getpid()}-{chance.token(3)}"
        self._name = own
        self._arguments = arguments
        self._total = total
        self._first = OverseenSupervisor(own, 1)
        self._all = [self._first]
        self._signals: list[int] = []
        self._stopping = False
        self._code = 0

    def run(self) -> int:
        """Start the supervisors, and return the exit code of the command when they have ended."""
        while not all(each.done for each in self._all):
            while self._signals:
                self._pass_on(self._signals.pop(0))
            for each in self._all:
                if (code := each.ended()) is not None:
                    self._note_end(each, code)
                elif each.process is None and not each.done:
                    self._start(each)
            if self._first.up and len(self._all) == 1 and not self._stopping:
                self._total = self._first.wanted
                more = range(2, self._total + 1)
                self._all = [self._first, *(OverseenSupervisor(self._name, n) for n in more)]
            self._listen()
        return self._code

    def stop(self, signum: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        """Pass the signal on to all. A signal handler."""
        self._signals.append(signum)

    # -- what probes and metrics say; any thread may call ------------------------------------

    def probe(self, name: str) -> str:
        """What a probe says of all supervisors: nothing if all is well."""
        return "\n".join(line for each in self._all for line in each.probe(name))

    def metrics(self) -> dict[int, str]:
        """The metrics of each supervisor by its number; "" if it does not answer in time."""
        asked = [each for each in self._all if each.process is not None]
        until = time.monotonic() + ANSWER_SECONDS
        for each in asked:
            while not each.metrics.empty():  # too late for the last question
                each.metrics.get()
            if each.silent < LATE_SECONDS:
                each.send({"ask": "metrics"})
        found = dict.fromkeys((each.number for each in self._all if not each.done), "")
        for each in asked:
            with suppress(Empty):
                found[each.number] = each.metrics.get(timeout=max(0.0, until - time.monotonic()))
        return found

    # -- one turn ----------------------------------------------------------------------------

    def _pass_on(self, number: int) -> None:
        self._stopping = True
        for each in self._all:
            each.send({"stop": number})
            each.done = each.done or each.process is None

    def _start(self, each: OverseenSupervisor) -> None:
        if time.monotonic() < each.due_at:
            return
        try:
            each.start(self._arguments, self._total)
        except OSError as error:  # no more processes, or descriptors
            logger.error("%s cannot start, retry in %g s: %s", each.name, each.put_off(), error)

    def _note_end(self, each: OverseenSupervisor, code: int) -> None:
        if code == 0 or self._stopping:
            each.done = True
            self._code = self._code or code
        elif code in SETTINGS or not self._first.up:
            each.done = True
            self._code = code
            self._pass_on(signal.SIGTERM)
        else:
            logger.warning(
                "%s has died (%s); another one starts in %g s, and what it held is delivered again "
                "when the leases end",
                each.name,
                f"exit code {code}" if code > 0 else signal.Signals(-code).name,
                each.put_off(),
            )
        if self._code < 0:
            self._code = SIGNAL_EXIT - self._code

    def _listen(self) -> None:
        """Wait for a moment, or until supervisors tell something."""
        lines = {
            each.line.end: each
            for each in self._all
            if each.line is not None and not each.line.ended
        }
        if not lines:  # Windows cannot wait for nothing
            time.sleep(LOOK_SECONDS)
            return
        for end in select.select(list(lines), [], [], LOOK_SECONDS)[0]:
            lines[end].listen()
