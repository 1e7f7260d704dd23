"""Tries one mutant: a forked process imports the changed module and runs what reaches it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

import pytest

from . import processes
from .making import Mutant
from .reach import Caching, Reach, options

SLOWEST = 120.0
NO_TESTS = int(pytest.ExitCode.NO_TESTS_COLLECTED)


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads the changed source under the module's own name and path."""

    def __init__(self, name: str, path: str, code: str) -> None:
        super().__init__(name, path)
        self._text = code

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._text, self.path, "exec", dont_inherit=True)


class _Finder:
    """Finds one module, before any other finder."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        source = self._mutant.source
        if name != source.name:
            return None
        loader = _Loader(name, str(source.path), self._mutant.code)
        return importlib.util.spec_from_file_location(name, source.path, loader=loader)


class _Selection:
    """A plugin of pytest that runs certain tests, in their order, each within a time."""

    def __init__(self, tests: Sequence[str], reach: Reach) -> None:
        self._order = {test: n for n, test in enumerate(tests)}
        self._seconds = reach.seconds

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self._order]
        items[:] = sorted(chosen, key=lambda item: self._order[item.nodeid])
        for item in items:
            limit = 5.0 + 10.0 * self._seconds[item.nodeid]
            item.add_marker(pytest.mark.timeout(limit, method="signal"))


@dataclass
class Trial:
    """A mutant that is being tried, or was.

    run: None where no test reaches the change. noticed: whether a test failed, or the mutant hung
    or crashed. noticed_by: the test that failed, if it is known.
    """

    mutant: Mutant
    tests: list[str]
    run: processes.Run | None = None
    noticed: bool = False
    noticed_by: str = ""


def start(mutant: Mutant, reach: Reach, folder: Path) -> Trial:
    """Begin to try it; the trial has no run if no test reaches the change."""
    groups = reach.tests(mutant)
    trial = Trial(mutant, [test for group in groups for test in group])
    if groups:
        seconds = min(30.0 + 3.0 * sum(reach.seconds[test] for test in trial.tests), SLOWEST)
        trial.run = processes.start(
            lambda: _run(mutant, groups, reach, folder), folder.with_suffix(".txt"), seconds
        )
    return trial


def end(trial: Trial) -> None:
    """Judge it, once its process has ended, and remove what its tests wrote."""
    run = trial.run
    if run is None or run.code is None:
        return
    text = run.text()
    shutil.rmtree(run.output.with_suffix(""), ignore_errors=True)
    run.output.unlink()
    if run.code == NO_TESTS:  # a test has another name now than when it was measured
        raise RuntimeError(f"no tests were run for {trial.mutant.key}:\n{text}")
    trial.noticed = run.code != 0
    if run.slow:
        trial.noticed_by = "it hung"
    elif trial.noticed:
        failed = [
            line.split(" ", 1)[1].partition(" - ")[0]
            for line in text.splitlines()
            if line.startswith(("FAILED ", "ERROR "))
        ]
        trial.noticed_by = failed[0] if failed else "it crashed"


def _run(mutant: Mutant, groups: list[list[str]], reach: Reach, folder: Path) -> int:
    sys.meta_path.insert(0, _Finder(mutant))  # type: ignore[arg-type]
    for tests in groups:
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        plugins = [_Selection(tests, reach), Caching()]
        code = int(pytest.main([*files, "-x", "--tb=no", *options(folder)], plugins=plugins))
        if code:
            return code
    return 0
