"""A day of many tasks on Storage queues and Azure Tables, computed second by second.

Usage: python benchmarks/simulate.py [--check] [--tasks N] [--seconds S] [--workers N]
           [> docs/benchmarks/simulate.txt]

It plays a day of `--tasks` tasks, which come with half as many at night as by day, on a fleet that
has 1.5 times the slots of its busiest second, and queues that take twice that; then the same day
with an outage of the region, with tasks that always fail, with a deploy, and with a tenth of the
fleet killed. The requests of a task and of a worker are those that docs/cost.md measures, and the
limits of queue and account those of Azure's documentation. All amounts are flows: it knows means,
and no single task.

``--check`` compares it with formulas, and with one real worker on a file: that is away for some
seconds while tasks come, and the time until it has caught up is predicted from its rate.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import Check, conclude, figure, machine

from aztask import App

DAY = 86_400
LEASE = 300.0
"""Seconds: the default of Storage queues, after which the tasks of a dead worker come again."""

SENDS, SETTLES, RECEIVES = 1.0, 1.0, 1 / 32
STORED = 3.0
"""Requests of a task to the table of results."""

HEARTBEATS, CONTROLS = 1 / 5.0, 1 / 2.0
"""Requests of a worker a second to the result store, busy or not."""

QUEUE_MESSAGES, ACCOUNT_REQUESTS = 2_000.0, 20_000.0
"""Messages a second of one queue, requests a second of one account [Azure's documentation]."""

QUEUE_DOLLARS, TABLE_DOLLARS = 0.004 / 10_000, 0.0004 / 10_000
RETRY_DELAYS = (0.75, 1.5, 3.0)
"""Seconds before the retries of a default policy: three quarters of each delay, since half to all
of it is taken."""

WITHIN = 0.02
REAL_WITHIN = 0.1


@dataclass(frozen=True)
class Plan:
    """What comes, and what is there for it.

    * `rate`: tasks a second at a time of the day. `run`: seconds of a task. `slots`: of the fleet.
    * `sends`: tasks a second that the queues take at most, such as after an outage.
    * `outage`: from when to when nothing reaches the queues; senders keep what they have.
    * `poison`: from when to when, and which share of the tasks always fails.
    * `deploy`: from when to when, and for how many seconds each worker is away.
    * `killed`: when, and which share of the fleet; another worker takes each place at once.
    """

    rate: Callable[[float], float]
    run: float
    slots: float
    workers: int
    sends: float = math.inf
    outage: tuple[float, float] = (0.0, 0.0)
    poison: tuple[float, float, float] = (0.0, 0.0, 0.0)
    deploy: tuple[float, float, float] = (0.0, 0.0, 0.0)
    killed: tuple[float, float] = (-1.0, 0.0)
    seconds: int = DAY
    step: float = 1.0


@dataclass
class Found:
    """What came of a plan. Times are seconds, rates a second."""

    tasks: float = 0.0
    runs: float = 0.0
    dead: float = 0.0
    backlog: float = 0.0
    waited: float = 0.0
    recovered: float = 0.0
    busiest: float = 0.0
    running: list[float] = field(default_factory=list)
    queue_requests: float = 0.0
    most_queue_requests: float = 0.0
    table_requests: float = 0.0
    most_table_requests: float = 0.0

    @property
    def dollars(self) -> float:
        """What a million tasks cost in requests."""
        spent = self.queue_requests * QUEUE_DOLLARS + self.table_requests * TABLE_DOLLARS
        return spent / self.tasks * 1e6


class Fleet:
    """The flows of a plan, step by step."""

    def __init__(self, plan: Plan) -> None:
        self.found = Found()
        self._plan = plan
        self._number = 0
        self._held = 0.0
        """What senders keep."""
        self._waiting = 0.0
        self._lost: dict[int, float] = {}
        """What a killed worker had, by the step at which its lease ends."""
        # Of what waits, and of what waits for a retry: tasks that always fail, by their failures.
        self._ill = [0.0] * (len(RETRY_DELAYS) + 1)
        self._retried: dict[int, list[float]] = {}
        self._disturbed = max(plan.outage[1], plan.poison[1], plan.deploy[1], plan.killed[0])

    def play(self) -> Found:
        """All of it."""
        for number in range(round(self._plan.seconds / self._plan.step)):
            self._number = number
            now = self._number * self._plan.step
            away = self._plan.outage[0] <= now < self._plan.outage[1]
            new = self._plan.rate(now) * self._plan.step
            sent = self._send(now, new, away=away)
            most = self._slots(now) * self._plan.step / self._plan.run
            begun = 0.0 if away else min(self._waiting, most)
            self._begin(begun)
            self._note_wait(now, new, most, away=away)
            self._count(sent / self._plan.step, begun / self._plan.step)
            if now <= self._plan.killed[0] < now + self._plan.step:
                at = self._number + round(LEASE / self._plan.step)
                self._lost[at] = begun / self._plan.step * self._plan.run * self._plan.killed[1]
        return self.found

    def _send(self, now: float, new: float, *, away: bool) -> float:
        """What reaches the queues: new tasks, and those whose time has come."""
        self.found.tasks += new
        self._held += new
        sent = 0.0 if away else min(self._held, self._plan.sends * self._plan.step)
        self._held -= sent
        first, last, share = self._plan.poison
        if first <= now < last:
            self._ill[0] += sent * share
        self._waiting += sent + self._lost.pop(self._number, 0.0)
        for failures, amount in enumerate(self._retried.pop(self._number, ())):
            self._ill[failures] += amount
            self._waiting += amount
        return sent

    def _slots(self, now: float) -> float:
        """A slot is free again as soon as its task has ended, and begins the next at once."""
        first, last, each = self._plan.deploy
        return self._plan.slots * (1.0 - each / (last - first) if first <= now < last else 1.0)

    def _begin(self, begun: float) -> None:
        """Start so many of what waits, the ill ones by their share."""
        if self._waiting <= 0.0:
            return
        share = begun / self._waiting
        for failures, amount in enumerate(self._ill):
            failed = amount * share
            self._ill[failures] -= failed
            if failures == len(RETRY_DELAYS):
                self.found.dead += failed
                continue
            after = max(1, round((self._plan.run + RETRY_DELAYS[failures]) / self._plan.step))
            later = self._retried.setdefault(self._number + after, [0.0] * len(self._ill))
            later[failures + 1] += failed
        self._waiting -= begun

    def _note_wait(self, now: float, new: float, most: float, *, away: bool) -> None:
        behind = self._waiting + self._held
        self.found.backlog = max(self.found.backlog, behind)
        if behind > new:
            # Of what comes now; during an outage also until its end.
            left = self._plan.outage[1] - now if away else 0.0
            wait = left + behind / most * self._plan.step
            self.found.waited = max(self.found.waited, wait)
        if behind > 2 * new and now >= self._disturbed:
            self.found.recovered = now + self._plan.step - self._disturbed

    def _count(self, sent: float, begun: float) -> None:
        """Add up a step. sent, begun: a second."""
        found, step = self.found, self._plan.step
        queue = sent + begun * (SETTLES + RECEIVES)
        table = begun * STORED + self._plan.workers * (HEARTBEATS + CONTROLS)
        found.runs += begun * step
        found.running.append(begun * self._plan.run)
        found.busiest = max(found.busiest, sent, begun)
        found.most_queue_requests = max(found.most_queue_requests, queue)
        found.most_table_requests = max(found.most_table_requests, table)
        found.queue_requests += queue * step
        found.table_requests += table * step


def play(plan: Plan) -> Found:
    """The day of a plan."""
    return Fleet(plan).play()


def by_day(tasks: float) -> Callable[[float], float]:
    """The rate of a day with so many tasks: a third of the mean more at noon, less at midnight."""
    mean = tasks / DAY
    return lambda now: mean * (1.0 - math.cos(2 * math.pi * now / DAY) / 3.0)


def steady(rate: float) -> Callable[[float], float]:
    """The same rate at all times."""
    return lambda now: rate


# -- Against formulas ------------------------------------------------------------------------------


def formulas() -> list[Check]:
    """The relative distance from what is known of steady flows."""
    calm = Plan(steady(100.0), run=0.5, slots=100.0, workers=4, seconds=3600)
    found = play(calm)
    little = statistics.fmean(found.running[600:]) / (100.0 * 0.5)
    out = play(replace(calm, outage=(600.0, 900.0)))
    recovery = out.recovered / (300.0 * 100.0 / (200.0 - 100.0))
    wait = out.waited / 300.0
    ill = play(replace(calm, poison=(600.0, 1200.0, 0.1)))
    runs = ill.runs / (3600 * 100.0 + 600 * 100.0 * 0.1 * len(RETRY_DELAYS))
    dead = ill.dead / (600 * 100.0 * 0.1)
    names = {
        "running tasks, of rate times seconds (Little)": little,
        "recovery from an outage, of backlog over what is free": recovery,
        "longest wait in an outage, of its length": wait,
        "runs with tasks that fail four times": runs,
        "dead letters of them": dead,
    }
    return [
        Check(f"formula: {name}", abs(value - 1.0), WITHIN, "off", at_least=False)
        for name, value in names.items()
    ]


# -- Against a worker ------------------------------------------------------------------------------

MILL = """
import time
from aztask import App

app = App("mill", broker="local://{folder}/queues.db")

@app.task
def grind(seconds):
    time.sleep(seconds)
"""
RUN, SLOTS, AWAY = 0.05, 4, 8.0


class Mill:
    """A queue in a file, and a worker of it that comes and goes."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        (self._folder / "mill.py").write_text(MILL.format(folder=folder))
        self.app = App("mill", broker=f"local://{folder}/queues.db")
        self.app.broker.declare("default")

    def living(self) -> int:
        """How many messages there are."""
        return self.app.broker.stats("default").living or 0

    def until(self, least: int) -> None:
        """Wait until there are so many at most."""
        while self.living() > least:
            time.sleep(0.01)

    def send(self, count: int = 1) -> None:
        """Send so many tasks."""
        for _ in range(count):
            self.app.send("mill.grind", [RUN])

    @contextmanager
    def worker(self) -> Iterator[None]:
        """A worker with `SLOTS` slots."""
        command = [sys.executable, "-m", "aztask", "-A", "mill:app", "worker", "-c", str(SLOTS)]
        path = f"{self._folder}:{Path(__file__).parents[1]}"
        with (self._folder / "worker.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, "--pool", "threads"],
                cwd=self._folder,
                env={**os.environ, "PYTHONPATH": path},
                stdout=log,
                stderr=log,
            )
        try:
            yield
        finally:
            process.terminate()
            process.wait()

    @contextmanager
    def arriving(self, rate: float) -> Iterator[None]:
        """Tasks that come at this rate."""
        stopping = threading.Event()

        def arrive() -> None:
            next_at = time.perf_counter()
            while not stopping.is_set():
                self.send()
                next_at += 1 / rate
                time.sleep(max(0.0, next_at - time.perf_counter()))

        thread = threading.Thread(target=arrive)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()

    def measured(self) -> float:
        """Tasks a second of a worker that has enough of them."""
        self.send(400)
        with self.worker():
            self.until(350)
            before, begun = self.living(), time.perf_counter()
            self.until(20)
            most = (before - self.living()) / (time.perf_counter() - begun)
        self.app.broker.purge("default")
        return most

    def caught_up(self, rate: float) -> tuple[int, float]:
        """How many waited when a worker came after `AWAY` seconds, and when it had caught up."""
        with self.arriving(rate):
            time.sleep(AWAY)
            with self.worker():
                most = 0
                while (behind := self.living()) >= most:
                    most = behind
                    time.sleep(0.01)
                begun = time.perf_counter()
                self.until(2 * SLOTS)
                return most, time.perf_counter() - begun


def real() -> tuple[float, float]:
    """Seconds in which a worker caught up, and those that are predicted from its rate."""
    with tempfile.TemporaryDirectory() as folder:
        mill = Mill(folder)
        most = mill.measured()
        behind, took = mill.caught_up(most / 2)
        mill.app.close()
    outage = (10.0, 10.0 + behind / (most / 2))
    plan = Plan(steady(most / 2), RUN, most * RUN, 1, outage=outage, seconds=60, step=0.05)
    return took, play(plan).recovered


# -- The tables ------------------------------------------------------------------------------------


def shown(name: str, found: Found) -> str:
    """A line of the table."""
    return (
        f"{name:<34} {found.runs / 1e6:>9,.1f} {found.dead / 1e6:>6.2f}"
        f" {found.backlog:>12,.0f} {found.waited:>8,.0f} {found.recovered:>8,.0f}"
        f" {found.busiest:>8,.0f} {found.most_queue_requests:>8,.0f}"
        f" {found.most_table_requests:>8,.0f} {found.dollars:>6.2f}"
    )


def main() -> None:
    """Play, print, and check."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if a figure does not hold")
    parser.add_argument("--tasks", type=float, default=1e9, help="of the day")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a task")
    parser.add_argument("--workers", type=int, default=1_000)
    given = parser.parse_args()
    rate = by_day(given.tasks)
    peak = rate(DAY / 2)
    slots = math.ceil(peak * given.seconds * 1.5)
    day = Plan(rate, given.seconds, slots, given.workers, sends=2.0 * peak)
    noon = DAY / 2
    plans = {
        "a day": day,
        "the region is away for 30 minutes": replace(day, outage=(noon, noon + 1800)),
        "1 % always fail, for an hour": replace(day, poison=(noon, noon + 3600, 0.01)),
        "half always fail, for ten minutes": replace(day, poison=(noon, noon + 600, 0.5)),
        "a deploy, 8 s of each worker": replace(day, deploy=(noon, noon + 600, 8.0)),
        "a tenth of the fleet is killed": replace(day, killed=(noon, 0.1)),
        "ten times the workers": replace(day, workers=10 * given.workers),
    }
    print(machine())
    print(
        f"{given.tasks:,.0f} tasks a day of {given.seconds:g} s, {peak:,.0f} a second at noon; "
        f"{given.workers:,} workers with {slots:,} slots together"
    )
    print(
        f"\n{'':<34} {'million':>9} {'dead,':>6} {'most':>12} {'longest':>8} {'caught':>8}"
        f" {'tasks/s':>8} {'queue':>8} {'table':>8} {'dollars/':>6}"
    )
    print(
        f"{'':<34} {'runs':>9} {'mill.':>6} {'behind':>12} {'wait, s':>8} {'up, s':>8}"
        f" {'at most':>8} {'req/s':>8} {'req/s':>8} {'million':>6}"
    )
    played = {name: play(plan) for name, plan in plans.items()}
    for name, found in played.items():
        print(shown(name, found))
    most = max(played.values(), key=lambda found: found.most_queue_requests)
    tables = max(found.most_table_requests for found in played.values())
    print(
        f"\nat the busiest second of these: {math.ceil(most.busiest / QUEUE_MESSAGES)} queues of "
        f"{figure(QUEUE_MESSAGES)} messages a second, "
        f"{math.ceil(most.most_queue_requests / ACCOUNT_REQUESTS)} accounts for them, "
        f"{math.ceil(tables / ACCOUNT_REQUESTS)} accounts for results"
    )
    checks = formulas()
    took, predicted = real()
    print(f"\na real worker had caught up after {took:.1f} s; predicted: {predicted:.1f} s")
    off = abs(took / predicted - 1.0)
    checks.append(Check("a real worker", off, REAL_WITHIN, "off", at_least=False))
    conclude(checks)


if __name__ == "__main__":
    main()
