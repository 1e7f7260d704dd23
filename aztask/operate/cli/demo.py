"""``aztask demo``: tasks on the embedded queue, with real files and a real worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self
from urllib.parse import quote

import click

import aztask
from aztask.app import App
from aztask.errors import NotFound
from aztask.operate.action import results_of
from aztask.operate.cli.demo_work import (
    APP,
    QUEUE,
    Facts,
    facts,
    fails_first,
    files_under,
    portable,
    register,
)
from aztask.operate.cli.failures import CommandFailed
from aztask.operate.cli.init import first_commands
from aztask.operate.cli.options import json_option
from aztask.operate.cli.output import ProgressLine, print_fields, print_json, print_table
from aztask.result import AsyncResult
from aztask.stores.records.base import RunRecord, State
from aztask.support.display import plural, visible

# -- the demo's worker -----------------------------------------------------------------------
#
# A real ``aztask worker`` in a child process, which ends with the demo.


MOST_CONCURRENCY = 16
PATIENCE_SECONDS = 5.0


class DemoWorker:
    """A context manager that leaves no process behind, whatever happens in the block.

    The worker has a session of its own, so that Ctrl-C reaches only the demo, which then ends the
    worker. If the demo itself is killed, the worker ends when the queue is empty (--burst).
    """

    def __init__(self, folder: Path, address: str) -> None:
        self._folder = folder
        self._address = address
        self._log = folder / "worker.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the worker: SIGTERM, SIGTERM again, then SIGKILL."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        for end in (process.terminate, process.terminate, process.kill):
            end()
            try:
                process.wait(PATIENCE_SECONDS)
                return
            except subprocess.TimeoutExpired:
                continue
        process.wait()

    def start(self) -> None:
        """Start the worker on the demo's queue."""
        slots = max(2, min(MOST_CONCURRENCY, os.cpu_count() or 1))
        command = [sys.executable, "-m", "aztask", "worker", "-A", APP, "-Q", QUEUE]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  # our own command, without a shell
                [*command, "--burst", "-c", str(slots), "--name", "demo"],
                cwd=self._folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def runs(self) -> bool:
        """Whether it still runs. Raises CommandFailed, with its last log line, if it failed."""
        code = self._process.poll() if self._process is not None else None
        if code:
            lines = self._log.read_text("utf-8", "replace").splitlines() or ["its log is empty"]
            raise CommandFailed(f"the demo's worker ended with exit code {code}: {lines[-1]}")
        return code is None

    def _environment(self) -> dict[str, str]:
        """This process's environment, without the settings of the user's own apps."""
        kept = {name: value for name, value in os.environ.items() if not _is_setting(name)}
        home = Path(aztask.__file__).parents[1]
        path = [] if home.name.endswith("-packages") else [str(home)]
        if before := kept.get("PYTHONPATH"):
            path.append(before)
        return {
            **kept,
            **({"PYTHONPATH": os.pathsep.join(path)} if path else {}),
            "AZTASK_BROKER": self._address,
            "AZTASK_RESULTS": self._address,
            "AZTASK_EVENTS": str(self._folder / "events"),
        }


def _is_setting(name: str) -> bool:
    return name.startswith("AZTASK_") and name != "AZTASK_DEBUG"


CHECK_SECONDS = 0.05
SLOWEST = 5
NAMED = 3


@dataclass(frozen=True, slots=True)
class DemoFile:
    """One file: its name, and the last run and the value of its task."""

    name: str
    record: RunRecord | None
    value: Any

    @property
    def succeeded(self) -> bool:
        """Whether the task of this file succeeded."""
        return self.record is not None and self.record.state is State.SUCCEEDED

    @property
    def retried(self) -> bool:
        """Whether it took more than one run."""
        return self.record is not None and self.record.key.hop > 0

    @property
    def seconds(self) -> float:
        """How long the last run took."""
        outcome = self.record.outcome if self.record is not None else None
        return outcome.duration if outcome is not None else 0.0


@click.command("demo")
@click.argument("path", type=click.Path(exists=True), required=False)
@json_option
def command(path: str | None, as_json: bool) -> None:
    """Run one task for each file under PATH, and check every result.

    The default PATH is Python's standard library. A worker computes the size, lines, SHA-256 and
    names of each file. Some tasks fail on purpose at first, to show their retries. Queue, results
    and events are in a temporary folder, which is deleted at the end.
    """
    root, names = _input(path)
    with _ended_by_signals(), tempfile.TemporaryDirectory(prefix="aztask-demo-") as folder:
        jobs, seconds, checks = _run(Path(folder), root, names)
    wrong = [job.name for job in jobs if not _right(root, job, checks[job.name])]
    if as_json:
        print_json(
            {
                "tasks": len(jobs),
                "succeeded": sum(job.succeeded for job in jobs),
                "retried": sum(job.retried for job in jobs),
                "seconds": round(seconds, 3),
            }
        )
    else:
        _print_summary(jobs, seconds)
        if not wrong:
            commands = ["aztask init shop", *first_commands("shop"), "aztask result"]
            click.echo("\n  ".join(["\nTry next:", *commands]), err=True)
    if wrong:
        shown = ", ".join(visible(name) for name in wrong[:NAMED])
        more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        raise CommandFailed(f"{plural(len(wrong), 'result')} of {len(jobs):,} wrong: {shown}{more}")


