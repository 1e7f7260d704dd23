"""The tests that take long: ``tox`` leaves them out, ``tox -e long`` runs them.

Some hundred of sixteen thousand tests take half of the time. Which ones, ``long.txt`` says: the
ids of tests that took more processor time than `most_seconds`, as measured. To measure anew::

    TESTS_MEASURED=FOLDER tox -e docs,unit,contract,integration,simulation-short
    python tests/long.py --list FOLDER

What reads the package's source, and the building of the documentation, stays in the default run,
however long it takes: it says of most changes what they forgot.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIST = HERE / "long.txt"
MEASURED = "TESTS_MEASURED"
MOST_SECONDS = {"tests/docs/": 8.0, "tests/integration/": 3.0, "tests/simulation/": 4.0, "": 1.5}
"""Of processor time of the test and its processes, and an eighth of what it waited.

A page is one test of all its blocks, and a test of real processes starts several of them.
"""
_STAYS = ("tests/unit/test_", "tests/docs/test_building.py")


def ids() -> frozenset[str]:
    """The ids of the tests that take long."""
    return frozenset(LIST.read_text(encoding="utf-8").splitlines())


def most_seconds(name: str) -> float:
    """How long the test of this id may take in the default run."""
    return next(most for folder, most in MOST_SECONDS.items() if name.startswith(folder))


class Measure:
    """A plugin that writes what each test of a process took into a file of the folder."""

    def __init__(self, folder: str) -> None:
        self._file = Path(folder) / f"{os.getpid()}.json"
        self._took: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Measure one test with its fixtures."""
        before, begun = _processor_seconds(), os.times().elapsed
        result = yield
        waited = os.times().elapsed - begun
        self._took[item.nodeid] = _processor_seconds() - before + waited / 8
        return result

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self._took), encoding="utf-8")


def _processor_seconds() -> float:
    both = (resource.getrusage(each) for each in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in both)


def main(arguments: list[str]) -> int:
    """``--list FOLDER`` writes the list anew; anything else is for pytest, which runs them."""
    if arguments[:1] == ["--list"]:
        took: dict[str, float] = {}
        for file in Path(arguments[1]).glob("*.json"):
            took |= json.loads(file.read_text(encoding="utf-8"))
        long = {
            name
            for name, seconds in took.items()
            if seconds > most_seconds(name) and not name.startswith(_STAYS)
        }
        kept = {name for name in ids() if name not in took}
        LIST.write_text("".join(f"{name}\n" for name in sorted(long | kept)), encoding="utf-8")
        print(f"{len(long)} of {len(took)} tests took longer than they may")
        return 0
    files = sorted({name.partition("::")[0] for name in ids()})
    return int(pytest.main([*arguments, "-m", "long", *files]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
