"""``python -m tests.sdksuite [PYTEST ARGUMENTS]``: run the suite, compare it with what is known.

Exits with 0 when exactly the tests of `known.FAILING` fail. With ``-k`` or other selections only
the tests that ran are compared.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from tests.sdksuite.download import PROJECT, unpacked
from tests.sdksuite.known import FAILING, TIMING
from tests.sdksuite.service import trust

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WITHOUT = "perf_tests"  # they measure, and need further packages of Microsoft's
PROCESSES = 12  # most tests wait, some of them for minutes


def main(arguments: list[str]) -> int:
    """Download what is missing, run, print the difference."""
    unpacked()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        _run(report, trust(Path(folder)), arguments)
        if not report.exists():
            return 2
        outcomes = dict(_outcomes(report))
    return _compare(outcomes)


def _run(report: Path, trusting: dict[str, str], arguments: list[str]) -> None:
    path = os.pathsep.join([str(ROOT), str(HERE / "shim"), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-c",
                str(HERE / "pytest.ini"),
                "-p",
                "no:cacheprovider",
            ),
            *("--rootdir", str(PROJECT), f"--ignore={PROJECT / 'tests' / WITHOUT}"),
            *("-n", str(PROCESSES), "-q", f"--junit-xml={report}", *arguments),
            str(PROJECT / "tests"),
        ],
        env={
            **os.environ,
            **trusting,
            "PYTHONPATH": path.rstrip(os.pathsep),
            "SERVICEBUS_ENDPOINT_SUFFIX": "",
        },
        check=False,
    )


def _outcomes(report: Path) -> Iterator[tuple[str, str]]:
    """Each test that was not skipped, and "passed" or the first line of its failure."""
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}".removeprefix("tests.")
        failures = [each for each in case if each.tag in ("failure", "error")]
        if failures:
            yield name, (failures[0].get("message") or "").split("\n")[0][:200]
        elif not any(each.tag == "skipped" for each in case):
            yield name, "passed"


def _compare(outcomes: dict[str, str]) -> int:
    failed = {name: outcome for name, outcome in outcomes.items() if outcome != "passed"}
    new = {name: outcome for name, outcome in failed.items() if name not in FAILING | TIMING}
    fixed = sorted(name for name in FAILING if outcomes.get(name) == "passed")
    passed = len(outcomes) - len(failed)
    print(f"{passed} passed, {len(failed) - len(new)} failed as known, {len(new)} failed otherwise")
    for name, outcome in sorted(new.items()):
        print(f"failed: {name}: {outcome}")
    for name in fixed:
        print(f"passes now, take it out of tests/sdksuite/known.py: {name}")
    return 1 if new or fixed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
