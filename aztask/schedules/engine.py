"""Changes schedules in the result store, and sends their occurrences."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from threading import Lock
from typing import Any, Final, Protocol, TypeAlias

from aztask.address.owner import Owner
from aztask.context import SCHEDULE, SCHEDULED_AT
from aztask.errors import AztaskError, BrokerUnavailable, CodecError, ConfigurationError
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.schedules.graphs import GraphReader, later
from aztask.schedules.rules import decide, due_times, is_busy, jitter_of
from aztask.schedules.stored import (
    DUE,
    PLANNED,
    REFUSED,
    REMEMBERED,
    SENT,
    SKIPPED,
    WAITING,
    Made,
    Schedule,
    read_made,
)
from aztask.schedules.template import (
    Definition,
    is_signed_before,
    read_template,
    template_of,
)
from aztask.schedules.triggers import latest_times, next_time
from aztask.schedules.view import (
    FORGOTTEN_SECONDS,
    NO_CODE,
    Claim,
    Code,
    View,
    read_claim,
    read_view,
)
from aztask.stores.events.event import Event
from aztask.stores.records.base import ResultStore
from aztask.stores.records.damage import Damaged
from aztask.stores.records.schedules import COMMITTED, ScheduleStore
from aztask.stores.records.workflows import ROOT, workflows_of
from aztask.stores.rows import Kept, New, change
from aztask.support.display import one_line, plural
from aztask.support.failpoint import hit
from aztask.task import Task
from aztask.workflows.graph import read_root
from aztask.workflows.graphs import Graph

# -- The events of occurrences: that one was sent, and that some were skipped, and why.


def sent_event(schedule: str, message: TaskMessage, made: Made, now: float) -> Event:
    """The task of an occurrence was sent, `now`."""
    late = max(0.0, now - made.at)
    reason = f"schedule {schedule}"
    return Event(
        "occurrence_sent",
        made.task_id,
        message.task,
        message.queue,
        wait_seconds=late,
        reason=reason,
    )


def skipped_event(schedule: str, message: TaskMessage | None, made: Made) -> Event:
    """An occurrence is not sent. message: None if it cannot be read."""
    task, queue = (message.task, message.queue) if message is not None else ("", "")
    reason = f"schedule {schedule}: {made.why}"
    return Event("occurrence_skipped", made.task_id, task, queue, reason=reason)


def missed_event(schedule: str, message: TaskMessage, missed: Sequence[float], rule: str) -> Event:
    """Occurrences were left out because they were late; rule: that of `missed=`."""
    first, last = (datetime.fromtimestamp(at, UTC) for at in (missed[0], missed[-1]))
    times = f"{first:%Y-%m-%dT%H:%M:%SZ}"
    if len(missed) > 1:
        times += f" to {last:%Y-%m-%dT%H:%M:%SZ}"
    reason = (
        f"schedule {schedule}: {plural(len(missed), 'occurrence')} missed, {times} "
        f"(missed={rule!r})"
    )
    return Event("occurrence_skipped", "", message.task, message.queue, reason=reason)


logger = logging.getLogger(__name__)

TRIES: Final = 12
KEPT: Final = 200
"""Occurrences that are kept of each schedule."""

PRUNE_EVERY: Final = 50
DEFINITIONS: Final = 500
RETURN_SECONDS: Final = 86400.0
"""A definition that comes back within this time goes on where it left."""

GIVE_UP_SECONDS: Final = 86400.0
MOST_COUNTED: Final = 1_000
"""The most missed occurrences that one event counts."""


class OccurrenceSends(Protocol):
    """The sends of an app, as its schedules need them."""

    def route(self, task: Task[..., Any] | None, options: Mapping[str, Any]) -> str:
        """The queue for a task and the options of its send."""
        ...

    def send_occurrence(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Mapping[str, Any],
        headers: Mapping[str, Any],
    ) -> None:
        """Send a task; one whose id is known is not sent again."""
        ...

    def report(self, event: Event) -> None:
        """Write the event of an occurrence that is sent, or skipped."""
        ...


class OccurrenceStarts(Protocol):
    """The workflows of an app, as its schedules need them."""

    def check(self, graph: Graph) -> None:
        """Raise TypeError for arguments that do not match, ConfigurationError for its size."""
        ...

    def start_occurrence(self, graph: Graph, workflow: str, headers: Mapping[str, Any]) -> None:
        """Start a workflow with these headers on its messages; a known one is not started again."""
        ...


Commit: TypeAlias = tuple[Schedule, Sequence[Made]]
"""A new head, and the occurrences that are made with it."""


class HeadCell:
    """The head of a schedule, for `aztask.stores.rows.change`.

    * `written`: the schedule after the commit, None before it.
    """

    def __init__(self, engine: ScheduleEngine, name: str) -> None:
        self._engine = engine
        self._name = name
        self.written: View | None = None

    def read(self) -> View | None:
        """The schedule; None if there is none."""
        return self._engine.view(self._name)

    def write(self, new: Commit, before: View | None) -> bool:
        """Replace the head of the schedule that was read."""
        assert before is not None  # noqa: S101  # without a schedule there is no new head
        self.written = self._engine.commit(before, *new)
        return self.written is not None


class ScheduleEngine:
    """The schedules of one result store. Any thread may call; a forked child makes its own.

    `conflicts` counts the writes that another process's write made void.
    """

    def __init__(
        self,
        results: ResultStore,
        store: ScheduleStore,
        codec: Codec,
        sends: OccurrenceSends,
        code: Code = NO_CODE,
        *,
        workflows: OccurrenceStarts,
    ) -> None:
        self._workflows = workflows
        self._code = code
        self.results = results
        self.store = store
        self.conflicts = 0
        self._codec = codec
        self._sends = sends
        self._definitions: OrderedDict[bytes, Definition] = OrderedDict()
        self._lock = Lock()

    # -- reading -----------------------------------------------------------------------------

    def views(self) -> Iterator[tuple[str, View | Damaged]]:
        """The schedules of this owner, and those that it may adopt, by their names.

        Damaged for those that cannot be read.
        """
        for kept in self.store.overview():
            name, found = kept.head.schedule, read_view(kept)
            if self._is_ours(name, found, kept.owner):
                yield name, found

    def all_views(self) -> Iterator[tuple[str, View | Damaged, Owner | None]]:
        """The schedules of all owners, to show them: as `views`, and None for ours."""
        for kept in self.store.overview(everyone=True):
            name, found = kept.head.schedule, read_view(kept)
            yield name, found, None if self._is_ours(name, found, kept.owner) else kept.owner

    def others(self) -> Iterator[tuple[str, View | Damaged, Owner]]:
        """The schedules of other owners, and those without one that are not ours."""
        for name, found, owner in self.all_views():
            if owner is not None:
                yield name, found, owner

    def view(self, name: str) -> View | None:
        """One schedule; None if there is none. Raises Damaged.

        It may be one without an owner that the code no longer declares: you can delete it.
        """
        if (kept := self.store.read(name)) is None:
            return None
        found = read_view(kept)
        if kept.owner != self.store.owner and not self._code.has(name, self._task_of(found)):
            return None
        if isinstance(found, Damaged):
            raise found
        return found

    def _is_ours(self, name: str, view: View | Damaged, owner: Owner) -> bool:
        """Whether it is this owner's, or has none and this process may adopt it."""
        if owner == self.store.owner:
            return True
        if owner.known:
            return False
        of_code = isinstance(view, Damaged) or view.schedule.of_code
        return self._code.adopts(name, self._task_of(view), of_code=of_code)

    def _task_of(self, view: View | Damaged) -> str:
        if isinstance(view, Damaged):
            return ""
        try:
            return self.definition(view).message.task
        except (Damaged, CodecError, ConfigurationError, BrokerUnavailable):
            return ""

    def definition(self, view: View) -> Definition:
        """Its definition, verified.

        Raises Damaged, CodecError, ConfigurationError, and BrokerUnavailable without its key.
        """
        key = view.name.encode() + b"\0" + view.schedule.template
        with self._lock:
            known = self._definitions.get(key)
        if known is None:
            known = read_template(self._codec, view.name, view.schedule.template)
            with self._lock:
                self._definitions[key] = known
                while len(self._definitions) > DEFINITIONS:
                    self._definitions.popitem(last=False)
        return known

    def next_due(self, view: View) -> float | None:
        """When its next occurrence is due; None if there is none."""
        return next_time(self.definition(view).trigger, view.schedule.watermark)

    # -- definitions -------------------------------------------------------------------------

    def define(
        self, definition: Definition, release: int, by: str, view: View | None, *, of_code: bool
    ) -> View | None:
        """Make a schedule, or replace its definition; None if another process was faster.

        The new definition goes on where the old one is. If its times differ, what is due by the old
        one is decided in the same transaction, and the first occurrence of the new one is after
        now. But a definition that comes back within a day goes on where it left, or behind the
        occurrences that were made since then: it loses none, and no time is made twice.

        If the process dies behind the commit, any worker sends what it made.
        """
        now, template = self.store.now(), template_of(self._codec, definition)
        claimed_at = 0.0 if of_code else None
        if view is None:
            new = Schedule(template, definition.digest, release, now, now, now, by, claimed_at)
            # An app's without an owner that has this name, but is not ours, keeps its place.
            apart = self.store.read(definition.name) is not None
            if apart and self.view(definition.name) is not None:
                return None
            tag = self.store.commit(definition.name, new.pack(), None, apart=apart)
            return None if self._committed(tag) is None else self.view(definition.name)
        made: list[Made] = []
        new = view.schedule
        if not self._same_times(view, definition):
            changed = self._change_times(view, definition, now, by)
            if changed is None:
                return None
            new, made = changed
        new = replace(
            new,
            template=template,
            digest=definition.digest,
            release=release,
            # Workers of releases before 0.2 that live have started before now, and leave it so.
            deployed_at=now,
            claimed_at=claimed_at if new.claimed_at is None or not of_code else new.claimed_at,
        )
        rows = [each.row for each in made]
        tag = self._committed(self.store.commit(view.name, new.pack(), view.tag, rows))
        if tag is None:
            return None
        if made:
            hit("occurrence-made")
        return replace(
            view, schedule=new, tag=tag, open=(*view.open, *made), owner=self.store.owner
        )

    def _same_times(self, view: View, definition: Definition) -> bool:
        try:
            return self.definition(view).trigger == definition.trigger
        except (Damaged, CodecError, ConfigurationError):
            return False

    def _change_times(
        self, view: View, definition: Definition, now: float, by: str
    ) -> tuple[Schedule, list[Made]] | None:
        """The head with the watermark of a definition with other times, and what was due before it.

        None if more is due than one transaction takes: then some of it was made, and the caller
        reads the schedule again.
        """
        old = view.schedule
        made: list[Made] = []
        if view.state_at(now) == "active":
            try:
                known = self.definition(view)
            except (Damaged, CodecError, ConfigurationError):
                known = None
            if known is not None:
                times = due_times(old, known.trigger, known.rules, now)
                if len(times) > COMMITTED:
                    self.fire(view, by)
                    return None
                old, made = self._decide(view, known, times, now, by)
        left = {key: at for key, at in old.left.items() if key != definition.digest}
        left[view.schedule.digest] = now
        newest = sorted(left, key=lambda key: left[key])[-REMEMBERED:]
        watermark, ended = now, old.left.get(definition.digest, 0.0)
        if now - ended <= RETURN_SECONDS and old.paused_at is None:
            last = max((each.at for each in made), default=0.0)
            watermark = min(now, max(ended, last, self._last_planned(view.name, now)))
        return replace(old, watermark=watermark, left={key: left[key] for key in newest}), made

    def _last_planned(self, name: str, now: float) -> float:
        """The time of the newest occurrence by any definition; `now` if it is not known."""
        rows = self.history(name, KEPT)
        planned = next((each.at for each in rows if each.kind == PLANNED), None)
        if planned is not None:
            return planned
        return now if len(rows) >= KEPT else 0.0

    def adopt(self, view: View) -> View | None:
        """Take a schedule without an owner; None if another process was faster.

        The commit says whose it is; the head stays.
        """
        tag = self._committed(self.store.commit(view.name, view.schedule.pack(), view.tag))
        return None if tag is None else self.view(view.name)

    def is_signed_before(self, view: View) -> bool:
        """Whether a release before 0.2 has signed its definition, so that `sign_anew` is due."""
        return is_signed_before(self._codec, view.schedule.template)

    def sign_anew(self, view: View) -> View | None:
        """Sign its definition for its place; None if another process was faster."""
        template = template_of(self._codec, self.definition(view))
        return self.commit(view, replace(view.schedule, template=template), ())

    def claim(self, name: str, claim: Claim) -> bool:
        """Make or renew a claim; False if another process was faster.

        With a new claim, those that ended an hour ago are deleted, and damaged ones: there is one
        for each definition that was ever deployed.
        """
        if not claim.tag:
            kept, now = self.store.read(name), self.store.now()
            for row in kept.claims if kept is not None else ():
                known = read_claim(row)
                if known is None or now - known.seen_at > FORGOTTEN_SECONDS:
                    self.store.unclaim(name, row)
        return self.store.claim(name, claim.row)

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
        cell = HeadCell(self, name)

        def edited(view: View | None) -> New[Commit, None] | Kept[View | None]:
            new, made = (None, ()) if view is None else edit(view)
            return Kept(view) if new is None else New((new, made), None)

        unchanged = change(cell, edited, f"schedule {name}", tries=TRIES)
        return unchanged if cell.written is None else cell.written

    def commit(self, view: View, new: Schedule, made: Sequence[Made]) -> View | None:
        """Replace a head and make occurrences; the schedule as it is then, None if it changed."""
        rows = [each.row for each in made]
        tag = self._committed(self.store.commit(view.name, new.pack(), view.tag, rows))
        if tag is None:
            return None
        return replace(
            view, schedule=new, tag=tag, open=(*view.open, *made), owner=self.store.owner
        )

    # -- occurrences -------------------------------------------------------------------------

    def fire(self, view: View, by: str) -> View | None:
        """Make the occurrences that are due, and move the watermark; None if the view is stale.

        If the process dies behind the commit, any worker sends the occurrences (`repair`).
        """
        now, definition = self.store.now(), self.definition(view)
        times = due_times(view.schedule, definition.trigger, definition.rules, now)
        new, made = self._decide(view, definition, times, now, by)
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
        return replace(view, schedule=new, tag=tag, open=(*view.open, *made))

    def _decide(
        self, view: View, definition: Definition, times: Sequence[float], now: float, by: str
    ) -> tuple[Schedule, list[Made]]:
        return decide(
            view.name,
            view.schedule,
            times,
            definition.rules,
            now,
            waiting=view.waiting,
            runs=self.runs,
            by=by,
            mark=view.mark,
        )

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
                self._sends.report(skipped_event(view.name, definition.message, each))
        if definition.rules.late_seconds is None and definition.rules.latest > len(times):
            return  # nothing was left out
        passed = latest_times(definition.trigger, view.schedule.watermark, now, MOST_COUNTED)
        missed = [at for at in passed if not times or at < times[0]]
        if missed:
            event = missed_event(view.name, definition.message, missed, definition.rules.missed)
            logger.warning("%s", event.reason)
            self._sends.report(event)

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
        return replace(view, schedule=new, tag=tag, open=tuple(rest))

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
            self._sends.report(sent_event(view.name, self.definition(view).message, made, now))
        return made

    def _send_task(self, view: View, made: Made, now: float) -> None:
        definition = self.definition(view)
        jitter = jitter_of(made.task_id, definition.rules.jitter)
        delay = definition.delay + max(0.0, jitter - max(0.0, now - made.at))
        headers = {SCHEDULE: view.name, SCHEDULED_AT: made.at}
        if definition.graph:
            graph = GraphReader(self._codec, self._code.tasks).read(definition.message.body)
            self._workflows.start_occurrence(later(graph, delay), made.task_id, headers)
            return
        args, kwargs = self._codec.decode_arguments(definition.message)
        options = {**definition.options, "task_id": made.task_id, "delay": delay}
        self._sends.send_occurrence(definition.message.task, args, kwargs, options, headers)

    def _refused(self, view: View, made: Made, error: Exception) -> Made:
        logger.error("schedule %s: %s is not sent: %s", view.name, made.task_id, error)
        refused = replace(made, state=REFUSED, why=one_line(str(error), 300))
        self._sends.report(skipped_event(view.name, None, refused))
        return refused

    def runs(self, task_id: str, old: bool = False) -> bool:
        """True unless the task or workflow has ended. A task without a row may be in the queue.

        * `old`: it counts as lost, unless it waits inside its code.
        """
        record = self.results.get(task_id)
        store = None if record is not None else workflows_of(self.results)
        if store is not None and (found := store.read([(task_id, ROOT)])[0]) is not None:
            return not old and read_root(found.data).ended_at is None
        if old:
            return record is not None and record.parked_at(self.store.now())
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
