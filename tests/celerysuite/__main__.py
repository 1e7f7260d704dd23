"""Run the suites and compare.

``python -m tests.celerysuite [celery|kombu] [local|servicebus|storagequeue] [PYTEST ARGUMENTS]``

Runs both suites on a local file, unless you name others. Exits with 0 when exactly the tests that
`known` lists fail. With ``-k`` or other selections only the tests that ran are compared.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.testing import emulator
from tests import azurite
from tests.celerysuite.download import tests_of
from tests.celerysuite.known import KNOWN, TIMING
from tests.celerysuite.redis import redis_server

HERE = Path(__file__).parent
ADDRESSES = ("local", "servicebus", "storagequeue")
LIMIT = 7200
"""Seconds after which a run is ended: the suites take about half an hour on two cores."""


def main(arguments: list[str]) -> int:
    """Run both suites, or the one that the first argument names."""
    suites = {"kombu": kombu, "celery": celery}
    names = [arguments.pop(0)] if arguments and arguments[0] in suites else list(suites)
    address = arguments.pop(0) if arguments and arguments[0] in ADDRESSES else "local"
    codes = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="aztask-celerysuite-") as folder:
            outcomes = suites[name](Path(folder), address, arguments)
            codes.append(_compare(name, address, outcomes))
    return max(codes)


@contextmanager
def broker_at(address: str, folder: Path) -> Iterator[dict[str, str]]:
    """The environment for a broker at ``aztask://``."""
    if address == "local":
        yield {"AZTASK_BROKER": f"local://{folder}/queues.db"}
    elif address == "storagequeue":
        with azurite.running(folder / "azurite", service="queue") as queues:
            yield {"AZTASK_BROKER": queues.connection_string}
    else:
        with emulator() as bus:
            yield {
                "AZTASK_BROKER": bus.connection_string,
                ADMIN_VARIABLE: bus.admin_connection_string,
            }


def kombu(folder: Path, address: str, arguments: list[str]) -> dict[str, str]:
    """Run Kombu's tests for every transport."""
    tests = HERE / "kombusuite"
    options = ["--rootdir", str(tests), *arguments]
    with broker_at(address, folder) as environment:
        return _run(tests_of("kombu"), tests / "on_aztask.py", folder, environment, options)


def celery(folder: Path, address: str, arguments: list[str]) -> dict[str, str]:
    """Run Celery's integration tests: one prefork worker, and results in Redis."""
    project = tests_of("celery")
    with redis_server(folder) as port, broker_at(address, folder) as broker:
        environment = {
            **broker,
            "TEST_BROKER": "aztask://",
            "TEST_BACKEND": f"redis://127.0.0.1:{port}/0",
            "REDIS_HOST": "127.0.0.1",
            "REDIS_PORT": str(port),
            "WORKER_LOGLEVEL": "INFO",  # as in the project's own runs: tests read the worker's log
        }
        options = ["-p", "celery.contrib.pytest", "--rootdir", str(project), *arguments]
        return _run(project, project / "t" / "integration", folder, environment, options)


def _run(
    project: Path, tests: Path, folder: Path, environment: Mapping[str, str], options: list[str]
) -> dict[str, str]:
    """The outcome of each test. `project` holds the package ``t``."""
    report = folder / "report.xml"
    subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-c", str(HERE / "pytest.ini")),
            *(
                "-p",
                "no:cacheprovider",
                "-q",
                "--tb=short",
                f"--junit-xml={report}",
                *options,
                str(tests),
            ),
        ],
        env={**os.environ, **environment, "PYTHONPATH": str(project), "PATH": _path()},
        cwd=folder,
        timeout=LIMIT,
        check=False,
    )
    return dict(_outcomes(report)) if report.exists() else {}


def _path() -> str:
    """The PATH with this environment's programs first: some tests run ``celery``."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _outcomes(report: Path) -> Iterator[tuple[str, str]]:
    """Each test that was not skipped, and "passed" or the first line of its failure."""
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}".removeprefix("t.integration.")
        failures = [each for each in case if each.tag in ("failure", "error")]
        if failures:
            yield name, (failures[0].get("message") or "").split("\n")[0][:200]
        elif not any(each.tag == "skipped" for each in case):
            yield name, "passed"


def _compare(suite: str, address: str, outcomes: dict[str, str]) -> int:
    if not outcomes:
        return 2
    known = KNOWN[suite, address]
    failed = {name: outcome for name, outcome in outcomes.items() if outcome != "passed"}
    new = {name: outcome for name, outcome in failed.items() if name not in {**known, **TIMING}}
    fixed = sorted(name for name in known if outcomes.get(name) == "passed")
    passed = len(outcomes) - len(failed)
    print(
        f"{suite} on {address}: {passed} passed, {len(failed) - len(new)} failed as known,"
        f" {len(new)} failed otherwise"
    )
    for name, outcome in sorted(new.items()):
        print(f"failed: {name}: {outcome}")
    for name in fixed:
        print(f"passes now, take it out of tests/celerysuite/known.py: {name}")
    return 1 if new or fixed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
