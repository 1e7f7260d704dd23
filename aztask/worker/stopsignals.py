"""The signals that end a worker, and what they do in each of its processes.

| signal | the worker |
|---|---|
| SIGTERM, SIGINT, SIGHUP | drains; a second one gives everything back now |
| SIGQUIT | gives everything back now |

Rules
1. A terminal and a service manager send these signals to every process of the worker. Fork server
   and pool processes do nothing: the worker alone decides when its pool ends.
2. A signal that was ignored at the start stays ignored: `nohup` does that with SIGHUP, and a shell
   with SIGINT and SIGQUIT for a job in the background.
3. Programs that tasks start find the signals as usual (a handler is not inherited by a new program,
   and processes that tasks fork restore the defaults).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final, NoReturn, Protocol

from aztask.support.forks import in_forked_child

logger = logging.getLogger("aztask.worker")

DRAIN: Final = (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGTERM))
NOW: Final = (getattr(signal, "SIGQUIT", signal.SIGTERM),)
"""Each stops the worker at once; on Windows, which has no SIGHUP and no SIGQUIT, none does."""

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


class Stoppable(Protocol):
    """A worker, or anything else that drains."""

    def stop(self, signum: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        """Drain and end; the second call gives everything back at once."""


def handle(handler: Handler, *numbers: int) -> None:
    """Have these signals call `handler`, except those that are ignored (rule 2)."""
    for number in dict.fromkeys(numbers):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def end_while_starting() -> None:
    """Let the signals end the process before the worker receives anything.

    Process 1 of a container would ignore them without a handler. Nothing is held yet, so nothing is
    given back; the fork server ends with this process.
    """
    handle(end_now, *DRAIN, *NOW)


def end(worker: Stoppable) -> None:
    """Have the signals drain and end the worker from now on."""
    handle(worker.stop, *DRAIN, *NOW)


def ended() -> None:
    """Ignore the signals from now on: the worker has given everything back and only exits.

    While the interpreter ends, Python restores the defaults of signals that have a handler, so a
    second SIGTERM at that moment would turn exit code 0 into a death by a signal.
    """
    handle(signal.SIG_IGN, *DRAIN, *NOW)


def leave_ending_to_worker() -> None:
    """Have the signals do nothing in this process, and as usual in the processes that it forks."""
    handle(_nothing, *DRAIN, *NOW)
    in_forked_child(_end_as_usual)


@contextmanager
def held_back() -> Iterator[None]:
    """Hold the signals back inside the ``with`` block, also in programs that are started there.

    Such a program calls `let_through` when it has handlers: none of them ends it before.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*DRAIN, *NOW})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_through() -> None:
    """End what `held_back` began in the process that has started this one."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*DRAIN, *NOW})


def _nothing(signum: int, frame: FrameType | None) -> None:
    """A handler, because an ignored signal would stay ignored in programs that tasks start."""


def _end_as_usual() -> None:
    handle(signal.SIG_DFL, *DRAIN, *NOW)
    handle(signal.default_int_handler, signal.SIGINT)


def end_now(signum: int, frame: FrameType | None = None, *, told: bool = True) -> NoReturn:
    """End this process, which holds nothing yet. told: say so in the log."""
    if told:
        logger.info("%s: stopped before it had received anything", signal.Signals(signum).name)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)
