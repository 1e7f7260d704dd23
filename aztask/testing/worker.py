"""A real worker in the background, on queues of its own, for tests."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from aztask.app import App
from aztask.errors import AztaskError
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker
from aztask.stores.connections import TEST_BROKER
from aztask.stores.records.local.store import LocalResults

START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 10.0
READY: Final = "INFO aztask.worker: app "
"""The second line that a worker logs, once it has checked its queues."""

MOST_LEFT: Final = 100_000
OPTIONS: Final = ("--pool", "threads", "-c", "4")


class BackgroundWorker:
    """A worker process and its private queues, from `background_worker` or `aztask_worker`.

    * `app`: your app, which sends to the private queues.
    * `process`: the worker's process.
    """

    def __init__(self, app: App, database: Database, log: Path) -> None:
        """Called by `background_worker`. log: the file that the worker writes."""
        self.app = app
        self._broker = LocalBroker(database)
        self._results = LocalResults(database)
        self._log = log
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """What the worker has logged."""
        return self._log.read_text(errors="replace")

    def wait_until_idle(self, timeout: float = 10.0) -> None:
        """Wait until no message is queued or running. Delayed messages do not count.

        Raises AssertionError after `timeout` seconds, or if the worker has ended.
        """
        give_up_at = time.monotonic() + timeout
        while busy := self._busy():
            self._check()
            if time.monotonic() >= give_up_at:
                raise AssertionError(f"after {timeout:g} s the worker still has work: {busy}")
            time.sleep(0.01)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """In the block, your app sends to the private queues, whatever broker it names."""
        restore = self.app.redirect(self._broker, self._results)
        try:
            yield
        finally:
            restore()

    def clear(self, timeout: float = 10.0) -> None:
        """Delete all messages and results, so that no test sees another's.

        Raises AssertionError if a task still runs after `timeout` seconds.
        """
        engine = self._broker.engine
        for queue in self._broker.queues():
            engine.purge(queue)
        self.wait_until_idle(timeout)
        for queue in self._broker.queues():
            engine.purge(queue)  # what running tasks have sent
            engine.purge(queue, dead_letter=True)
        self._results.purge(time.time() + 1.0)
        for record in self._results.recent(limit=MOST_LEFT):
            self._results.forget(record.key.task_id)

    def _busy(self) -> str:
        stats = [self._broker.stats(queue) for queue in self._broker.queues()]
        return ", ".join(
            f"{each.queue}: {each.active} queued, {each.leased} running"
            for each in stats
            if each.active or each.leased
        )

    def _start(self, spec: str, options: Sequence[str], environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "aztask", "-A", spec, "worker", *options]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(  # noqa: S603  # the tests' own app, without a shell
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        give_up_at = time.monotonic() + START_SECONDS
        while READY not in self.log:
            self._check()
            if time.monotonic() >= give_up_at:
                raise AztaskError(f"the worker is not ready after {START_SECONDS:g} s: {self.log}")
            time.sleep(0.01)

    def _check(self) -> None:
        if self.process is not None and self.process.poll() is not None:
            raise AssertionError(f"the worker ended with {self.process.returncode}:\n{self.log}")

    def _stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def background_worker(
    app: App, spec: str, folder: Path, *, options: Sequence[str] | str = OPTIONS
) -> Iterator[BackgroundWorker]:
    """Run a worker for the length of a ``with`` block, on queues in a file of `folder`.

    Your app sends to these queues in the block, whatever broker it names, and so do its tasks.

    * `spec`: where the worker finds the app, as ``module:app``.
    * `options`: of ``aztask worker``, as a list or one text; by default ``--pool threads -c 4``.

    Raises AssertionError, with the worker's log, if it cannot start.
    """
    file = folder / "queues.db"
    database = Database(str(file))
    worker = BackgroundWorker(app, database, folder / "worker.log")
    environment = {**os.environ, TEST_BROKER: f"local://{file}"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    given = shlex.split(options) if isinstance(options, str) else options
    try:
        worker._start(spec, given, environment)
        with worker.in_use():
            yield worker
    finally:
        worker._stop()
        database.close()