def _input(path: str | None) -> tuple[str, list[str]]:
    """(folder, names of the files in it)."""
    given = Path(path).absolute() if path is not None else _sources()
    root, names = (
        (str(given), list(files_under(str(given))))
        if given.is_dir()
        else (str(given.parent), [given.name])
    )
    if not names:
        raise NotFound(f"there is no file under {str(given)!r}; name another PATH")
    fail = sum(map(fails_first, names))
    click.echo(
        f"{plural(len(names), 'file')} under {visible(root)}, one task each; "
        f"{plural(fail, 'task')} will fail on purpose at first",
        err=True,
    )
    return root, names


def _sources() -> Path:
    """The standard library; where that is one archive, as in Windows' embeddable Python, aztask."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return library if library.is_dir() else Path(__file__).parents[2]


def _run(
    folder: Path, root: str, names: Sequence[str]
) -> tuple[list[DemoFile], float, dict[str, Facts]]:
    """(how each file's task ended, seconds from the first send, the facts computed here)."""
    address = f"local://{quote(str(folder))}/demo.db"
    app = App("demo", broker=address, results=address, events=str(folder / "events"))
    task = register(app)
    started = time.monotonic()
    try:
        with DemoWorker(folder, address) as worker:
            base = portable(root)
            results = task.map([(base, portable(name)) for name in names])
            worker.start()
            checks = _watch(app, worker, root, names)
            seconds = time.monotonic() - started
        for name in names[len(checks) :]:
            checks[name] = facts(root, name)
        jobs = [_job(app, *pair) for pair in zip(names, results, strict=True)]
    finally:
        app.close()
    return jobs, seconds, checks


def _watch(app: App, worker: DemoWorker, root: str, names: Sequence[str]) -> dict[str, Facts]:
    """Show progress until the worker has ended, and compute the same facts here."""
    progress = ProgressLine(len(names), "tasks")
    checks: dict[str, Facts] = {}
    left = iter(names)
    try:
        while worker.runs():
            stats = app.broker.stats(QUEUE)
            waiting = stats.scheduled or 0
            open_tasks = (stats.active or 0) + (stats.leased or 0) + waiting
            note = f", {waiting} waiting for a retry" if waiting else ""
            progress.show(len(names) - open_tasks, note)
            _check_some(root, left, checks)
        stats = app.broker.stats(QUEUE)
        open_tasks = sum((stats.active or 0, stats.leased or 0, stats.scheduled or 0))
        progress.show(len(names) - open_tasks, last=True)
    except BaseException:
        progress.clear()
        raise
    return checks


def _check_some(root: str, left: Iterator[str], checks: dict[str, Facts]) -> None:
    """Compute for `CHECK_SECONDS`, or sleep if everything is computed."""
    until = time.monotonic() + CHECK_SECONDS
    for name in left:
        checks[name] = facts(root, name)
        if time.monotonic() >= until:
            return
    time.sleep(max(0.0, until - time.monotonic()))


def _job(app: App, name: str, result: AsyncResult[Facts]) -> DemoFile:
    record = results_of(app).get(result.id)
    value = None
    if record is not None and record.outcome is not None and record.outcome.value is not None:
        value = app.codec.decode_value(record.outcome.value)
    return DemoFile(name, record, value)


def _right(root: str, job: DemoFile, expected: Facts) -> bool:
    """Whether the result is right. A file may have changed, so a mismatch is computed again."""
    return job.succeeded and (job.value == expected or job.value == facts(root, job.name))


def _print_summary(jobs: Sequence[DemoFile], seconds: float) -> None:
    values = [job.value for job in jobs if isinstance(job.value, dict)]
    succeeded = sum(job.succeeded for job in jobs)
    print_fields(
        [
            ("tasks", f"{len(jobs):,}"),
            ("succeeded", f"{succeeded:,}"),
            ("retried", f"{sum(job.retried for job in jobs):,}"),
            ("failed", f"{len(jobs) - succeeded:,}"),
            ("seconds", f"{seconds:.2f}"),
            ("tasks/s", f"{len(jobs) / max(seconds, 1e-6):,.0f}"),
            ("bytes", f"{sum(value.get('size', 0) for value in values):,}"),
            ("lines", f"{sum(value.get('lines', 0) for value in values):,}"),
        ]
    )
    click.echo()
    slowest = sorted(jobs, key=lambda job: job.seconds, reverse=True)[:SLOWEST]
    print_table(["seconds", "slowest files"], [[f"{j.seconds:.3f}", j.name] for j in slowest])


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the block like Ctrl-C, so that its clean-up runs."""
    numbers = (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))
    before = [signal.signal(number, _leave) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
