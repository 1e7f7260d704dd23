"""Real workers as child processes, and what they left in the ledger."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from waiting import PATIENCE, wait_until

from aztask import App

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@dataclass(frozen=True)
class Line:
    """One line of the ledger."""

    event: str
    key: str
    pid: int
    at: float


@dataclass
class Site:
    """A folder with a broker, a result store, a ledger and workers."""

    folder: Path
    broker: str = ""
    results: str = ""
    joint: bool = True
    workers: list[Worker] = field(default_factory=list)
    extra: dict[str, str] = field(default_factory=dict)
    module: str = "ledger_app"
    _app: App | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.broker = self.broker or f"local://{self.folder}/queues.db"
        other = self.folder / ("queues.db" if self.joint else "results.db")
        self.results = self.results or f"local://{other}"
        self.ledger = self.folder / "ledger"
        self.events = self.folder / "events"

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])
        return {
            **os.environ,
            "LEDGER": str(self.ledger),
            "LEDGER_BROKER": self.broker,
            "LEDGER_RESULTS": self.results,
            "AZTASK_EVENTS": str(self.events),
            "PYTHONPATH": path.rstrip(os.pathsep),
            **self.extra,
        }

    def app(self) -> App:
        """An app of this process on the same broker and results; closed with the site."""
        if self._app is None:
            owner = self.extra.get("AZTASK_OWNER")
            self._app = App("ledger", broker=self.broker, results=self.results, owner=owner)
        return self._app

    def worker(self, *arguments: str, **environment: str) -> Worker:
        """Start a worker."""
        worker = Worker(self, arguments, environment)
        self.workers.append(worker)
        return worker

    def lines(self, event: str | None = None, key: str | None = None) -> list[Line]:
        """The ledger's lines of this event and key."""
        if not self.ledger.exists():
            return []
        found = []
        for text in self.ledger.read_text().splitlines():
            name, its_key, pid, at = text.split(" ")
            if event in (None, name) and key in (None, its_key):
                found.append(Line(name, its_key, int(pid), float(at)))
        return found

    def counts(self, event: str) -> dict[str, int]:
        """{key: how often `event` stands in the ledger}."""
        counts: dict[str, int] = defaultdict(int)
        for line in self.lines(event):
            counts[line.key] += 1
        return counts

    def stop_workers(self) -> None:
        """Stop those that run, as a deploy does, and assert that they end well."""
        for worker in self.workers:
            if worker.process.poll() is None:
                assert worker.stop() == 0, worker.log

    def close(self) -> None:
        """Kill what still runs, and assert that no pool process outlives its worker."""
        if self._app is not None:
            self._app.close()
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.process.wait()
        wait_until(lambda: not living_pool_processes(self.folder), 5, "pool processes end")


class Worker:
    """A worker process."""

    def __init__(self, site: Site, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        self.site = site
        self.log_path = site.folder / f"worker-{len(site.workers)}.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "aztask", "worker", "-A", site.module, *arguments],
                env={**site.environment, **environment},
                cwd=site.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def freeze(self) -> None:
        """SIGSTOP, at a moment when it holds no lock of the files: it would keep all others out."""
        wait_until(self._frozen_without_a_lock, 30, "it is frozen and others can write")

    def _frozen_without_a_lock(self) -> bool:
        self.signal(signal.SIGSTOP)
        wait_until(self.stopped, 5, "it is frozen")
        if not holds_a_write_lock(self.site):
            return True
        self.signal(signal.SIGCONT)
        return False

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()

    def wait(self, seconds: float = 30.0) -> int:
        try:
            return self.process.wait(seconds * PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker did not end:\n{self.log}") from None

    def stop(self, seconds: float = 30.0) -> int:
        """SIGTERM, once it has said that it is up, and its exit code."""
        wait_until(lambda: self.log or self.process.poll() is not None, 15, "the worker is up")
        self.signal(signal.SIGTERM)
        return self.wait(seconds)

    def stopped(self) -> bool:
        """Whether the kernel says that it is stopped (SIGSTOP)."""
        status = Path(f"/proc/{self.process.pid}/stat").read_text()
        return status.rsplit(")", 1)[1].split()[0] == "T"


def holds_a_write_lock(site: Site) -> bool:
    """Whether somebody is in the middle of a transaction on a file of the site."""
    for address in {site.broker, site.results}:
        if not address.startswith("local://"):
            continue
        connection = sqlite3.connect(address.removeprefix("local://"), timeout=0.3)
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        finally:
            connection.close()
    return False


def pool_processes(folder: Path, name: str = "aztask-pool") -> list[int]:
    """Processes of pools whose ledger lies in `folder`, found by their environment and name."""
    mark = f"LEDGER={folder}/ledger".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if (
                mark in (entry / "environ").read_bytes()
                and (entry / "comm").read_text().rstrip() == name
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def serving_pool_processes(folder: Path) -> list[int]:
    """Pool processes that have imported the app: from then on they have a second thread."""
    found = []
    for pid in pool_processes(folder):
        with suppress(OSError):  # it has ended
            if len(list(Path(f"/proc/{pid}/task").iterdir())) > 1:
                found.append(pid)
    return found


def living_pool_processes(folder: Path) -> list[int]:
    """Pool processes, and the servers that fork them."""
    return pool_processes(folder) + pool_processes(folder, "aztask-fork")


@contextmanager
def site_in(folder: Path, **options: object) -> Iterator[Site]:
    site = Site(folder, **options)  # type: ignore[arg-type]
    try:
        yield site
    finally:
        site.close()
