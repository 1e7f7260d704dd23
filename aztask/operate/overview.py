"""Queues, workers, running tasks and failures at one glance, read again and again.

Rules
1. Everything comes from the broker and the result store, so it works from any machine that reaches
   both. Workers report every 5 seconds.
2. What cannot be read is one line in `Figures.problems`; the other figures are shown.
3. Rates are those between two readings: what each worker finished in the meantime.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from aztask.app import App
from aztask.operate.workers import RunningRow, Workers, heartbeats, running_rows
from aztask.queues.base import QueueStats
from aztask.stores.records.base import ResultStore, RunRecord, State, WorkerRecord
from aztask.support.display import safe_str

GONE_SECONDS: Final = 3600.0
"""Workers that stopped or fell silent longer ago than this are not shown."""

MOST_FAILURES: Final = 50
FAILURES_SECONDS: Final = 20.0
"""What each question for them may take."""
FAILURES_EVERY: Final = 3
"""Failures are listed in every third reading: it is the slowest question."""


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """A worker: its last report, its state, and tasks per second since the reading before."""

    record: WorkerRecord
    state: str
    rate: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """One reading. at: UTC epoch seconds. rate: tasks per second of all workers."""

    at: float = 0.0
    queues: Sequence[QueueStats] = ()
    workers: Sequence[WorkerFigures] = ()
    running: Sequence[RunningRow] = ()
    failures: Sequence[RunRecord] = ()
    rate: float | None = None
    problems: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Seen:
    """A worker's last report, and the rate between it and the one before."""

    at: float
    finished: int
    rate: float | None = None


@dataclass
class Reader:
    """Reads the figures of an app. queues: called in each reading.

    One thread at a time may call `read`; it may take as long as the services take to answer.
    """

    app: App
    queues: Callable[[], Sequence[str]]
    now: Callable[[], float] = time.time
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _failures: Sequence[RunRecord] = ()
    _turn: int = 0

    def read(self) -> Figures:
        """Read everything once; never raises for a service that does not answer."""
        problems: list[str] = []
        queues = self._stats(problems)
        workers: list[WorkerFigures] = []
        running: list[RunningRow] = []
        results = self.app.results
        if results is None:
            problems.append("without a result store, workers and tasks are not known")
        else:
            found = self._heartbeats(results, problems)
            workers = self._workers(found)
            running = self._running(found)
            self._list_failures(results, problems)
        rates = [each.rate for each in workers if each.rate is not None]
        return Figures(
            self.now(),
            queues,
            workers,
            running,
            self._failures,
            sum(rates) if rates else None,
            problems,
        )

    def _stats(self, problems: list[str]) -> list[QueueStats]:
        found: list[QueueStats] = []
        try:
            names = self.queues()
        except Exception as error:  # noqa: BLE001  # an SDK may raise anything (rule 2)
            problems.append(f"queues: {safe_str(error)}")
            return found
        for name in names:
            try:
                found.append(self.app.broker.stats(name))
            except Exception as error:  # noqa: BLE001
                problems.append(f"queue {name}: {safe_str(error)}")
        return found

    def _heartbeats(self, results: ResultStore, problems: list[str]) -> Workers:
        """The reports of this broker's workers that are not gone."""
        now = self.now()
        try:
            found = heartbeats(results, now, everyone=False)
        except Exception as error:  # noqa: BLE001
            problems.append(f"workers: {safe_str(error)}")
            return Workers((), {}, now)
        problems += [f"worker {name}: {damage}" for name, damage in found.damaged.items()]
        shown = [each for each in found.records if now - each.seen_at <= GONE_SECONDS]
        return replace(found, records=shown)

    def _workers(self, found: Workers) -> list[WorkerFigures]:
        shown = [WorkerFigures(each, found.state(each), self._rate(each)) for each in found.records]
        self._seen = {each.record.name: self._seen[each.record.name] for each in shown}
        return sorted(shown, key=lambda each: (each.state != "alive", -each.record.started_at))

    def _running(self, found: Workers) -> list[RunningRow]:
        alive = [each for each in found.records if found.state(each) == "alive"]
        if not alive:
            return []
        rows = running_rows(replace(found, records=alive), self.app.codec)
        return sorted(rows, key=lambda row: -row.seconds)

    def _rate(self, record: WorkerRecord) -> float | None:
        """Tasks per second between the worker's last two reports; None after its first one."""
        seen = self._seen.get(record.name)
        if seen is None:
            seen = self._seen[record.name] = _Seen(record.seen_at, record.finished)
        elif record.seen_at > seen.at:
            rate = max(0, record.finished - seen.finished) / (record.seen_at - seen.at)
            seen = self._seen[record.name] = _Seen(record.seen_at, record.finished, rate)
        return seen.rate

    def _list_failures(self, results: ResultStore, problems: list[str]) -> None:
        self._turn += 1
        if self._turn % FAILURES_EVERY != 1:
            return
        try:
            self._failures = self._newest_failures(results)
        except Exception as error:  # noqa: BLE001
            problems.append(f"failures: {safe_str(error)}")

    @staticmethod
    def _newest_failures(results: ResultStore) -> list[RunRecord]:
        """The newest `MOST_FAILURES` that failed. Raises BrokerUnavailable."""
        lines = results.lines(state=State.FAILED)
        found: list[RunRecord] = []
        while len(found) < MOST_FAILURES and not lines.ended:
            some = lines.more(FAILURES_SECONDS)
            while some and (left := MOST_FAILURES - len(found)) > 0:
                read = lines.read(some[:left], FAILURES_SECONDS)
                found += (run for run in read if run is not None)
                some = some[left:]
        return found
