"""Shared by the benchmarks: the machine's description, medians, the table of checks."""

from __future__ import annotations

import os
import platform
import sqlite3
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclass(frozen=True)
class Check:
    """One promised figure: `measured` must reach `target`, or stay below it."""

    name: str
    measured: float
    target: float
    unit: str
    at_least: bool = True

    @property
    def holds(self) -> bool:
        """Whether the measured figure keeps the promise."""
        return (self.measured >= self.target) if self.at_least else (self.measured <= self.target)

    def line(self) -> str:
        """The check as a line of the table."""
        sign = "at least" if self.at_least else "at most"
        verdict = "holds" if self.holds else "MISSED"
        return (
            f"{verdict:<7} {self.name:<58} {figure(self.measured):>9} {self.unit:<8} "
            f"({sign} {figure(self.target)})"
        )


def figure(value: float) -> str:
    """A number with three digits, or with thousands separators."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def machine(packages: Iterable[str] = ("kombu", "msgpack", "click")) -> str:
    """Describe the machine and the versions, in two lines."""
    with Path("/proc/meminfo").open() as file:
        memory = int(file.readline().split()[1]) / 2**20
    names = []
    for package in packages:
        try:
            names.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            names.append(f"{package} (not installed)")
    return (
        f"machine: {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} "
        f"{platform.release().split('-')[0]}\n"
        f"versions: Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, "
        + ", ".join(names)
    )


def spread(values: Sequence[float]) -> str:
    """The median with minimum and maximum, as text."""
    low, high = figure(min(values)), figure(max(values))
    return f"{figure(statistics.median(values))} ({low} to {high}, {len(values)} runs)"


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def conclude(checks: Sequence[Check]) -> None:
    """Print the checks; exit 1 if one is missed and ``--check`` was given."""
    print("\nchecks")
    for check in checks:
        print(" ", check.line())
    if "--check" in sys.argv and not all(check.holds for check in checks):
        sys.exit(1)


def take_turn() -> None:
    """Wait until `compare.py` lets this round go on; the other one then stands still."""
    if "COMPARE_TURNS" in os.environ:
        print("turn", flush=True)
        sys.stdin.readline()


def family(pid: int) -> list[int]:
    """The ids of a process and of all its descendants."""
    found = [pid]
    for each in found:
        try:
            children = Path(f"/proc/{each}/task/{each}/children").read_text()
        except OSError:
            continue  # it has ended
        found += map(int, children.split())
    return found


def processor_seconds(pid: int) -> float:
    """User and system time that a process has used, seconds; 0 if it has ended.

    Read from the clock that Linux gives each process, which counts nanoseconds; ``/proc`` counts
    ticks of 10 ms. Its id is made as clock_getcpuclockid(3) of glibc makes it.
    """
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


def megabytes(pid: int) -> float:
    """Proportional set size of a process: of shared pages only its part."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {pid} has no Pss")
