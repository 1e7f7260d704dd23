"""The command line: ``SIM_SEED=7 SIM_SECONDS=60 python -m tests.simulation``."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import count, islice
from pathlib import Path

import aztask

from .course import draw
from .coverage import never_reached
from .running import Report, run, run_seed
from .shrinking import shrink

YEAR = 365.25 * 86400.0
BATCH = 4
"""Courses that a process runs before it reports."""

SHRINKING_SECONDS = 60.0


def main() -> int:
    options = _options()
    if os.environ.get("PYTHONHASHSEED") != "0":  # one seed is one course in every process
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])  # noqa: S606
    if options.replay is not None:
        return _replay(options.replay, options.shrink)
    first = int(options.seed) if options.seed else secrets.randbelow(10**9)
    total, began = _Total(), time.monotonic()
    if options.names:
        print(f"aztask from {Path(aztask.__file__).parents[1]}", flush=True)
    print(f"seeds from {first} on, for {options.seconds:g} s in {options.processes} processes")
    for report in _reports(first, options):
        total.add(report)
        if report.name and options.names:
            print(f"found {report.name} with seed {report.course.seed}: {report.text}")
            return 1
        if report.name:
            _tell(report)
            if not options.keep_going:
                break
    total.print(time.monotonic() - began)
    missing = never_reached(total.points) if options.coverage else []
    if missing:
        print(f"never reached: {', '.join(missing)}")
    return 1 if total.failed or missing else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    environ = os.environ
    parser.add_argument("--seed", default=environ.get("SIM_SEED", ""), help="the first seed")
    parser.add_argument("--seconds", type=float, default=float(environ.get("SIM_SECONDS") or 60.0))
    parser.add_argument("--courses", type=int, help="at most so many")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--replay", type=int, help="run one seed and show the trace")
    parser.add_argument("--shrink", action="store_true", help="with --replay: shorten it")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at a failure")
    parser.add_argument("--names", action="store_true", help="end with the failure's name")
    parser.add_argument("--kind", help="only courses of this kind: local, storage or bus")
    parser.add_argument("--coverage", action="store_true", help="fail if a point is never reached")
    return parser.parse_args()


def _reports(first: int, options: argparse.Namespace) -> Iterator[Report]:
    """Run seed after seed until the time is up, or they are all run."""
    end, processes = time.monotonic() + options.seconds, options.processes
    fitting = (
        seed for seed in count(first) if options.kind is None or draw(seed).kind == options.kind
    )
    seeds = islice(fitting, options.courses)
    if processes == 1:
        for seed in seeds:
            yield run_seed(seed)
            if time.monotonic() >= end:
                return
        return
    with ProcessPoolExecutor(processes) as pool:
        running: set[Future[list[Report]]] = set()
        try:
            while True:
                while len(running) < processes and time.monotonic() < end:
                    if not (batch := list(islice(seeds, BATCH))):
                        break
                    running.add(pool.submit(_batch, batch, end))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for each in done:
                    yield from each.result()
        finally:
            for each in running:
                each.cancel()


def _batch(seeds: Sequence[int], end: float) -> list[Report]:
    return [run_seed(seed) for seed in seeds if time.monotonic() < end]


def _replay(seed: int, shrinks: bool) -> int:
    report = run_seed(seed)
    if report.name and shrinks:
        name = report.name
        report = run(shrink(report.course, lambda each: run(each).name == name, SHRINKING_SECONDS))
    _tell(report, whole=True)
    return 1 if report.name else 0


def _tell(report: Report, *, whole: bool = False) -> None:
    print(report.text or "nothing failed")
    if report.name and not whole:
        name = report.name
        course = shrink(report.course, lambda each: run(each).name == name, SHRINKING_SECONDS)
        print(f"seed {report.course.seed}; its shortest part that was found:")
        report = run(course)
    print(report.course)
    for decision in report.course.decisions:
        print(decision)
    print("\n".join(report.trace[-80:]))


class _Total:
    """The sum of all reports."""

    def __init__(self) -> None:
        self.seeds = self.steps = self.failed = 0
        self.virtual = self.seconds = 0.0
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.points: Counter[str] = Counter()
        self.courses: Counter[str] = Counter()

    def add(self, report: Report) -> None:
        self.seeds += 1
        self.steps += report.steps
        self.virtual += report.virtual
        self.seconds += report.seconds
        self.failed += bool(report.name)
        self.counts += report.counts
        self.faults += report.faults
        self.points += report.points
        self.courses.update(name for name, n in (report.counts + report.faults).items() if n)

    def print(self, seconds: float) -> None:
        runs, faults = self.counts["task runs"], sum(self.faults.values())
        each = runs / self.seconds if self.seconds else 0.0
        print(
            f"simulation: {self.seeds} seeds, {self.failed} failed; {runs:,} task runs, "
            f"{self.virtual / YEAR:.3f} years, {self.steps:,} steps, {faults:,} faults; "
            f"{each:,.0f} task runs a second of one core, {seconds:.0f} s"
        )
        print("counted: " + ", ".join(f"{name} {n:,}" for name, n in sorted(self.counts.items())))
        print("faults: " + ", ".join(f"{name} {n:,}" for name, n in sorted(self.faults.items())))
        shares = sorted((name, round(100 * n / self.seeds)) for name, n in self.courses.items())
        print("courses with it, %: " + ", ".join(f"{name} {share}" for name, share in shares))
        print("points: " + ", ".join(f"{name} {n:,}" for name, n in sorted(self.points.items())))


if __name__ == "__main__":
    sys.exit(main())
