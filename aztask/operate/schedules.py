"""Schedules: list and show them; pause, resume, trigger and backfill them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from typing import ClassVar, Final

from aztask.address.owner import NO_OWNER
from aztask.app import App
from aztask.errors import (
    AztaskError,
    BrokerUnavailable,
    CodecError,
    ConfigurationError,
    NotFound,
    ResultDamaged,
)
from aztask.operate.action import Action, Progress, results_of
from aztask.schedules.engine import ScheduleEngine
from aztask.schedules.rules import Rules
from aztask.schedules.runner import ASIDE
from aztask.schedules.schedules import MOST_BACKFILLED, Plan, past_times
from aztask.schedules.states import MISSED, state_of
from aztask.schedules.stored import Made
from aztask.schedules.triggers import Cron, Trigger, next_time
from aztask.schedules.view import View
from aztask.stores.records.base import ResultStore, WorkerRecord
from aztask.stores.records.damage import Damaged
from aztask.support.display import visible
from aztask.workflows.graphs import calls_of

__all__ = [
    "MOST_AT_ONCE",
    "BackfillSchedule",
    "EndBeforeStart",
    "Made",
    "NextTime",
    "Occurrences",
    "PauseSchedule",
    "ResumeSchedule",
    "ScheduleShown",
    "SetAside",
    "SeveralOwners",
    "TriggerSchedule",
    "backfill",
    "pause",
    "resume",
    "schedule",
    "schedules",
    "trigger",
]

NEXT_TIMES: Final = 5
MOST_AT_ONCE: Final = MOST_BACKFILLED
"""Tasks that one backfill sends at most."""


class SeveralOwners(AztaskError):
    """Several apps have a schedule of that name; name the app."""


class EndBeforeStart(AztaskError):
    """The end is before the start; give the earlier time first."""


@dataclass(frozen=True, slots=True)
class NextTime:
    """A coming time, as ISO 8601 text in UTC and in the schedule's time zone."""

    utc: str
    local: str


@dataclass(frozen=True, slots=True)
class SetAside:
    """Why running workers have put a schedule aside. since: UTC epoch seconds."""

    since: float
    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Details:
    """The rules of a schedule that a worker has started, and what became of them.

    * `unsent`: occurrences that were made and not sent.
    * `of_code`: whether code declares it; otherwise it was made at run time.
    """

    queue: str
    rules: Rules
    release: int
    made: int
    unsent: int
    of_code: bool


@dataclass(frozen=True, slots=True)
class ScheduleShown:
    """A schedule.

    * `state`: ``new`` if no worker has started it, ``unreadable`` with `damage`, or see
      `aztask.schedules.states.state_of`.
    * `owner`: of a schedule of another app, else None.
    * `details`: None if it is new or unreadable. `aside`: None if no worker has put it aside.
    """

    name: str
    state: str
    owner: str | None = None
    when: str = ""
    task: str = ""
    next: tuple[NextTime, ...] = ()
    details: Details | None = None
    aside: SetAside | None = None
    damage: str = ""


def schedules(
    app: App, workers: Sequence[WorkerRecord] | None = None
) -> tuple[list[ScheduleShown], dict[str, SetAside]]:
    """All schedules by name and owner, those of others too, and those that are put aside.

    workers: of the app's result store, if they are known; else they are read.

    Raises BrokerUnavailable, and ConfigurationError without a result store.
    """
    store, engine = _store(app), app.schedules.engine
    aside = _aside(store.workers() if workers is None or store is not app.results else workers)
    views = list(engine.all_views())
    now = engine.store.now()  # the service told its time with the answer above
    found = {name: _declared(plan, now) for name, plan in app.schedules.declared.items()}
    others = []
    for name, view, owner in views:
        shown = _described(engine, name, view, now)
        if owner is None:
            found[name] = shown
        else:
            others.append(replace(shown, owner=str(owner)))
    mine = [replace(each, aside=aside.get(name)) for name, each in found.items()]
    listed = sorted([*mine, *others], key=lambda each: (each.name, each.owner or ""))
    return listed, aside


@dataclass(frozen=True, slots=True)
class Occurrences:
    """A schedule with its newest occurrences, the newest first."""

    schedule: ScheduleShown
    made: list[Made]


