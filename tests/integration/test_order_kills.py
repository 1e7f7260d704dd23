"""``examples/workflow``: its sender and workers are killed at each step, and it ends right."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import ROOT, wait_until

from aztask import App
from aztask.stores.records.base import State

LEASE = 1.5
VALUE = "shipped, 100 images: order-1/0.png, order-1/1.png ..."
WORKER_STEPS = ("sent", "recorded", "bit-set", "followed", "ended", "settled")
SENDER_STEPS = ("graph-parts", "graph-root", "followed", "graph-sent")


class Shop:
    """A copy of the example, with queues and results in two files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "examples" / "workflow", folder)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AZTASK_")}
        self.environment = {**kept, "PYTHONPATH": str(ROOT)}
        text = (folder / "orders.py").read_text()
        changed = text.replace('results="local://"', 'results="local:///results.db"')
        assert changed != text
        path = folder / "results.db"
        (folder / "orders.py").write_text(changed.replace("/results.db", str(path)))
        self.app = App(
            "orders", broker=f"local://{folder}/.aztask/queues.db", results=f"local://{path}"
        )
        self.log = folder / "log"

    def start(self, *command: str, step: str = "") -> subprocess.Popen[bytes]:
        """Start a program, which kills itself at a step."""
        extra = {"AZTASK_FAILPOINT": step} if step else {}
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *command],
                cwd=self.folder,
                env={**self.environment, **extra},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def work(self, step: str = "") -> subprocess.Popen[bytes]:
        """Start a worker."""
        lease = ("--lease", f"{LEASE}s", "--max-lease", "60s")
        return self.start(
            "-m", "aztask", "worker", "-A", "orders:app", "-c", "2", *lease, step=step
        )

    def ended_right(self) -> None:
        """Wait until it has ended, then check that each task succeeded, and was recorded once."""
        result = self.app.workflows.result("order-1")
        assert result.get(timeout=120) == VALUE, self.log.read_text()
        assert (result.progress.done, result.progress.failed) == (104, 0)
        for number in (1, 2, 3, *range(5, 106)):
            (run,) = self.app.results.history(f"order-1.{number}")
            assert run.state is State.SUCCEEDED
        assert self.app.results.get("order-1.106") is None, "the alarm did not run"
        wait_until(lambda: not self.left(), LEASE + 30, "all messages are settled")

    def left(self) -> int:
        stats = self.app.broker.stats("default")
        return (stats.active or 0) + (stats.leased or 0) + (stats.scheduled or 0)


@contextmanager
def stopped(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """End a worker after the block."""
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path / "shop")
    yield made
    made.app.close()


@pytest.mark.parametrize("step", WORKER_STEPS)
def test_a_worker_of_the_order_is_killed_at_each_step(step: str, shop: Shop) -> None:
    """At the charge, at the reservation, and amid the thumbnails."""
    assert shop.start("orders.py").wait(60) == 0
    result = shop.app.workflows.result("order-1")
    for nth in (1, 2, 20):
        with stopped(shop.work(f"{step}:KILL:{nth}")) as worker:
            wait_until(
                lambda one=worker: one.poll() is not None or result.ready(), 90, "it is killed"
            )
            if worker.poll() is None:
                break
            assert worker.returncode == -signal.SIGKILL, shop.log.read_text()
    with stopped(shop.work()):
        shop.ended_right()


@pytest.mark.parametrize("step", SENDER_STEPS)
def test_the_sender_of_the_order_is_killed_at_each_step(step: str, shop: Shop) -> None:
    """It is started again, and the order is charged once."""
    assert shop.start("orders.py", step=f"{step}:KILL").wait(60) == -signal.SIGKILL
    assert shop.start("orders.py").wait(60) == 0
    with stopped(shop.work()):
        shop.ended_right()
