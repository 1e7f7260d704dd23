"""Exact crash steps for tests: stop or kill the worker at a named step of a delivery's life.

``AZTASK_FAILPOINT=STEP:SIGNAL[:N]`` sends SIGNAL (KILL, STOP, TERM) to the worker when STEP is
reached for the N-th time (1 by default). Steps, in order: ``received``, ``claimed``, ``sent``,
``stopping`` (a run that was cancelled has been told to stop), ``ran`` (in the pool process, after
the task's side effects), ``unindexed`` (in Azure Tables the outcome is stored, its row in the index
is not), ``recorded``, ``noted``
(where a dead letter is noted in an index before it is stored), ``stored`` (where a dead letter is
stored before its original is deleted), ``cloned`` (where a clone is sent
before its original is completed), ``pointed`` (where a pointer is sent before its
message is deferred), ``fetched`` (a pointer was received, and the deferred message for it),
``parted`` (that message is settled, and its pointer is not), ``settled``. And of whoever
replays dead letters: ``replayed`` (the new messages are sent, their dead letters still there).
Of a compaction: ``compact-written``, ``compact-published``, ``compact-removed`` (each source).
Unset, a step costs one comparison.
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
    "replayed",
    "compact-written",
    "compact-published",
    "compact-removed",
)
VARIABLE = "AZTASK_FAILPOINT"


class Failpoint:
    """One armed step."""

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
        """Count down, and strike `process` at zero."""
        self._left -= 1
        if self._left == 0:
            os.kill(process, self._signal)


_armed = Failpoint(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None


def hit(step: str, times: int = 1) -> None:
    """Say that `step` was reached `times` times, in the worker itself."""
    if _armed is not None and _armed.step == step:
        for _ in range(times):
            _armed.reached(os.getpid())


def hit_in_pool(step: str, worker: int) -> None:
    """Say that `step` was reached in a pool process: the worker, that process, is struck."""
    if _armed is not None and _armed.step == step:
        _armed.reached(worker)
