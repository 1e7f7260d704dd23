"""Learns which test reaches which line of the core, and how long each test takes.

Coverage is measured by coverage.py with one context per test. Lines that run at import belong to no
test: a mutant there is tried with every test that reaches the module.

Only the files of tests that concern the drawn modules run: `near.json` names them. What a file of
tests reaches is kept under `CACHE`, by the content of the package, of what the tests share, and of
the file, so the same tree is measured once.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import coverage
import pytest

from . import processes
from .copies import Copy
from .making import Mutant
from .modules import MODULES, ROOT, TESTS, Source, find

CACHE = ROOT / "build" / "mutants"
NEAR = Path(__file__).with_name("near.json")
NEAR_COST = 60.0
"""Seconds of tests for one module, by the files that reach most of it; the others do not run."""
SERVED = {"storagequeue", "servicebus", "tables", "blob"}
"""The brokers and stores of the contract that need a server."""
FEW = 4
"""Files of its package that a module is tried with that is not in `near.json`, in a small draw."""
SHARE = 4
"""Files of tests that one process measures."""
SECONDS = 600.0
"""For one share."""
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

    def among(self, tests: Sequence[str]) -> Reach:
        """The same, with only these tests."""
        chosen = set(tests)
        lines = {
            path: {line: [test for test in found if test in chosen] for line, found in of.items()}
            for path, of in self.lines.items()
        }
        seconds = {test: self.seconds[test] for test in tests}
        return Reach(seconds, lines, {test: self.cost.get(test, 0.0) for test in tests})

    def tests(self, mutant: Mutant) -> list[list[str]]:
        """What to try it with, in groups: tests of the module's name, then the fastest, then more.

        Of a line that runs at import, all tests that reach the module or whose file bears its name;
        if there are none, all tests.
        """
        source = mutant.source
        by_line = self.lines.get(str(source.relative), {})
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
    return 0 if Path(test.partition("::")[0]) == _own(source) else 1


def _own(source: Source) -> Path:
    *packages, name = source.name.split(".")[1:]
    return Path("tests", "unit", *packages, f"test_{name}.py")


def is_local(test: str) -> bool:
    """Whether a test is one of ours: of the contract tests, those that need no server."""
    if not test.startswith("tests/contract/"):
        return True
    parameters = test.partition("[")[2].rstrip("]").split("-")
    return not SERVED & set(parameters)


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


def measure(files: Sequence[str], copies: Sequence[Copy], folder: Path) -> Reach:
    """Run these files of tests, unless their reach is known, a copy of the tree for each process.

    Raises SystemExit if a test fails twice: the second time in a process of its own.
    """
    known = _known(files)
    missing = [file for file in files if file not in known]
    shares = [missing[n :: -(-len(missing) // SHARE)] for n in range(-(-len(missing) // SHARE))]
    again = _measure(shares, copies, folder / "first", known)
    failed = _measure([[file] for file in again], copies, folder / "second", known)
    if failed:
        raise SystemExit(
            "the tests fail without any change; correct them first:\n" + "\n".join(failed.values())
        )
    reach = Reach({}, {})
    for file in files:
        reach.seconds.update(known[file]["seconds"])
        reach.cost.update(known[file]["cost"])
        for path, lines in known[file]["lines"].items():
            target = reach.lines.setdefault(path, {})
            for line, tests in lines.items():
                target.setdefault(int(line), []).extend(tests)
    return reach


def _measure(
    shares: list[list[str]], copies: Sequence[Copy], folder: Path, known: dict[str, Any]
) -> dict[str, str]:
    """Add what the files reach to `known`; those of a share that fails, with its output."""
    failed: dict[str, str] = {}
    free = list(copies)
    running: list[tuple[processes.Run, list[str], Path, Copy]] = []
    waiting = list(enumerate(shares))[::-1]
    while waiting or running:
        while waiting and free:
            n, share = waiting.pop()
            copy, result = free.pop(), Path(f"{folder}-{n}.json")
            work = _work(share, copy, result)
            run = processes.start(work, result.with_suffix(".txt"), SECONDS)
            running.append((run, share, result, copy))
        for each in list(running):
            run, share, result, copy = each
            if not processes.poll(run):
                continue
            running.remove(each)
            free.append(copy)
            if run.code != 0:
                why = "took too long" if run.slow else run.text()[-2000:]
                failed.update({file: f"{file}: {why}" for file in share})
                continue
            part = json.loads(result.read_text())
            for file in share:
                known[file] = _of_file(part, file)
                _keep(file, known[file])
        time.sleep(0.01)
    return failed


def _work(share: list[str], copy: Copy, result: Path) -> Any:
    paths = [str(copy.folder / source.relative) for source in find(MODULES)]
    return lambda: _run(share, paths, copy, result)


def _of_file(part: dict[str, Any], file: str) -> dict[str, Any]:
    """What of a share's record concerns one of its files."""

    def mine(test: str) -> bool:
        return test.partition("::")[0] == file

    lines = {
        path: {
            line: tests
            for line, all_tests in of_path.items()
            if (tests := [test for test in all_tests if mine(test)])
        }
        for path, of_path in part["lines"].items()
    }
    return {
        "seconds": {test: value for test, value in part["seconds"].items() if mine(test)},
        "cost": {test: value for test, value in part["cost"].items() if mine(test)},
        "lines": {path: found for path, found in lines.items() if found},
    }


