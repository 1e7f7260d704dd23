"""Working on jobs: a process takes the row of a job, and goes on with it (`aztask.operate.jobs`).

Rules
1. One process works on a job at a time. It holds the row's lease, and every note of progress renews
   it by compare-and-set. If the process dies, another one takes over within `LEASE_SECONDS`.
2. To go on is to count what is left, and to act on that: an item that was confirmed is gone.
3. Where a replacement and the completion of its dead letter are no single transaction, the row says
   before each batch which generation each replay follows, and keeps that until the dead letter is
   settled, however many batches and processes later. A process that goes on sends the same messages
   again, which workers recognise, also if they have run by then. So each dead letter gets exactly
   one new generation, whenever a process dies.
4. Workers do not work on jobs: dashboards do, ``aztask mcp --allow-actions``, and ``aztask jobs
   run``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from threading import Event
from typing import Any, Final

from aztask.app import App
from aztask.errors import AztaskError, BrokerUnavailable, ConfigurationError
from aztask.limits.control import operator_name
from aztask.operate.action import Action
from aztask.operate.deadletters.actions import OnLetters, ReplayLetters, SelectedLetters
from aztask.operate.deadletters.letters import Positions
from aztask.operate.deadletters.view import InvocationKey
from aztask.operate.jobs import DONE, FAILED, OPEN, Job, job_of, ledger_for_jobs, packed_job
from aztask.operate.ledger import JOBS, Ledger, newest_first
from aztask.operate.requests import kind_of, prepare
from aztask.stores.rows import Row
from aztask.support import chance, clock
from aztask.support.display import mask, one_line, plural, safe_str
from aztask.support.parts import Part

logger = logging.getLogger("aztask.jobs")

FROM_COUNT: Final = 500
"""From so many items on, the page and MCP make a job of an action."""
LEASE_SECONDS: Final = 60.0
NOTED_EVERY: Final = 1.0
"""Seconds between two notes of progress."""
RETRY_SECONDS: Final = 15.0
HELD_SECONDS: Final = 3.0
"""Between two looks for dead letters that a process which died still holds."""
MOST_IDLE: Final = 60
"""Looks in a row in which nothing was done: leases are shorter than all of these together."""
LOOK_SECONDS: Final = 5.0
STOP_SECONDS: Final = 5.0
PAGE: Final = 200
"""Jobs that are read at once. A look reads at least the newest ones, and the open ones behind."""


def make_job(
    action: Action[Any], name: str, values: Mapping[str, str], *, by: str, via: str
) -> str:
    """Make a job of a request that was counted; returns its key.

    * `action`: what `prepare` made of the name and the values. It is not done here.

    Raises ConfigurationError for an action that is not over many items, or without a result store.
    """
    if not kind_of(name).many:
        raise ConfigurationError(f"{name} is done at once: it is no job")
    ledger = ledger_for_jobs(action.app)
    now = ledger.now()
    job = Job(
        name,
        {each: value for each, value in values.items() if value.strip()},
        by or operator_name(),
        via,
        one_line(mask(str(action)), 500),
        action.count,
        now,
        now,
        reach=_reach(action),
        before=now,
    )
    key = newest_first(now)
    ledger.write(JOBS, key, packed_job(job), None)
    ledger.remove(JOBS, ledger.old(JOBS, now))
    return key


# -- working on jobs -----------------------------------------------------------------------------


class _Taken(AztaskError):
    """Another process works on the job now, or it was cancelled."""


class _Stopping(AztaskError):
    """This process ends: the job waits for another one."""


class _Hold:
    """The row of the job that this process works on, and its lease.

    It is the journal of a replay, too (rule 3).
    """

    def __init__(self, ledger: Ledger, row: Row, job: Job, stopping: Event) -> None:
        self._ledger = ledger
        self._row = row
        self.job = job
        self._stopping = stopping
        self._noted = clock.monotonic()
        self.begun_with = 0

    def write(self, **fields: Any) -> None:
        """Change the row and renew the lease. Raises _Taken if the row is another one now."""
        now = self._ledger.now()
        job = replace(self.job, **{"changed": now, "until": now + LEASE_SECONDS, **fields})
        row = self._ledger.write(JOBS, self._row.place.key, packed_job(job), self._row)
        if row is None:
            raise _Taken("another process works on this job now, or it was cancelled")
        self._row, self.job, self._noted = row, job, clock.monotonic()

    def noted(self, done: int) -> None:
        """Note progress now and then. done: since this process began. Raises _Stopping."""
        if self._stopping.is_set():
            raise _Stopping("this process ends")
        if clock.monotonic() - self._noted >= NOTED_EVERY:
            self.write(done=min(self.job.count, self.begun_with + done))

    # -- the journal of a replay -------------------------------------------------------------

    def known(self) -> Mapping[InvocationKey, int]:
        """What the processes before this one had planned and not settled."""
        return {(each[0], each[1], each[2]): each[3] for each in self.job.plan}

    def plan(self, unsettled: Mapping[InvocationKey, int]) -> None:
        """Write what is about to be sent, and what was sent and may be a dead letter still."""
        self.write(plan=[[*key, before] for key, before in unsettled.items()])


class JobRunner:
    """Works on open jobs, one at a time. One thread; any number of processes.

    * `name`: of this process, for those who look at the job.
    """

    def __init__(self, app: App, name: str = "") -> None:
        self._app = app
        self._name = f"{name or operator_name()} {chance.token()}"
        self._stopping = Event()
        self._unfinished: set[str] = set()
        self._newest = ""
        """The first key of the last look: what comes behind was looked at."""

    def run(self, stopping: Event) -> None:
        """Work until `stopping` is set. A store that does not answer is asked again."""
        self._stopping = stopping
        while not stopping.is_set():
            try:
                worked = self.work_once()
            except AztaskError as error:
                logger.warning("jobs cannot be read: %s; trying again", safe_str(error))
                worked = None
            if worked is None:
                stopping.wait(LOOK_SECONDS)

    def work_once(self) -> Job | None:
        """Work on the oldest job that no process holds; None if there is none.

        Returns the job as it is afterwards. Raises BrokerUnavailable.
        """
        ledger = ledger_for_jobs(self._app)
        for row, found in reversed(list(self._open(ledger))):
            now = ledger.now()
            taken = replace(found, holder=self._name, until=now + LEASE_SECONDS, changed=now)
            held = ledger.write(JOBS, row.place.key, packed_job(taken), row)
            if held is not None:
                return self._work(_Hold(ledger, held, taken, self._stopping))
        return None

    def _open(self, ledger: Ledger) -> Iterator[tuple[Row, Job]]:
        """The open jobs that no process holds, the newest first, however many have ended since."""
        now, unfinished = ledger.now(), set[str]()
        for row in self._unread(ledger):
            found = job_of(row)
            if found is None or found.state != OPEN:
                continue
            unfinished.add(row.place.key)
            if found.until <= now:
                yield row, found
        self._unfinished = unfinished

    def _unread(self, ledger: Ledger) -> list[Row]:
        """The rows that can be open: those of the last look that were, and all that came since."""
        rows = ledger.page(JOBS, PAGE)
        page, newest = rows, rows[0].place.key if rows else ""
        while len(page) == PAGE and page[-1].place.key < (self._newest or "~"):
            page = ledger.page(JOBS, PAGE, page[-1].place.key)
            rows += page
        behind = sorted(self._unfinished - {row.place.key for row in rows})
        self._newest = newest
        return rows + [row for row in ledger.get(JOBS, behind) if row is not None]

    def _work(self, hold: _Hold) -> Job:
        """Act on what is left, and note how it ended. Crash window: see rules 2 and 3."""
        job = hold.job
        try:
            action = _within(prepare(self._app, job.kind, job.values), job)
            # What is gone was done by a process that died before it noted that.
            gone = job.count - action.count if isinstance(action, OnLetters) else 0
            hold.begun_with = min(job.count, max(job.done, gone))
            if isinstance(action, ReplayLetters):
                action.journal = hold
            action.act(by=job.by, via=f"{job.via}, as a job", progress=hold.noted)
            done = min(job.count, hold.begun_with + action.done)
            if (left := self._left(action, job)) > 0:
                self._wait(hold, left, done, moved=action.done > 0)
            else:
                hold.write(done=done, state=DONE, error="", holder="", until=0.0, plan=())
        except _Stopping:
            hold.write(done=hold.job.done, holder="", until=0.0)
        except _Taken:
            logger.info("job %s: another process goes on, or it was cancelled", job.key)
        except BrokerUnavailable as error:
            self._end(hold, OPEN, error)
        except AztaskError as error:
            self._end(hold, FAILED, error)
        except Exception as error:
            # Else each process would take it again, and end its turn with it.
            logger.exception("job %s failed unexpectedly", job.key)
            self._end(hold, FAILED, error)
        return hold.job

    def _left(self, action: Action[Any], job: Job) -> int:
        """Dead letters of the job that a process which died still holds: its leases run out."""
        if not isinstance(action, OnLetters) or not action.parts or _empties(action):
            return 0
        report = action.report
        stay = report.unreadable + report.held_back + report.refused
        return _within(prepare(self._app, job.kind, job.values), job).count - stay

    def _wait(self, hold: _Hold, left: int, done: int, *, moved: bool) -> None:
        """Leave the job open for a while, or end it if nothing moves."""
        idle = 0 if moved else hold.job.idle + 1
        what = f"{plural(left, 'dead letter')} of it: another process holds them"
        state = OPEN if idle < MOST_IDLE else FAILED
        until = self._now() + HELD_SECONDS if state == OPEN else 0.0
        hold.write(done=done, state=state, error=what, holder="", until=until, idle=idle)

    def _now(self) -> float:
        return ledger_for_jobs(self._app).now()

    def _end(self, hold: _Hold, state: str, error: Exception) -> None:
        """Note an error. An open job is tried again after a while, by any process."""
        why = one_line(mask(safe_str(error)), 500)
        logger.warning("job %s: %s", hold.job.key, why)
        now = clock.wall()
        try:
            now = ledger_for_jobs(self._app).now()
            after = now + RETRY_SECONDS if state == OPEN else 0.0
            hold.write(state=state, error=why, holder="", until=after)
        except AztaskError as again:
            logger.warning("job %s: its end was not noted: %s", hold.job.key, safe_str(again))


@contextmanager
def working(app: App) -> Iterator[None]:
    """Work on jobs on a thread of this process, until the end of the block."""
    part, stopping = Part("jobs"), Event()
    thread = part.thread(JobRunner(app).run, "aztask-jobs", stopping)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        part.stop()
        thread.join(STOP_SECONDS)


def _reach(action: Action[Any]) -> dict[str, int]:
    """The last position in each queue that an action on dead letters was counted with."""
    found: dict[str, int] = {}
    for part in action.parts if isinstance(action, OnLetters) else ():
        numbers = [each for each in part.selection.positions or () if isinstance(each, int)]
        if numbers:
            found[part.letters.queue] = max(numbers)
    return found


def _within(action: Action[Any], job: Job) -> Action[Any]:
    """The action without what came after the job was made."""
    if not isinstance(action, OnLetters):
        return action
    parts = [each for part in action.parts if (each := _part(part, job)).count]
    action.parts, action.count = parts, sum(each.count for each in parts)
    return action


def _empties(action: OnLetters) -> bool:
    """Whether it empties queues at once: nothing of it can be held."""
    return any(each.selection.everything for each in action.parts)


def _part(part: SelectedLetters, job: Job) -> SelectedLetters:
    positions = part.selection.positions
    if positions is None:
        if part.selection.everything:
            return part  # a service without positions empties the queue
        return replace(part, selection=replace(part.selection, before=job.before))
    last = job.reach.get(part.letters.queue)
    kept = Positions(
        each
        for each in positions
        if not isinstance(each, int) or (last is not None and each <= last)
    )
    return replace(part, selection=replace(part.selection, positions=kept), count=len(kept))
