"""Learns which test reaches which line of the core, and how long each test takes.

Coverage is measured by coverage.py with one context per test. Lines that run at import belong to no
test: a mutant there is tried with every test that reaches the module.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import coverage
import pytest

from . import processes
from .making import Mutant
from .modules import TESTS, Source

SECONDS = 900.0
BUDGET = 12.0
"""Seconds of tests per mutant, nearest first; the rest is not tried."""
FASTEST = 50
"""Tests of other modules that are tried before the rest: to collect a test takes time as well."""


@dataclass
class Reach:
    """seconds: how long each test takes. lines: the tests of each line, by file.

    cost: seconds of this process alone, which a busy machine does not change; else `seconds`.
    """

    seconds: dict[str, float]
    lines: dict[str, dict[int, list[str]]]
    cost: dict[str, float] = field(default_factory=dict)

    def tests(self, mutant: Mutant) -> list[list[str]]:
        """What to try it with, in groups: tests of the module's name, then the fastest, then more.

        Of a line that runs at import, all tests that reach the module or whose file bears its name;
        if there are none, all tests.
        """
        source = mutant.source
        by_line = self.lines.get(str(source.path), {})
        if mutant.at_import:
            found = {test for tests in by_line.values() for test in tests} - {""}
            found |= {test for test in self.seconds if not _far(test, source)}
            found = found or set(self.seconds)
        else:
            lines = range(mutant.first, mutant.last + 1)
            found = {test for line in lines for test in by_line.get(line, ())} - {""}
        cost = self.cost or self.seconds
        ordered = sorted(found, key=lambda test: (_far(test, source), cost.get(test, 0.0)))
        groups: list[list[str]] = [[], [], []]
        total = 0.0
        for test in ordered:
            total += cost.get(test, 0.0)
            if total > BUDGET and any(groups):
                break
            far = _far(test, source)
            groups[far + (far and len(groups[1]) >= FASTEST)].append(test)
        return [group for group in groups if group]


def _far(test: str, source: Source) -> int:
    """0 for a test in the module's own file of unit tests."""
    *packages, name = source.name.split(".")[1:]
    own = Path("tests", "unit", *packages, f"test_{name}.py")
    return 0 if Path(test.partition("::")[0]) == own else 1


def is_local(test: str) -> bool:
    """Whether a test is one of ours: of the contract tests, those of the local broker and store."""
    if not test.startswith("tests/contract/"):
        return True
    parameters = test.partition("[")[2]
    return parameters.startswith("local")


class Recorder:
    """A plugin of pytest that notes what each test takes and switches coverage to it."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self.seconds: dict[str, float] = {}
        self.cost: dict[str, float] = {}
        self._measured = measured

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if is_local(item.nodeid)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        self._measured.switch_context(item.nodeid)
        began, busy = time.monotonic(), time.process_time()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.monotonic() - began
            self.cost[item.nodeid] = time.process_time() - busy
            self._measured.switch_context("")


def measure(
    sources: Sequence[Source], folder: Path, count: int, only: Sequence[str] | None = None
) -> Reach:
    """Run all tests, or `only` these files, once, in `count` processes.

    Raises SystemExit if one of them fails.
    """
    files = sorted(
        only or _files(),
        key=lambda name: -Path(name.partition("::")[0]).stat().st_size,
    )
    runs = []
    for n in range(count):
        share = files[n::count]
        if not share:
            continue
        result = folder / f"reach-{n}.json"
        runs.append(
            processes.start(
                lambda share=share, result=result: _run(share, sources, result),
                folder / f"reach-{n}.txt",
                SECONDS,
            )
        )
    for run in processes.finished(runs):
        if run.code != 0:
            raise SystemExit(
                f"the tests fail without any change; correct them first:\n{run.text()[-4000:]}"
            )
    reach = Reach({}, {})
    for n in range(len(runs)):
        part = json.loads((folder / f"reach-{n}.json").read_text())
        reach.seconds.update(part["seconds"])
        reach.cost.update(part["cost"])
        for path, lines in part["lines"].items():
            target = reach.lines.setdefault(path, {})
            for line, tests in lines.items():
                target.setdefault(int(line), []).extend(tests)
    return reach


def _files() -> list[str]:
    """All files of tests that a mutant is tried with."""
    found: list[Path] = []
    for name in TESTS:
        path = Path(name)
        found += path.rglob("test_*.py") if path.is_dir() else [path]
    return [str(path) for path in found]


def _run(files: list[str], sources: Sequence[Source], result: Path) -> int:
    paths = [str(source.path) for source in sources]
    os.environ["COVERAGE_CORE"] = "ctrace"  # the one that knows contexts on every Python
    measured = coverage.Coverage(data_file=None, include=paths, config_file=False)
    recorder = Recorder(measured)
    measured.start()
    code = pytest.main([*files, *options(result.with_suffix(""))], plugins=[recorder, Caching()])
    measured.stop()
    data = measured.get_data()
    lines = {path: data.contexts_by_lineno(path) for path in data.measured_files()}
    noted = {"seconds": recorder.seconds, "cost": recorder.cost, "lines": lines}
    result.write_text(json.dumps(noted))
    return int(code)


class Caching:
    """A plugin of pytest: what is imported before the tests run is compiled once for all runs.

    Not what they import: some tests write the same module twice within a second.
    """

    def __init__(self) -> None:
        sys.dont_write_bytecode = False

    def pytest_collection_finish(self) -> None:
        sys.dont_write_bytecode = True


def options(folder: Path) -> list[str]:
    """Those of every run of pytest here."""
    return [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--hypothesis-profile=ci",
        f"--basetemp={folder}",
        "-W",
        "ignore::coverage.exceptions.CoverageWarning",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
    ]
