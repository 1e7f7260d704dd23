"""Tries one mutant: it is written in a copy of the tree, where a process runs what reaches it."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from . import processes
from .copies import Copy, proof
from .making import Mutant
from .reach import Caching, Reach, options

SLOWEST = 240.0
BLIND = 98
"""The exit code of a process whose tests have loaded another source than the mutant's."""
NO_TESTS = int(pytest.ExitCode.NO_TESTS_COLLECTED)


class _Selection:
    """A plugin of pytest that runs certain tests, in their order, each within a time."""

    def __init__(self, tests: Sequence[str], reach: Reach) -> None:
        self._order = {test: n for n, test in enumerate(tests)}
        self._seconds = reach.seconds

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self._order]
        items[:] = sorted(chosen, key=lambda item: self._order[item.nodeid])
        for item in items:
            limit = 20.0 + 10.0 * self._seconds[item.nodeid]
            item.add_marker(pytest.mark.timeout(limit, method="signal"))


@dataclass
class Trial:
    """A mutant that is being tried, or was.

    run: None where no test reaches the change. copy: where it is written. noticed: whether a test
    failed, or the mutant hung or crashed. noticed_by: the test that failed, if it is known.
    """

    mutant: Mutant
    tests: list[str]
    run: processes.Run | None = None
    copy: Copy | None = None
    noticed: bool = False
    noticed_by: str = ""


class Blind(RuntimeError):
    """Tests ran without the mutant that they were to notice: no score means anything."""


def start(mutant: Mutant, reach: Reach, folder: Path, copy: Copy) -> Trial:
    """Begin to try it; the trial has no run if no test reaches the change."""
    groups = reach.tests(mutant)
    trial = Trial(mutant, [test for group in groups for test in group])
    if groups:
        seconds = min(60.0 + 5.0 * sum(reach.seconds[test] for test in trial.tests), SLOWEST)
        copy.put(mutant)
        trial.copy = copy
        trial.run = processes.start(
            lambda: _run(mutant, groups, reach, folder, copy), folder.with_suffix(".txt"), seconds
        )
    return trial


def end(trial: Trial) -> None:
    """Judge it, once its process has ended, and remove what its tests wrote.

    Raises Blind if the tests did not run the mutant.
    """
    run = trial.run
    if run is None or run.code is None:
        return
    text = run.text()
    shutil.rmtree(run.output.with_suffix(""), ignore_errors=True)
    run.output.unlink()
    if run.code == NO_TESTS:  # a test has another name now than when it was measured
        raise RuntimeError(f"no tests were run for {trial.mutant.key}:\n{text}")
    if run.code == BLIND:
        raise Blind(f"the tests did not load the mutant {trial.mutant.key}:\n{text}")
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


def _run(mutant: Mutant, groups: list[list[str]], reach: Reach, folder: Path, copy: Copy) -> int:
    copy.enter()
    for tests in groups:
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        plugins = [_Selection(tests, reach), Caching()]
        code = int(pytest.main([*files, "-x", "--tb=no", *options(folder)], plugins=plugins))
        if not _runs_mutants(mutant, code):
            return BLIND
        if code:
            return code
    return 0


def _runs_mutants(mutant: Mutant, code: int) -> bool:
    """Whether the tests that just ran had the mutant, as far as they had its module at all.

    Of a line that runs at import, tests may be tried that do not load the module. Then it is loaded
    here, as they would have done; it may be one that cannot be loaded any more.
    """
    loaded = proof(mutant)
    if loaded is None and code == 0 and mutant.at_import:
        with suppress(Exception):  # a mutant may raise whatever it wants
            importlib.import_module(mutant.source.name)
        return proof(mutant) is not False
    # a module that cannot be imported is not there, and a test failed for it
    return loaded is True or (loaded is None and code != 0)