def schedule(app: App, name: str, limit: int, *, any_owner: bool = False) -> Occurrences:
    """One schedule. Raises NotFound, ResultDamaged, SeveralOwners.

    any_owner: no app was named: the schedule of that name is meant whose owner has the app's
    broker, or if the app has none, that of any owner.
    """
    engine = _engine(app, name, any_owner)
    view = _found(app, name)
    shown = _described(engine, view.name, view, engine.store.now())
    aside = _aside(_store(app).workers()).get(view.name)
    return Occurrences(replace(shown, aside=aside), engine.history(view.name, limit))


def _store(app: App) -> ResultStore:
    """The store of its schedules. Raises ConfigurationError if it has none."""
    found = app.schedules.results
    return results_of(app) if found is None else found


def _aside(workers: Iterable[WorkerRecord]) -> dict[str, SetAside]:
    """The schedules that running workers have put aside."""
    found: dict[str, SetAside] = {}
    now = time.time()
    for worker in workers:
        for each in worker.failing if worker.state_at(now) == "alive" else ():
            if each.part.startswith(ASIDE):
                why = SetAside(each.since, worker.name, each.reason)
                found.setdefault(each.part.removeprefix(ASIDE), why)
    return found


def _described(
    engine: ScheduleEngine, name: str, view: View | Damaged, now: float
) -> ScheduleShown:
    if isinstance(view, Damaged):
        return ScheduleShown(name, "unreadable", damage=view.reason)
    row, state = view.schedule, state_of(engine, view, now)
    try:
        definition = engine.definition(view)
    except (Damaged, CodecError, ConfigurationError, BrokerUnavailable) as error:
        return ScheduleShown(name, "unreadable", damage=str(error))
    queue = definition.message.queue
    details = Details(queue, definition.rules, row.release, row.made, len(view.open), row.of_code)
    start = None if row.paused_at is not None else row.watermark
    return ScheduleShown(
        name,
        state,
        when=str(definition.trigger),
        task=_called(definition.message.task, workflow=definition.graph),
        next=_next_times(definition.trigger, start, now),
        details=details,
    )


def _called(task: str, *, workflow: bool) -> str:
    """What a schedule calls: a task, or the workflow that begins with it."""
    return f"{task} (workflow)" if workflow else task


def _declared(plan: Plan, now: float) -> ScheduleShown:
    call = next(calls_of(plan.call))
    return ScheduleShown(
        plan.name,
        "new" if next_time(plan.trigger, now) is not None else MISSED,
        when=str(plan.trigger),
        task=_called(call.task.name, workflow=call is not plan.call),
        next=_next_times(plan.trigger, now, now),
    )


def _next_times(trigger: Trigger, start: float | None, now: float) -> tuple[NextTime, ...]:
    """The next times after `start` that are not past; none if it is None."""
    times = [] if start is None else trigger.after(start)
    zone = trigger.zone if isinstance(trigger, Cron) else None
    return tuple(
        NextTime(
            datetime.fromtimestamp(each, UTC).isoformat().replace("+00:00", "Z"),
            datetime.fromtimestamp(each, zone).astimezone(zone).isoformat(),
        )
        for each in islice((each for each in times if each > now), NEXT_TIMES)
    )


def _engine(app: App, name: str, any_owner: bool) -> ScheduleEngine:
    """The engine for a schedule of that name, see `schedule`. Raises SeveralOwners."""
    _store(app)
    engine = app.schedules.engine
    if not any_owner:
        return engine
    full, broker = app.schedules.full_name(name), app.owner.of_broker
    owners = {
        owner
        for other, _, owner in engine.others()
        if other == full and (not broker.known or owner.of_broker in (broker, NO_OWNER))
    }
    if len(owners) > 1:
        text = ", ".join(sorted(map(str, owners)))
        raise SeveralOwners(f"{visible(full)} is a schedule of {text}: name the app with -A")
    if owners:
        app.schedules.act_for(owners.pop())
    return app.schedules.engine


def _found(app: App, name: str) -> View:
    try:
        view = app.schedules.view(name)
    except Damaged as damage:
        raise ResultDamaged(f"schedule {visible(name)} cannot be read: {damage.reason}") from None
    if view is not None:
        return view
    raise _not_found(app, name)


