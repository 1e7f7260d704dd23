"""Crash at an exact step, for tests: stop or kill the worker at a named step of a delivery's life.

``AZTASK_FAILPOINT=STEP:SIGNAL[:N]`` sends SIGNAL (KILL, STOP, TERM) to the worker when it reaches
STEP for the N-th time (1 by default). A step costs one comparison if the variable is not set.

The steps of a worker, in order:

* ``received``
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

The steps of a payload (a large argument or result that is stored apart):

* ``uploaded``: in the sender, it is stored, and its message is not sent
* ``loaded``: in the pool process, it was fetched, and the task has not started
* ``result-stored``: in the pool process, the result is stored, and the outcome is not recorded
* ``removed``: after ``settled``, the payload is removed

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

The step of a replay of dead letters: ``replayed`` (the new messages are sent, their dead letters
not deleted yet). The steps of a compaction: ``compact-written``, ``compact-published``,
``compact-removed`` (after each source).
"""

from __future__ import annotations

import os
import signal

from aztask.errors import ConfigurationError

STEPS = (
    "received",
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
    "copied",
    "removed",
    "graph-parts",
    "graph-root",
    "graph-sent",
    "bit-set",
    "row-filled",
    "followed",
    "ended",
    "replayed",
    "compact-written",
    "compact-published",
    "compact-removed",
)
VARIABLE = "AZTASK_FAILPOINT"


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

    def reached(self, process: int) -> None:
        """Count down, and signal `process` at zero."""
        self._left -= 1
        if self._left == 0:
            os.kill(process, self._signal)


_armed = Failpoint(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None


def hit(step: str, times: int = 1) -> None:
    """Report, in the worker itself, that `step` was reached `times` times."""
    if _armed is not None and _armed.step == step:
        for _ in range(times):
            _armed.reached(os.getpid())


def hit_in_pool(step: str, worker: int) -> None:
    """Report, in a pool process, that `step` was reached: its worker, `worker`, gets the signal."""
    if _armed is not None and _armed.step == step:
        _armed.reached(worker)
