"""The projects in examples/from-celery, before and after: both print the same work."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "from-celery"
SECONDS = 60.0

FEEDS = [
    "fetched https://example.com/a.xml after 0 retries",
    "fetched https://example.com/b.xml after 1 retries",
    "indexed https://example.com/a.xml",
    "indexed https://example.com/b.xml",
]
ORDERS = [
    "refused: order order-2: the amount is negative",
    "3 parcels: order-1 paid/0, order-1 paid/1, order-1 paid/2 ['order-3 paid', 'order-4 paid']",
]
REPORTS = [
    "reports.refresh succeeded: totals refreshed",
    "reports.write failed: no data for tuesday",
    "reports.write succeeded: report of monday",
]


class Folder:
    """A copy of one example, and the programs that run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "output.log"
        self.environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def run(self, *arguments: str) -> None:
        assert self.start(*arguments).wait(SECONDS) == 0, self.log.read_text()

    def until(self, lines: list[str]) -> None:
        ends_at = time.monotonic() + SECONDS
        while missing := [line for line in lines if line not in self.log.read_text()]:
            assert time.monotonic() < ends_at, f"{missing} not in\n{self.log.read_text()}"
            time.sleep(0.1)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


@pytest.fixture
def example(tmp_path: Path) -> Iterator[Callable[[str], Folder]]:
    """Copies ``NAME/before`` or ``NAME/after`` into a directory of its own."""
    folders: list[Folder] = []

    def copy(name: str) -> Folder:
        folder = tmp_path / name
        shutil.copytree(EXAMPLES / name, folder)
        folders.append(Folder(folder))
        return folders[-1]

    yield copy
    for folder in folders:
        folder.close()


def worker(*options: str) -> list[str]:
    return ["-m", "celery", *options, "worker", "-P", "threads", "-c", "2", "-l", "warning"]


def test_feeds_before(example: Callable[[str], Folder]) -> None:
    folder = example("feeds/before")
    folder.run("send.py")
    folder.start(*worker("-A", "proj"), "-Q", "feeds,celery")
    folder.until([*FEEDS, "before proj.tasks.fetch", "after proj.tasks.index: RETRY"])


def test_feeds_after(example: Callable[[str], Folder]) -> None:
    folder = example("feeds/after")
    folder.run("send.py")
    folder.run("-m", "aztask", "-A", "proj.app:app", "worker", "--burst", "-c", "2")
    folder.until([*FEEDS, "before proj.tasks.fetch", "after proj.tasks.index: FAILURE"])


def test_orders_before(example: Callable[[str], Folder]) -> None:
    folder = example("orders/before")
    (folder.folder / "results").mkdir()
    folder.start(*worker("-A", "orders"))
    folder.start("orders.py", "--wait")
    folder.until(ORDERS)


def test_orders_after(example: Callable[[str], Folder]) -> None:
    folder = example("orders/after")
    sender = folder.start("orders.py", "--wait")
    folder.start("-m", "aztask", "-A", "orders:app", "worker", "-c", "2")
    folder.until(ORDERS)
    assert sender.wait(SECONDS) == 0


def test_reports_before(example: Callable[[str], Folder]) -> None:
    folder = example("reports/before")
    folder.run("reports.py")
    folder.start(*worker("-A", "reports"))
    folder.start("-m", "celery", "-A", "reports", "beat", "--max-interval", "1")
    folder.until(REPORTS)


def test_reports_after(example: Callable[[str], Folder]) -> None:
    folder = example("reports/after")
    folder.run("reports.py")
    lines = [
        line.split(maxsplit=5)[5]
        for line in (folder.folder / "crontab").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert len(lines) == 2
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "aztask"
        folder.run("-m", "aztask", *arguments)
    folder.run("-m", "aztask", "-A", "reports:app", "worker", "--burst", "-c", "2")
    folder.until([*REPORTS, "reports.write succeeded: report of today"])


def test_two_beats_send_each_occurrence_once(example: Callable[[str], Folder]) -> None:
    folder = example("beats")
    folder.start(*worker("-A", "beats"))
    beats = [folder.start("-m", "celery", "-A", "beats", "beat") for _ in range(2)]
    folder.until(["totals refreshed"])
    beats[0].kill()
    there = folder.log.read_text().count("totals refreshed")
    ends_at = time.monotonic() + SECONDS
    while folder.log.read_text().count("totals refreshed") < there + 3:
        assert time.monotonic() < ends_at, folder.log.read_text()
        time.sleep(0.1)
    ids = re.findall(r"refresh@(\S+): totals", folder.log.read_text())
    assert len(ids) == len(set(ids))
