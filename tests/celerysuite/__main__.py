"""Run the suites and compare.

``python -m tests.celerysuite [celery|kombu] [ADDRESS] [PYTEST ARGUMENTS]``

An address is local, servicebus or storagequeue, or for Celery's suite redis: Kombu's own transport,
on which a test that fails for reasons of its own fails, too. Runs both suites on a local file,
unless you name others. Exits with 0 when exactly the tests that
`known` lists fail. With ``-k`` or other selections only the tests that ran are compared.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from xml.etree import ElementTree

from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.testing import emulator
from tests import azurite
from tests.celerysuite.download import tests_of
from tests.celerysuite.known import KNOWN, TIMING
from tests.celerysuite.redis import redis_server

HERE = Path(__file__).parent
REDIS = "redis"
"""Not ours: Celery's suite on Kombu's transport for the Redis that holds its results."""

ADDRESSES = ("local", "servicebus", "storagequeue", REDIS)
LIMIT = 7200
"""Seconds after which a run is ended: the suites take about half an hour on two cores."""

ON_REDIS = HERE / "waits_on_redis.py"
"""What `known` says of our addresses, shown on Kombu's transport."""

ALONE = (("test_worker.py", "test_pidbox_reset_after_repeated_control_errors"),)
"""Tests that have a process of their own: a test before it makes a solo worker in their process,
after which Celery refuses to wait for results."""


def main(arguments: list[str]) -> int:
    """Run both suites, or the one that the first argument names."""
    suites = {"kombu": kombu, "celery": celery}
    names = [arguments.pop(0)] if arguments and arguments[0] in suites else list(suites)
    address = arguments.pop(0) if arguments and arguments[0] in ADDRESSES else "local"
    if address == REDIS and names != ["celery"]:
        sys.exit("only Celery's suite runs on Redis: celery redis")
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
    """Run Celery's integration tests: one prefork worker, and results in Redis.

    Each file has a process of its own, and so have the tests of `ALONE`: some tests expect that no
    other file has left a subscription, or a worker, in their process.
    """
    project = tests_of("celery")
    tests = project / "t" / "integration"
    parts: list[tuple[Path | str, list[str]]] = [
        (file, _without(file.name)) for file in sorted(tests.glob("test_*.py"))
    ]
    parts += [(f"{tests / file}::{test}", []) for file, test in ALONE]
    if address == REDIS:
        parts.append((ON_REDIS, []))
    outcomes: dict[str, str] = {}
    with ExitStack() as stack:
        port = stack.enter_context(redis_server(folder))
        broker = {"TEST_BROKER": f"redis://127.0.0.1:{port}/1"}
        if address != REDIS:
            ours = stack.enter_context(broker_at(address, folder))
            broker = {**ours, "TEST_BROKER": "aztask://"}
        environment = {
            **broker,
            "TEST_BACKEND": f"redis://127.0.0.1:{port}/0",
            "REDIS_HOST": "127.0.0.1",
            "REDIS_PORT": str(port),
            "WORKER_LOGLEVEL": "INFO",  # as in the project's own runs: tests read the worker's log
        }
        for number, (part, options) in enumerate(parts):
            own = folder / str(number)
            own.mkdir()
            words = ["-p", "celery.contrib.pytest", "--rootdir", str(project)]
            outcomes |= _run(project, part, own, environment, [*words, *options, *arguments])
    return outcomes


def _without(file: str) -> list[str]:
    """Options that leave out the tests of a file that are run alone."""
    return [f"--deselect=t/integration/{file}::{test}" for each, test in ALONE if each == file]


def _run(
    project: Path,
    tests: Path | str,
    folder: Path,
    environment: Mapping[str, str],
    options: list[str],
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
