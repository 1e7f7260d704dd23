"""Crash at an exact step, for tests: stop or kill the worker at a named step of a delivery's life.

``AZTASK_FAILPOINT=STEP:SIGNAL[:N]`` sends SIGNAL (KILL, STOP, TERM) to the worker when it reaches
STEP for the N-th time (1 by default). A step costs one comparison if the variable is not set.

The steps of a worker, in order:

* ``received``
* ``checked``: its lease was held a moment ago, and its start row is not written
* ``once-noted``: an at-most-once run is noted, its message not removed yet
* ``claimed``
* ``sent``
* ``stopping``: a cancelled run was asked to stop
* ``ran``: in the pool process, after the task's side effects
* ``unindexed``: in Azure Tables the outcome is stored, its row in the index is not
* ``recorded``
* ``noted``: a dead letter is in the index of dead letters, but not stored yet
* ``stored``: a dead letter is stored, its original not deleted yet
* ``cloned``: a clone is sent, its original not completed yet
* ``pointed``: a pointer is sent, its message not deferred yet
* ``fetched``: a pointer and its deferred message were received
* ``parted``: that message is settled, its pointer is not
* ``settled``

The steps of a pool process's start; the last three are in the pool process, and its worker gets the
signal. Of the portable shell:

* ``pool-watcher``: the watching process runs, and knows nothing yet
* ``pool-folder``: the worker's private folder is made
* ``pool-link``: the ends of a link are made, its process is not started
* ``pool-started``: the process is started, and the watching process does not know it
* ``pool-watched``: the watching process knows it, its setup is not sent
* ``pool-told``: its setup is sent
* ``pool-set-up``: it has read its setup
* ``pool-imported``: it has imported the app
* ``pool-ready``: it has told the worker that it is ready

Of the fork server, beside ``pool-link`` and the last three:

* ``pool-server``: the server runs, and has forked nothing
* ``pool-asked``: it is asked for a process

The steps of a payload (a large argument or result that is stored apart):

* ``uploaded``: in the sender, it is stored, and its message is not sent
* ``loaded``: in the pool process, it was fetched, and the task has not started
* ``result-stored``: in the pool process, the result is stored, and the outcome is not recorded
* ``removed``: after ``settled``, the payload is removed

The steps of a task's own recorded step, in the pool process: ``step-ran`` (its function has
returned, nothing is recorded), ``step-recorded`` (it is recorded, the task has not gone on) and
``renewed`` (the arguments with which the task continues are recorded, its run has not ended).

The steps of a task that waits: ``timed`` (in the worker, where a timer has a number: it is sent,
the row of the run is not written), ``parked`` (the row is written, its message is not settled),
``signalled`` (in the signaller, the signal's row is written, the task is not woken) and ``woken``
(in the process that woke the task, its wake-up is sent).

The steps of a workflow:

* ``graph-parts``: plan and messages are stored, the root is not
* ``graph-root``: the root is stored, nothing is sent
* ``graph-sent``: the first nodes are sent, the root does not say so
* ``bit-set``: bits are set, what follows is not sent
* ``row-filled``: the values of a full row are stored, the bit above is not set
* ``followed``: nodes that follow are sent, the message whose end began it is not settled
* ``ended``: the root says how the workflow ended, the index does not

The steps of a schedule: ``occurrence-made`` (an occurrence is stored, its task is not sent) and
``occurrence-sent`` (its task is sent, the occurrence is not closed).

The steps of a unique task's send: ``unique-taken`` (the key is taken, the message is not sent) and
``unique-sent`` (it is sent, the holder does not say so). Of a debounced task: ``unique-closing``
(its quiet time has ended, it is not sent).

The step of a clock probe of Service Bus, in any process that sends: ``probed`` (it is scheduled,
not cancelled yet).

The steps of a move to another number of shards: ``reshard-created`` (the new shards exist, nothing
is announced), ``reshard-announced``, and ``reshard-empty`` (in the worker or the command: the
former shards are empty, the layout does not say so).

The step of a replay of dead letters: ``replayed`` (the new messages are sent, their dead letters
not deleted yet). The steps of a move to another address: ``move-rows`` (its rows have the new
owner), ``move-planned`` (start rows are given back), ``move-sent`` (messages are sent, and still at
the old address) and ``move-removed``. The steps of a compaction: ``compact-written``,
``compact-published``, ``compact-removed`` (after each source). Of tables of events:
``table-claimed`` (one of them is followed from now on, nothing was added), ``table-written`` (files
are written, the table does not have them), ``table-odd`` (it has their odd rows) and
``table-committed``.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from aztask.errors import ConfigurationError

STEPS = (
    "pool-server",
    "pool-watcher",
    "pool-folder",
    "pool-link",
    "pool-asked",
    "pool-started",
    "pool-watched",
    "pool-told",
    "pool-set-up",
    "pool-imported",
    "pool-ready",
    "received",
    "checked",
    "once-noted",
    "claimed",
    "sent",
    "stopping",
    "ran",
    "unindexed",
    "recorded",
    "noted",
    "stored",
    "cloned",
    "pointed",
    "fetched",
    "parted",
    "settled",
    "occurrence-made",
    "unique-taken",
    "unique-sent",
    "unique-closing",
    "occurrence-sent",
    "uploaded",
    "loaded",
    "result-stored",
    "step-ran",
    "step-recorded",
    "renewed",
    "timed",
    "parked",
    "signalled",
    "woken",
    "copied",
    "removed",
    "graph-parts",
    "graph-root",
    "graph-sent",
    "bit-set",
    "row-filled",
    "followed",
    "ended",
    "probed",
    "replayed",
    "reshard-created",
    "reshard-announced",
    "reshard-empty",
    "move-rows",
    "move-planned",
    "move-sent",
    "move-removed",
    "compact-written",
    "compact-published",
    "compact-removed",
    "table-claimed",
    "table-written",
    "table-odd",
    "table-committed",
)
VARIABLE = "AZTASK_FAILPOINT"


class StepWatch(Protocol):
    """Gets every step that is reached."""

    def reached(self, step: str, times: int, process: int) -> None:
        """The worker, the process of this id, has reached `step` so many times more."""


class Failpoint:
    """A step that will stop or kill the worker."""

    def __init__(self, text: str) -> None:
        step, _, rest = text.partition(":")
        name, _, nth = rest.partition(":")
        number = getattr(signal, f"SIG{name}", None)
        if step not in STEPS or number is None or not (nth or "1").isdigit():
            raise ConfigurationError(
                f"{VARIABLE}={text!r} is not STEP:SIGNAL[:N]; steps are {', '.join(STEPS)}"
            )
        self.step = step
        self._signal = number
        self._left = int(nth or 1)

    def reached(self, step: str, times: int, process: int) -> None:
        """Count down at this failpoint's step, and signal `process` at zero."""
        if step != self.step:
            return
        for _ in range(times):
            self._left -= 1
            if not self._left:
                self._strike(process)

    def _strike(self, process: int) -> None:
        if process == os.getpid() and self._signal == signal.SIGSTOP:
            # To this thread: if another one took the signal, this one would run on until it has.
            signal.pthread_kill(threading.get_ident(), self._signal)
        else:
            os.kill(process, self._signal)


_watch: list[StepWatch | None] = [
    Failpoint(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None,
]


@contextmanager
def replaced(watch: StepWatch) -> Iterator[None]:
    """Report every step to `watch` inside the ``with`` block: for simulations."""
    _watch.append(watch)
    try:
        yield
    finally:
        _watch.remove(watch)


def hit(step: str, times: int = 1) -> None:
    """Report, in the worker itself, that `step` was reached `times` times."""
    if (watch := _watch[-1]) is not None:
        watch.reached(step, times, os.getpid())


def hit_in_pool(step: str, worker: int) -> None:
    """Report, in a pool process, that `step` was reached: its worker, `worker`, gets the signal."""
    if (watch := _watch[-1]) is not None:
        watch.reached(step, 1, worker)
