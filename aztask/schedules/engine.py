"""Changes schedules in the result store, and sends their occurrences."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Final, Protocol

from aztask.context import SCHEDULE, SCHEDULED_AT
from aztask.errors import AztaskError, BrokerUnavailable, CodecError, ConfigurationError
from aztask.events.event import Event
from aztask.message.codec import Codec
from aztask.results.base import ResultStore
from aztask.results.damage import Damaged
from aztask.results.schedules import Kept, ScheduleStore
from aztask.schedules.deciding import decide, due_times, is_busy, jitter_of
from aztask.schedules.occurrenceevents import missed_event, sent_event, skipped_event
from aztask.schedules.stored import (
    DUE,
    REFUSED,
    SENT,
    SKIPPED,
    WAITING,
    Made,
    Schedule,
    read_made,
    read_schedule,
)
from aztask.schedules.template import Definition, read_template, template_of
from aztask.schedules.triggers import latest_times, next_time
from aztask.support.display import one_line
from aztask.support.failpoint import hit

logger = logging.getLogger(__name__)

TRIES: Final = 12
KEPT: Final = 200
"""Occurrences that are kept of each schedule."""

PRUNE_EVERY: Final = 50
REMEMBERED: Final = 500
GIVE_UP_SECONDS: Final = 86400.0
MOST_COUNTED: Final = 1_000
"""The most missed occurrences that one event counts."""


class OccurrenceSender(Protocol):
    """The part of an app that sends the task of an occurrence."""

    def __call__(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Mapping[str, Any],
        headers: Mapping[str, Any],
    ) -> None:
        """Send a task; one whose id is known is not sent again."""
        ...


@dataclass(frozen=True, slots=True)
class View:
    """A schedule as it was read: its head, its tag, and its open occurrences."""

    name: str
    schedule: Schedule
    tag: str
    open: tuple[Made, ...] = ()

    @property
    def waiting(self) -> int:
        """How many occurrences wait for the task before them."""
        return sum(each.state == WAITING for each in self.open)


class ScheduleEngine:
    """The schedules of one result store. Any thread may call; a forked child makes its own.

    `conflicts` counts the writes that another process's write made void.
    """

    def __init__(
        self,
        results: ResultStore,
        store: ScheduleStore,
        codec: Codec,
        send: OccurrenceSender,
        report: Callable[[Event], None] = lambda event: None,
    ) -> None:
        """report: gets the event of each occurrence that is sent, or skipped."""
        self._report = report
        self.results = results
        self.store = store
        self.conflicts = 0
        self._codec = codec
        self._send = send
        self._definitions: OrderedDict[bytes, Definition] = OrderedDict()
        self._lock = Lock()

    # -- reading -----------------------------------------------------------------------------

    def views(self) -> Iterator[tuple[str, View | Damaged]]:
        """All schedules by their names; Damaged for those that cannot be read."""
        for kept in self.store.overview():
            try:
                yield kept.head.schedule, _view(kept)
            except Damaged as damage:
                yield kept.head.schedule, damage

    def view(self, name: str) -> View | None:
        """One schedule; None if there is none. Raises Damaged."""
        kept = self.store.read(name)
        return None if kept is None else _view(kept)

    def definition(self, view: View) -> Definition:
        """Its definition, verified. Raises Damaged, CodecError, ConfigurationError."""
        key = view.name.encode() + b"\0" + view.schedule.template
        with self._lock:
            known = self._definitions.get(key)
        if known is None:
            known = read_template(self._codec, view.name, view.schedule.template)
            with self._lock:
                self._definitions[key] = known
                while len(self._definitions) > REMEMBERED:
                    self._definitions.popitem(last=False)
        return known

    def next_due(self, view: View) -> float | None:
        """When its next occurrence is due; None if there is none."""
        return next_time(self.definition(view).trigger, view.schedule.watermark)

    # -- definitions -------------------------------------------------------------------------

    def define(
        self,
        definition: Definition,
        release: int,
        deployed_at: float,
        by: str,
        view: View | None,
        *,
        claimed: bool,
    ) -> bool:
        """Make a schedule, or replace its definition; False if another process was faster.

        Where its times changed, the next occurrence is after now; otherwise the watermark stays.
        """
        now, template = self.store.now(), template_of(self._codec, definition)
        claim = now if claimed else None
        new = Schedule(template, definition.digest, release, deployed_at, now, now, by, claim)
        if view is not None:
            old = view.schedule
            same = self._same_times(view, definition)
            new = replace(
                old,
                template=template,
                digest=definition.digest,
                release=release,
                deployed_at=deployed_at,
                watermark=old.watermark if same else now,
                claimed_at=new.claimed_at,
            )
        tag = None if view is None else view.tag
        return self._committed(self.store.commit(definition.name, new.pack(), tag)) is not None

    def _same_times(self, view: View, definition: Definition) -> bool:
        try:
            return self.definition(view).trigger == definition.trigger
        except (Damaged, CodecError, ConfigurationError):
            return False

    def change(self, name: str, edit: Callable[[View], Schedule | None]) -> View | None:
        """Change the head until no other write comes between; returns the schedule as it is then.

        * `edit`: the new head; None leaves it as it is.

        None if there is no such schedule. Raises Damaged and BrokerUnavailable.
        """
        return self.transact(name, lambda view: (edit(view), ()))

    def transact(
        self, name: str, edit: Callable[[View], tuple[Schedule | None, Sequence[Made]]]
    ) -> View | None:
        """Like `change`; `edit` also gives the occurrences to make."""
        for _ in range(TRIES):
            view = self.view(name)
            if view is None:
                return None
            new, made = edit(view)
            if new is None:
                return view
            rows = [each.row for each in made]
            tag = self._committed(self.store.commit(name, new.pack(), view.tag, rows))
            if tag is not None:
                return View(name, new, tag, (*view.open, *made))
        raise BrokerUnavailable(f"other processes keep changing schedule {name}; try again")

    # -- occurrences -------------------------------------------------------------------------

    def fire(self, view: View, by: str, *, claimed: bool) -> View | None:
        """Make the occurrences that are due, and move the watermark; None if the view is stale.

        * `claimed`: the caller's code declares this schedule.

        If the process dies behind the commit, any worker sends the occurrences (`repair`).
        """
        now, definition = self.store.now(), self.definition(view)
        times = due_times(view.schedule, definition.trigger, definition.rules, now)
        new, made = decide(
            view.name,
            view.schedule,
            times,
            definition.rules,
            now,
            waiting=view.waiting,
            runs=self.runs,
            by=by,
        )
        if claimed and view.schedule.claimed_at is not None:
            new = replace(new, claimed_at=now)
        rows = [each.row for each in made]
        tag = self._committed(self.store.commit(view.name, new.pack(), view.tag, rows))
        if tag is None:
            return None
        hit("occurrence-made")
        self._report_made(view, definition, times, made, now)
        if made and made[0].at < now - 60.0:
            late = now - made[0].at
            logger.warning("schedule %s: %s is made %.0f s late", view.name, made[0].task_id, late)
        if new.made // PRUNE_EVERY != view.schedule.made // PRUNE_EVERY:
            self.store.prune(view.name, KEPT)
        return View(view.name, new, tag, (*view.open, *made))

    def _report_made(
        self,
        view: View,
        definition: Definition,
        times: Sequence[float],
        made: Sequence[Made],
        now: float,
    ) -> None:
        """Report the occurrences that are not sent: skipped ones, and those that were missed.

        times: those that the rules let through. If the process dies before this, or if another one
        makes more of them with its next commit, events are missing: the rows count.
        """
        for each in made:
            if each.state == SKIPPED:
                self._report(skipped_event(view.name, definition.message, each))
        if definition.rules.late_seconds is None and definition.rules.latest > len(times):
            return  # nothing was left out
        passed = latest_times(definition.trigger, view.schedule.watermark, now, MOST_COUNTED)
        missed = [at for at in passed if not times or at < times[0]]
        if missed:
            event = missed_event(view.name, definition.message, missed, definition.rules.missed)
            logger.warning("%s", event.reason)
            self._report(event)

    def admit(self, view: View, by: str) -> View | None:
        """Let the oldest waiting occurrence go if the task before it has ended.

        Returns the new view; the same one if it still waits, and None if the view is stale.
        """
        now, rules = self.store.now(), self.definition(view).rules
        if is_busy(view.schedule, rules, now, self.runs):
            return view
        first = next(each for each in view.open if each.state == WAITING)
        made = replace(first, state=DUE, made_at=now, why="", by=by)
        new = replace(view.schedule, last_id=made.task_id, last_at=now, by=by)
        row = made.row
        tag = self._committed(self.store.commit(view.name, new.pack(), view.tag, changed=[row]))
        if tag is None:
            return None
        rest = [made if each.key == made.key else each for each in view.open]
        return View(view.name, new, tag, tuple(rest))

    def send(self, view: View, made: Made) -> Made:
        """Send the task of an occurrence, then close the occurrence; returns it as it is then.

        If the process dies in between, it is sent again under the same id. One whose definition is
        damaged or wrongly signed is closed as refused. Raises BrokerUnavailable and other errors of
        the broker and of this process: then it stays open, and after `GIVE_UP_SECONDS` it is
        refused, too.
        """
        now = self.store.now()
        try:
            self._send_task(view, made, now)
        except (CodecError, Damaged) as error:
            made = self._refused(view, made, error)
        except AztaskError as error:
            if now - made.made_at < GIVE_UP_SECONDS:
                raise
            made = self._refused(view, made, error)
        else:
            made = replace(made, state=SENT, why="")
        hit("occurrence-sent")
        self.store.close_occurrence(view.name, made.key, made.row.data)
        if made.state == SENT:
            self._report(sent_event(view.name, self.definition(view).message, made, now))
        return made

    def _send_task(self, view: View, made: Made, now: float) -> None:
        definition = self.definition(view)
        args, kwargs = self._codec.decode_arguments(definition.message)
        jitter = jitter_of(made.task_id, definition.rules.jitter)
        delay = definition.delay + max(0.0, jitter - max(0.0, now - made.at))
        options = {**definition.options, "task_id": made.task_id, "delay": delay}
        headers = {SCHEDULE: view.name, SCHEDULED_AT: made.at}
        self._send(definition.message.task, args, kwargs, options, headers)

    def _refused(self, view: View, made: Made, error: Exception) -> Made:
        logger.error("schedule %s: %s is not sent: %s", view.name, made.task_id, error)
        refused = replace(made, state=REFUSED, why=one_line(str(error), 300))
        self._report(skipped_event(view.name, None, refused))
        return refused

    def runs(self, task_id: str) -> bool:
        """True unless the task has ended. One that the store does not know may be in the queue."""
        record = self.results.get(task_id)
        return record is None or not record.state.final

    def history(self, name: str, limit: int) -> list[Made]:
        """The newest occurrences, the newest first. Damaged ones are skipped."""
        found = []
        for row in self.store.newest(name, limit):
            try:
                found.append(read_made(row))
            except Damaged as damage:
                logger.warning("schedule %s: occurrence %s: %s", name, row.key, damage.reason)
        return found

    def _committed(self, tag: str | None) -> str | None:
        self.conflicts += tag is None
        return tag


def _view(kept: Kept) -> View:
    """Raises Damaged for a head that cannot be read. Damaged occurrences are logged, and stay."""
    name = kept.head.schedule
    schedule = read_schedule(kept.head.data)
    found = []
    for row in kept.open:
        try:
            found.append(read_made(row))
        except Damaged as damage:
            logger.error("schedule %s: occurrence %s: %s", name, row.key, damage.reason)
    return View(name, schedule, kept.head.tag, tuple(found))
