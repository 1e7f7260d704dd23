"""The demo's worker: a real ``aztask worker`` in a child process, which ends with the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import aztask
from aztask.cli.demo_work import APP, QUEUE
from aztask.cli.failures import CommandFailed

MOST_CONCURRENCY = 16
PATIENCE_SECONDS = 5.0


class DemoWorker:
    """A context manager that leaves no process behind, whatever happens in the block.

    The worker has a session of its own, so that Ctrl-C reaches only the demo, which then ends the
    worker. If the demo itself is killed, the worker ends when the queue is empty (--burst).
    """

    def __init__(self, folder: Path, address: str) -> None:
        self._folder = folder
        self._address = address
        self._log = folder / "worker.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the worker: SIGTERM, SIGTERM again, then SIGKILL."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            process.send_signal(number)
            try:
                process.wait(PATIENCE_SECONDS)
                return
            except subprocess.TimeoutExpired:
                continue
        process.wait()

    def start(self) -> None:
        """Start the worker on the demo's queue."""
        slots = max(2, min(MOST_CONCURRENCY, os.cpu_count() or 1))
        command = [sys.executable, "-m", "aztask", "worker", "-A", APP, "-Q", QUEUE]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  # our own command, without a shell
                [*command, "--burst", "-c", str(slots), "--name", "demo"],
                cwd=self._folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def runs(self) -> bool:
        """Whether it still runs. Raises CommandFailed, with its last log line, if it failed."""
        code = self._process.poll() if self._process is not None else None
        if code:
            lines = self._log.read_text("utf-8", "replace").splitlines() or ["its log is empty"]
            raise CommandFailed(f"the demo's worker ended with exit code {code}: {lines[-1]}")
        return code is None

    def _environment(self) -> dict[str, str]:
        """This process's environment, without the settings of the user's own apps."""
        kept = {name: value for name, value in os.environ.items() if not _is_setting(name)}
        home = Path(aztask.__file__).parents[1]
        path = [] if home.name.endswith("-packages") else [str(home)]
        if before := kept.get("PYTHONPATH"):
            path.append(before)
        return {
            **kept,
            **({"PYTHONPATH": os.pathsep.join(path)} if path else {}),
            "AZTASK_BROKER": self._address,
            "AZTASK_RESULTS": self._address,
            "AZTASK_EVENTS": str(self._folder / "events"),
        }


def _is_setting(name: str) -> bool:
    return name.startswith("AZTASK_") and name != "AZTASK_DEBUG"
