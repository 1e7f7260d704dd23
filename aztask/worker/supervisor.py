"""The supervisor: the life of a worker, from its start to the last message that it gives back.

Its core (`aztask.worker.core`) does the work, one turn after the other. This decides when it ends:

    working --signal, burst, max_tasks, refused queue--> draining: running tasks finish
    draining --nothing is held--> closing: lifespans and process hooks close
    draining --shutdown_timeout--> the tasks are told to stop, then killed and given back
    a second signal gives everything back at once
"""

from __future__ import annotations

import logging
import math
import signal
from types import FrameType

from aztask.app import App
from aztask.worker.core import Core
from aztask.worker.options import WorkerOptions
from aztask.worker.ports import Shell
from aztask.worker.shell import later_shell
from aztask.worker.stopsignals import NOW

logger = logging.getLogger(__name__)

AT_ONCE = 2
"""Signals after which everything is given back at once."""

KILL_SECONDS = 2.0
"""For the ends of killed processes to arrive, and their messages to be released."""


class Supervisor:
    """One worker: `run` returns when the worker has stopped."""

    def __init__(
        self, app: App, app_spec: str, options: WorkerOptions, shell: Shell | None = None
    ) -> None:
        """shell: what makes threads and processes; by default the real one."""
        self._shell = shell or later_shell()
        self.core = Core(app, app_spec, options, self._shell)
        self.name, self.journal = self.core.runtime.name, self.core.runtime.journal
        self._mailbox = self.core.runtime.mailbox
        self._options = options
        self._clock = self._shell.clock
        self._signals = 0
        self._draining_until: float | None = None
        self._killing_until: float | None = None
        self._closing_until: float | None = None

    def run(self) -> None:
        """Work until a signal, `stop`, `burst`, `max_tasks` or a refused queue ends the worker.

        An error of the loop ends it, too.
        """
        self.core.begin()
        try:
            while self.turn():
                pass
        except BaseException as error:
            if isinstance(error, Exception):
                logger.critical("the worker ends, its loop has failed: %s", error, exc_info=True)
            self.close(failed=True)
            raise
        self.close()
        self.core.intakes.raise_refusal()

    def stop(self, signum: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        """Drain and end; SIGQUIT, or the second call, gives everything back at once.

        A signal handler.
        """
        self._signals += AT_ONCE if signum in NOW else 1
        self._mailbox.wake()

    def turn(self) -> bool:
        """One turn of the loop; False once there is nothing left to do but `close`."""
        if self._is_over():
            return False
        self.core.turn()
        return True

    # -- the end -----------------------------------------------------------------------------

    def _is_over(self) -> bool:
        if self._draining_until is None:
            if self._signals or self._enough():
                self._drain(self._clock.monotonic())
            return False
        return self._has_given_back(self._draining_until) and self._has_closed()

    def _enough(self) -> bool:
        options, core = self._options, self.core
        most = options.max_tasks is not None and core.deliveries.finished >= options.max_tasks
        return most or (options.burst and core.drained) or core.intakes.refusal is not None

    def _drain(self, now: float) -> None:
        """Stop receiving, and give back what has not started; running tasks go on.

        Tasks see ``context.stopping`` from now on; a process without one closes its lifespans now.
        """
        self._draining_until = now + self._options.shutdown_timeout
        core = self.core
        core.draining = True
        core.intakes.stop()
        core.end_holds(math.inf)
        core.giving_back.waiting()
        for process in core.pool.processes:
            process.tell(["stopping", 0])
        core.pool.retire()
        if running := len(core.pool.running()):
            logger.info(
                "stopping: waiting up to %g s for %d running task%s; press Ctrl-C (or send "
                "SIGTERM) again to return %s now",
                self._options.shutdown_timeout,
                running,
                *(("", "it") if running == 1 else ("s", "them")),
            )

    def _has_given_back(self, until: float) -> bool:
        """Whether nothing is held; what still runs after `until` is stopped, killed, given back."""
        core = self.core
        if not core.deliveries:
            return True
        now = self._clock.monotonic()
        if self._signals < AT_ONCE and now < until:
            return False
        if self._signals < AT_ONCE and self._killing_until is None:
            last = core.time_limits.end(self._options.shutdown_grace)
            self._killing_until = last + (KILL_SECONDS if core.pool.running() else 0.0)
        if self._signals < AT_ONCE and now < (self._killing_until or 0.0):
            return False
        core.giving_back.running()
        return True

    def _has_closed(self) -> bool:
        """Whether the lifespans of the pool's processes are closed.

        They have `shutdown_grace`, and a second signal cuts that. Whatever is cut is logged.
        """
        now = self._clock.monotonic()
        if self._closing_until is None:
            self.core.pool.retire()
            self._closing_until = now + self._options.shutdown_grace
        closing = self.core.pool.closing()
        if closing and self._signals < AT_ONCE and now < self._closing_until:
            return False
        why = (
            "the worker was told to end at once"
            if self._signals >= AT_ONCE
            else f"raise --shutdown-grace ({self._options.shutdown_grace:g} s) if they need longer"
        )
        for process in closing:
            logger.warning(
                "%s is killed while its lifespans or process hooks close; %s", process, why
            )
            process.kill("its lifespans or process hooks did not close in time")
        return True

    def close(self, *, failed: bool = False) -> None:
        """End all parts. What is held is given back; after an error of the loop, starts count.

        After such an error tasks may still be running. The pool ends first, so that no task is
        given back while it runs.
        """
        core, runtime = self.core, self.core.runtime
        core.intakes.stop()
        core.pool.retire()
        core.intakes.join(5.0)
        self._mailbox.run()
        core.pool.close()
        left = list(core.deliveries)
        if failed:
            core.giving_back.begun(left)
        else:
            core.giving_back.these(left)
        for stage in (core.limits, core.claims, core.finishes):
            stage.stop()
        runtime.keeper.stop()
        core.requests.stop()
        core.chores.tell(core.heartbeat.record(stopped=True))
        for watch in (core.chores, core.control, core.breaking, core.leases):
            watch.stop()
        core.intakes.close()
        core.pipeline.close()
        self.journal.close()
        self._mailbox.close()
