"""Celery workers for the benchmarks: started, awaited, frozen, killed and ended in groups."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
START_SECONDS = 90.0


@dataclass(frozen=True)
class Way:
    """A way to run Celery.

    * `options`: those of ``celery worker``.
    * `workers`: how many processes start with these options.
    * `slots`: how many tasks run at the same time in all of them.
    """

    name: str
    options: Sequence[str]
    workers: int
    slots: int


WAYS = (
    Way("prefork -c 8", ("-P", "prefork", "-c", "8"), 1, 8),
    Way("one -P solo", ("-P", "solo"), 1, 1),
    Way("eight -P solo", ("-P", "solo"), 8, 8),
)


class Workers:
    """Celery workers of one module in `peers/`, each in a session of its own."""

    def __init__(
        self,
        module: str,
        way: Way,
        folder: Path,
        environment: Mapping[str, str],
        tree: str = str(HERE.parent),
    ) -> None:
        """Workers of `module` that are not started yet.

        * `folder`: for the file of marks and the logs.
        * `environment`: names the broker.
        * `tree`: where Python finds aztask, a path or several.
        """
        self.folder = folder
        self._module = module
        self._way = way
        self._marks = folder / "marks"
        self._marks.unlink(missing_ok=True)
        self.environment = {
            **os.environ,
            **environment,
            "BENCH_MARKS": str(self._marks),
            "PYTHONPATH": os.pathsep.join([str(HERE / "peers"), tree]),
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        self._started = 0

    def run(self, expression: str) -> None:
        """Run `expression` with the module, as `m`, in a process of its own."""
        subprocess.run(
            [sys.executable, "-c", f"import {self._module} as m; {expression}"],
            env=self.environment,
            check=True,
            timeout=120,
        )

    def start(self) -> None:
        """Start all workers, and wait until they consume."""
        for _ in range(self._way.workers):
            self.start_one()
        for process in self.processes:
            self.await_ready(process)

    def start_one(self) -> None:
        """Start one more worker."""
        self._started += 1
        command = [sys.executable, "-m", "celery", "-A", self._module, "worker", "-l", "ERROR"]
        own = ["--without-mingle", "--without-gossip", "-n", f"bench{self._started}@%h"]
        with (self.folder / "workers.log").open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    [*command, *self._way.options, *own],
                    cwd=self.folder,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def await_ready(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until this worker consumes."""
        self.await_marks(f"ready-{process.pid}", 1, START_SECONDS)

    def marks(self, prefix: str) -> dict[str, float]:
        """{key: the time of its first mark}, for keys that begin with `prefix`."""
        found: dict[str, float] = {}
        if self._marks.exists():
            for line in self._marks.read_text().splitlines():
                key, _, at = line.partition(" ")
                if key.startswith(prefix):
                    found.setdefault(key, float(at))
        return found

    def await_marks(self, prefix: str, count: int, seconds: float) -> dict[str, float]:
        """Wait for so many different marks, and return them. Raises TimeoutError."""
        give_up_at = time.monotonic() + seconds
        while len(found := self.marks(prefix)) < count:
            if time.monotonic() > give_up_at:
                log = (self.folder / "workers.log").read_text(errors="replace")[-2000:]
                raise TimeoutError(f"{len(found)} of {count} marks {prefix}\n{log}")
            time.sleep(0.05)
        return found

    @contextmanager
    def frozen(self, file: Path | None = None) -> Iterator[None]:
        """Stop all workers with SIGSTOP for the block.

        file: the queue file, in which none of them may then be within a transaction.
        """
        self._signal(signal.SIGSTOP)
        while file is not None and is_locked(file):
            self._signal(signal.SIGCONT)
            time.sleep(0.02)
            self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            os.killpg(process.pid, number)

    def kill_one(self, draw: random.Random) -> None:
        """Kill one worker with all its processes, while it works; another one takes its place."""
        process = self.processes.pop(draw.randrange(len(self.processes)))
        self.await_ready(process)
        time.sleep(draw.uniform(0.3, 0.9))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.start_one()

    def close(self) -> None:
        """Kill all workers."""
        for process in self.processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.processes.clear()


def is_locked(file: Path) -> bool:
    """Whether a process is within a transaction that writes to this SQLite file."""
    with closing(sqlite3.connect(file, timeout=0.1, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        connection.execute("ROLLBACK")
        return False