# -- what is kept --------------------------------------------------------------------------------


def _known(files: Iterable[str]) -> dict[str, Any]:
    found = {}
    for file in files:
        path = _kept(file)
        if path.is_file():
            found[file] = json.loads(path.read_text())
    return found


def _keep(file: str, record: dict[str, Any]) -> None:
    path = _kept(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))


@cache
def _kept(file: str) -> Path:
    """Where the record of a file is, by what was in the tree when it was first asked for."""
    name, _, one = file.partition("::")
    digest = hashlib.sha256(f"{_shared()} {one} ".encode())
    digest.update((ROOT / name).read_bytes())
    return CACHE / f"{Path(name).stem}-{digest.hexdigest()[:20]}.json"


@cache
def _shared() -> str:
    """The content of the package, and of what tests share."""
    digest = hashlib.sha256()
    helpers = list((ROOT / "tests").glob("*.py"))
    for folder in ("unit", "contract"):
        helpers += (ROOT / "tests" / folder).rglob("*.py")
    helpers = [path for path in helpers if not path.name.startswith("test_")]
    for path in sorted([*(ROOT / "aztask").rglob("*.py"), *helpers]):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


# -- which files concern a module ----------------------------------------------------------------


def files_near(sources: Sequence[Source], cost: float) -> list[str]:
    """The files of tests that concern these modules, as `near.json` has it; see `note_near`.

    Of each module so many that they took no more than `cost` seconds, and one at least. For a
    module that is not in there: its own file of tests, and a few of its package, or without a limit
    all of them and the contract.
    """
    near = json.loads(NEAR.read_text()) if NEAR.is_file() else {}
    files: dict[str, None] = {}
    for source in sources:
        own = _own(source)
        package = sorted((ROOT / own.parent).glob("test_*.py"))
        if math.isinf(cost):
            package += sorted((ROOT / "tests" / "contract").glob("test_*.py"))
        else:
            package = package[:FEW]
        listed = near.get(source.name, {}).get("tests") or {
            str(path.relative_to(ROOT)): 0.0 for path in package
        }
        total = 0.0
        chosen = []
        for file in sorted(listed, key=lambda file: file != str(own)):
            total += listed[file]
            if total <= cost or not chosen:
                chosen.append(file)
        files.update(dict.fromkeys(file for file in [str(own), *chosen] if (ROOT / file).is_file()))
    return list(files)


def note_near(reach: Reach, sources: Sequence[Source]) -> None:
    """Write `near.json`: for each module its digest, and the files of tests that reach it.

    Those come first that reach most of its lines. The first one counts whatever it takes, the
    others at most `NEAR_COST` seconds together.
    """
    near = json.loads(NEAR.read_text()) if NEAR.is_file() else {}
    for source in sources:
        lines: dict[str, set[int]] = {}
        tests: dict[str, set[str]] = {}
        for line, found in reach.lines.get(str(source.relative), {}).items():
            for test in found:
                file = test.partition("::")[0]
                lines.setdefault(file, set()).add(line)
                tests.setdefault(file, set()).add(test)
        chosen: dict[str, float] = {}
        total = 0.0
        for file in sorted(lines, key=lambda file: (-len(lines[file]), file)):
            cost = sum(reach.cost[test] for test in reach.cost if test.startswith(f"{file}::"))
            if not chosen or total + cost <= NEAR_COST:
                total += cost if chosen else 0.0
                chosen[file] = round(cost, 1)
        digest = hashlib.sha256(source.text.encode()).hexdigest()[:12]
        near[source.name] = {"source": digest, "tests": chosen}
    near = {name: near[name] for name in sorted(near) if name in MODULES}
    NEAR.write_text(json.dumps(near, indent=1) + "\n")


def moved_on(sources: Sequence[Source]) -> list[str]:
    """The modules that changed since `near.json` was written."""
    near = json.loads(NEAR.read_text()) if NEAR.is_file() else {}
    return [
        source.name
        for source in sources
        if near.get(source.name, {}).get("source")
        != hashlib.sha256(source.text.encode()).hexdigest()[:12]
    ]


def all_files() -> list[str]:
    """All files of tests that a mutant is tried with."""
    found: list[Path] = []
    for name in TESTS:
        path = ROOT / name
        found += path.rglob("test_*.py") if path.is_dir() else [path]
    return sorted(str(path.relative_to(ROOT)) for path in found)


# -- the process that measures -------------------------------------------------------------------


def _run(files: list[str], paths: list[str], copy: Copy, result: Path) -> int:
    copy.enter()
    os.environ["COVERAGE_CORE"] = "ctrace"  # the one that knows contexts on every Python
    measured = coverage.Coverage(data_file=None, include=paths, config_file=False)
    recorder = Recorder(measured)
    measured.start()
    code = pytest.main(
        [*files, "-x", "--tb=short", *options(result.with_suffix(""))],
        plugins=[recorder, Caching()],
    )
    measured.stop()
    data = measured.get_data()
    lines = {
        str(Path(path).relative_to(copy.folder)): data.contexts_by_lineno(path)
        for path in data.measured_files()
    }
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