def _not_found(app: App, name: str) -> NotFound:
    full = app.schedules.full_name(name)
    if full in app.schedules.declared:
        return NotFound(
            f"schedule {visible(full)} is new: run aztask worker or aztask scheduler, which start "
            "it, and try again; to run its task now, use aztask send"
        )
    return NotFound(f"no schedule has the name {visible(full)}; aztask schedule list shows all")


# -- actions ---------------------------------------------------------------------------------


def pause(app: App, name: str, *, any_owner: bool = False) -> PauseSchedule:
    """Make no occurrences until `resume`, on all workers. Raises as `schedule` does."""
    _engine(app, name, any_owner)
    view = _found(app, name)
    return PauseSchedule(app, int(view.schedule.paused_at is None), name)


def resume(app: App, name: str, *, any_owner: bool = False) -> ResumeSchedule:
    """Go on after `pause`; times in between are skipped. Raises as `schedule` does."""
    _engine(app, name, any_owner)
    view = _found(app, name)
    return ResumeSchedule(app, int(view.schedule.paused_at is not None), name)


def trigger(app: App, name: str, *, any_owner: bool = False) -> TriggerSchedule:
    """Send the schedule's task now; the next times stay as they are. Raises as `schedule` does."""
    _engine(app, name, any_owner)
    _found(app, name)
    return TriggerSchedule(app, 1, name)


@dataclass(slots=True)
class PauseSchedule(Action[None]):
    """Pauses a schedule. count: 0 if it is paused already."""

    name: ClassVar[str] = "schedule-pause"

    schedule: str

    def __str__(self) -> str:
        return f"pause schedule {visible(self.schedule)}"

    def _act(self, progress: Progress) -> None:
        if not self.app.schedules.pause(self.schedule):
            raise _not_found(self.app, self.schedule)
        self.done = self.count


@dataclass(slots=True)
class ResumeSchedule(Action[None]):
    """Resumes a schedule. count: 0 if it is not paused."""

    name: ClassVar[str] = "schedule-resume"

    schedule: str

    def __str__(self) -> str:
        return f"resume schedule {visible(self.schedule)}"

    def _act(self, progress: Progress) -> None:
        if not self.app.schedules.resume(self.schedule):
            raise _not_found(self.app, self.schedule)
        self.done = self.count


@dataclass(slots=True)
class TriggerSchedule(Action[str]):
    """Sends a schedule's task; `act` returns its id."""

    name: ClassVar[str] = "schedule-trigger"

    schedule: str

    def __str__(self) -> str:
        return f"trigger schedule {visible(self.schedule)}"

    def _act(self, progress: Progress) -> str:
        task_id = self.app.schedules.trigger(self.schedule)
        if task_id is None:
            raise _not_found(self.app, self.schedule)
        self.done = 1
        return task_id


def backfill(
    app: App, name: str, start: datetime, end: datetime, *, any_owner: bool = False
) -> BackfillSchedule:
    """Send the tasks of past times that were not sent, at most `MOST_AT_ONCE`, the latest ones.

    start, end: without an offset, in the schedule's time zone. Raises as `schedule` does, and
    EndBeforeStart.
    """
    engine = _engine(app, name, any_owner)
    view = _found(app, name)
    found = engine.definition(view).trigger
    zone = found.zone if isinstance(found, Cron) else UTC
    first, last = (
        each if each.utcoffset() is not None else each.replace(tzinfo=zone) for each in (start, end)
    )
    if first > last:
        raise EndBeforeStart
    count = len(past_times(engine, view, first, last))
    return BackfillSchedule(app, count, name, first, last)


@dataclass(slots=True)
class BackfillSchedule(Action[list[str]]):
    """Sends the tasks of past times; `act` returns their ids.

    count: the times; those whose task was sent before are skipped.
    """

    name: ClassVar[str] = "schedule-backfill"

    schedule: str
    start: datetime
    end: datetime

    def __str__(self) -> str:
        first, last = self.start.isoformat(), self.end.isoformat()
        return f"backfill schedule {visible(self.schedule)} from {first} to {last}"

    def _act(self, progress: Progress) -> list[str]:
        ids = self.app.schedules.backfill(self.schedule, self.start, self.end) or []
        self.done = len(ids)
        progress(self.done)
        return ids
