"""Workers are stopped under load again and again: nothing is lost, and every cut is in a log.

DRAIN_ROUNDS sets the number of rounds for each broker and pool; `tox -e drain` runs 30, and its
figures are in docs/benchmarks/drain.txt.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from azurite import running
from bus import bus_site
from waiting import wait_until

from aztask import App
from aztask.queues.base import QueueOptions
from aztask.testing import emulator

pytestmark = [pytest.mark.kills, pytest.mark.timeout(7200)]

ROUNDS = int(os.environ.get("DRAIN_ROUNDS", "3"))
SEED = int(os.environ.get("DRAIN_SEED", "20261125"))
TASKS = 24
LEASE = 5.0
CLOSING = 7.0
SLOW = 600.0
"""Seconds for what takes a second, on a machine that does much else."""
HERE = Path(__file__).parent


@contextmanager
def local(folder):
    yield f"local:///{folder}/queues.db"


@contextmanager
def storage(folder):
    with running(folder / "azurite") as server:
        App("drain", broker=server.connection_string).broker.declare("default")
        yield server.connection_string


@contextmanager
def service_bus(folder):
    options = QueueOptions(lease=LEASE, max_deliveries=1000)
    with emulator() as bus, bus_site(folder / "site", bus, options):
        yield bus.connection_string


@dataclass
class Draw:
    """What one round does."""

    closing: float
    grace: str
    signal: signal.Signals
    second: signal.Signals | None


def draws(rng):
    """Draw rounds without end: one in three closes for 7 s, one in three has a second signal."""
    while True:
        second = rng.randrange(3)
        for place, closing in enumerate(rng.sample([0.0, 0.2, CLOSING], 3)):
            yield Draw(
                closing,
                rng.choice(["1s", "1s", "10s"]),
                rng.choice([signal.SIGTERM, signal.SIGHUP]),
                rng.choice([signal.SIGTERM, signal.SIGQUIT])
                if place == second or rng.random() < 0.1
                else None,
            )


@dataclass
class Told:
    """What the log of a worker says of the tasks and closings that it cut."""

    log: str
    tasks: set[str] = field(default_factory=set)
    unnamed: int = 0

    def __post_init__(self):
        for line in self.log.splitlines():
            if " is given back, " in line or "gave back" in line:
                self.tasks.update(re.findall(r"task drain\.\w+ (r\d+-\d+)", line))
                self.unnamed += sum(int(more) for more in re.findall(r"and (\d+) more", line))

    def closing(self, pid):
        told = rf"pool process {pid} (is killed (while|before) its lifespans|ended while it ran)"
        return re.search(told, self.log) is not None


@dataclass
class Figures:
    rounds: int = 0
    sent: int = 0
    runs: int = 0
    cut: int = 0
    told: int = 0
    closings: int = 0
    closings_cut: int = 0
    closings_told: int = 0

    HEAD = (
        f"{'broker':<12} {'pool':<10} {'rounds':>6} {'sent':>6} {'runs':>6} {'cut':>5} {'told':>5} "
        f"{'closings':>8} {'cut':>5} {'told':>5} {'lost':>5}"
    )

    def line(self, broker, pool, lost):
        return (
            f"{broker:<12} {pool:<10} {self.rounds:>6} {self.sent:>6} {self.runs:>6} "
            f"{self.cut:>5} {self.told:>5} {self.closings:>8} {self.closings_cut:>5} "
            f"{self.closings_told:>5} {lost:>5}"
        )


class Rounds:
    def __init__(self, folder, broker, pool, rng):
        shutil.copy(HERE / "drain_app.py", folder / "drain_app.py")
        self.folder, self.broker, self.pool, self.rng = folder, broker, pool, rng
        self.draws = draws(rng)
        self.figures = Figures()
        self.given_back = []
        self.logs = []
        self.sent = []
        self.workers = []

    def environment(self, closing):
        return {
            **os.environ,
            "DRAIN_BROKER": self.broker,
            "DRAIN_LEASE": str(LEASE),
            "DRAIN_CLOSING": str(closing),
        }

    def worker(self, *arguments, closing=0.0):
        self.logs.append(self.folder / f"worker-{len(self.logs)}.log")
        command = [sys.executable, "-m", "aztask", "worker", "-A", "drain_app:app"]
        with self.logs[-1].open("wb") as log:
            worker = subprocess.Popen(
                [*command, "-c", "4", "--pool", self.pool, *arguments],
                cwd=self.folder,
                env=self.environment(closing),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.workers.append(worker)
        return worker

    def close(self):
        for worker in self.workers:
            worker.kill()
            worker.wait()

    def send(self, number):
        """Fast and slow tasks, some that do not stop, in a process of their own."""
        calls = []
        for index in range(TASKS):
            key = f"r{number}-{index}"
            name = self.rng.choice(["work", "work", "wait"])
            seconds = self.rng.choice([0.0, 0.05, 0.2, 3.0])
            stubborn = ", stubborn=True" if name == "work" and self.rng.random() < 0.2 else ""
            task = f"drain_app.{name}.with_options(task_id={key!r})"
            calls.append(f"{task}.delay({key!r}, {seconds}{stubborn})")
            self.sent.append(key)
        script = "import drain_app\n" + "\n".join(calls)
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=self.folder,
            env=self.environment(0.0),
            timeout=SLOW,
            check=True,
        )

    def round(self, number):
        """Stop a worker that runs tasks, and check what it cut against what it says."""
        self.send(number)
        draw, before = next(self.draws), len(self.notes())
        worker = self.worker(
            "--shutdown-timeout", "500ms", "--shutdown-grace", draw.grace, closing=draw.closing
        )
        wait_until(lambda: len(self.notes()) > before or worker.poll() is not None, SLOW, "it runs")
        time.sleep(self.rng.uniform(0.0, 1.5))
        worker.send_signal(draw.signal)
        if draw.second is not None:
            time.sleep(self.rng.uniform(0.0, 1.0))
            worker.send_signal(draw.second)
        assert worker.wait(SLOW) == 0, self.logs[-1].read_text()
        self.account(self.notes()[before:], Told(self.logs[-1].read_text()))

    def account(self, notes, told):
        """Every run that did not end is told as given back, and every closing that was cut."""
        assert "Traceback" not in told.log, told.log
        keys = {
            kind: {key for each, key, _ in notes if each == kind} for kind in ("started", "done")
        }
        cut = keys["started"] - keys["done"]
        named = cut & told.tasks
        self.figures.cut += len(cut)
        self.figures.told += len(named) + min(told.unnamed, len(cut - named))
        assert self.figures.told == self.figures.cut, (cut - named, told.log)
        mine = {pid for _, _, pid in notes}
        cut_closings = mine - {pid for kind, _, pid in notes if kind == "closed"}
        self.figures.closings += len(mine)
        self.figures.closings_cut += len(cut_closings)
        self.figures.closings_told += sum(told.closing(pid) for pid in cut_closings)
        assert self.figures.closings_told == self.figures.closings_cut, (cut_closings, told.log)
        self.given_back += [(key, mine) for key in sorted(told.tasks)]
        self.figures.rounds += 1
        self.figures.runs += len(keys["started"])

    def notes(self):
        path = self.folder / "notes"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def check(self):
        """Run what is left: nothing is lost, and what was given back ran again elsewhere."""
        before = len(self.notes())
        last = self.worker("--burst")
        assert last.wait(SLOW + 20 * ROUNDS) == 0, self.logs[-1].read_text()
        self.figures.runs += sum(kind == "started" for kind, _, _ in self.notes()[before:])
        self.figures.sent = len(self.sent)
        results = App("drain", results=f"local:///{self.folder}/results.db").results
        states = {key: results.get(key) for key in self.sent}
        wrong = {key: run for key, run in states.items() if run is None or run.state != "succeeded"}
        assert not wrong
        ended = Counter((kind, key) for kind, key, _ in self.notes())
        lost = [key for key in self.sent if not ended["done", key]]
        assert not lost
        by = {(key, pid) for kind, key, pid in self.notes() if kind == "done"}
        for key, pids in self.given_back:
            assert any(each == key and pid not in pids for each, pid in by), (
                f"{key} was told as given back, and its outcome was recorded"
            )
        return len(lost)


BROKERS = {"local": local, "storage": storage, "service bus": service_bus}


@pytest.fixture(scope="module", autouse=True)
def head(pytestconfig):
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{Figures.HEAD}")


@pytest.mark.parametrize("pool", ["processes", "threads", "asyncio"])
@pytest.mark.parametrize("broker", BROKERS)
def test_workers_that_are_stopped_under_load_lose_nothing(tmp_path, broker, pool, capsys):
    rng = random.Random(f"{SEED} {broker} {pool}")
    with BROKERS[broker](tmp_path) as address:
        folder = tmp_path / "rounds"
        folder.mkdir()
        rounds = Rounds(folder, address, pool, rng)
        try:
            for number in range(ROUNDS):
                rounds.round(number)
            lost = rounds.check()
        finally:
            rounds.close()
    with capsys.disabled():
        print(f"\n{rounds.figures.line(broker, pool, lost)}")
