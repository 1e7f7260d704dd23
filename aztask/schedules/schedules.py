"""``app.schedules``: the schedules of an app, those of its code and those made at run time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, Protocol, TypedDict, Unpack, cast

from aztask.address.owner import Owner
from aztask.errors import ConfigurationError, DuplicateTask
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.schedules.engine import OccurrenceSends, OccurrenceStarts, ScheduleEngine
from aztask.schedules.graphs import pack_graph
from aztask.schedules.rules import Missed, Overlap, Rules, checked_rules, task_id_of
from aztask.schedules.runner import Runner
from aztask.schedules.stored import BACKFILLED, DUE, SENT, TRIGGERED, Made, Schedule, key_of
from aztask.schedules.template import Definition
from aztask.schedules.triggers import Trigger, latest_times, trigger_of
from aztask.schedules.view import Code, View
from aztask.stores.records.base import ResultStore
from aztask.stores.records.damage import Damaged
from aztask.stores.records.schedules import COMMITTED, schedules_of
from aztask.support import chance
from aztask.support.durations import to_epoch_seconds
from aztask.support.interactive import interactive
from aztask.support.parts import Part
from aztask.task import Task
from aztask.taskoptions import check_options
from aztask.workflows.graphs import Graph, calls_of

NAME_CHARACTERS: Final = 200
MOST_BACKFILLED: Final = 10_000
NO_RESULTS: Final = (
    "schedules need a result store, which keeps when each was last due: give the App "
    'results="local://" or another'
)


class ScheduleOptions(TypedDict, total=False):
    """The options of `App.schedule` and `Schedules.create`. Give one of the first three.

    Durations are seconds or a ``timedelta``.

    * `cron`: a cron expression of five fields, or a name such as ``@daily``. Needs ``pip install
      "aztask[schedules]"``.
    * `every`: a duration of at least 1 second, counted from midnight UTC.
    * `at`: one time, a ``datetime`` with a time zone. One that has passed is shown as ``missed``.
    * `tz`: the time zone of `cron`, such as "Europe/Berlin"; "UTC" by default.
    * `jitter`: sends each task up to this much later, each always by the same time.
    * `missed`: which occurrences are sent when no worker ran, or all were late: the "latest" one
      (default), "all" of them, or with "skip" those that are at most `grace` late.
    * `max_missed`: the most that "all" and "skip" send at once, the latest ones; 100 by default.
    * `grace`: how late an occurrence is still sent; however late by default, with "skip" 60
      seconds.
    * `overlap`: if the task or the workflow of the last occurrence has not ended: "allow" (default)
      sends the next, "skip" skips it, "queue" sends it afterwards.
    * `overlap_limit`: after this time, a task that has not ended counts as lost; a day by default.
    * `release`: while workers with different code run, the definition with the higher release
      counts; of equal ones that whose first worker started later. 0 by default.
    """

    cron: str
    every: float | timedelta
    at: datetime
    tz: str
    jitter: float | timedelta
    missed: Missed
    max_missed: int
    grace: float | timedelta
    overlap: Overlap
    overlap_limit: float | timedelta
    release: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule as it was written in the code: what is sent, when, and by which rules."""

    name: str
    call: Graph
    trigger: Trigger
    rules: Rules
    release: int = 0


@dataclass(frozen=True, slots=True)
class _InCode:
    """A schedule of the code, as a worker's `Runner` takes it."""

    name: str
    release: int
    plan: Plan
    schedules: Schedules

    def define(self) -> Definition:
        """What the store keeps of it; raises what a send of its task raises."""
        return self.schedules._definition(self.plan)


class StoreConnection(Protocol):
    """What opens the result store of a process: the app's connections."""

    def results(self) -> ResultStore | None:
        """The result store; None if there is none."""


class Schedules:
    """The schedules of one app, as ``app.schedules``. Any thread may call.

    A name without a dot gets the app's name in front: ``"nightly"`` is ``"shop.nightly"``. Every
    method but `declare` raises ConfigurationError without a result store, and BrokerUnavailable.
    """

    def __init__(
        self,
        app_name: str,
        connections: StoreConnection,
        sends: OccurrenceSends,
        codec: Codec,
        tasks: Mapping[str, object] = MappingProxyType({}),
        *,
        workflows: OccurrenceStarts,
    ) -> None:
        """The app makes it.

        * `tasks`: the app's tasks by their names. A schedule without an owner that was made at run
          time is this app's if its task is.
        """
        self._tasks = tasks
        self._acts_for: Owner | None = None
        self._app_name = app_name
        self._connections = connections
        self._codec = codec
        self._sends = sends
        self._workflows = workflows
        self._engine: ScheduleEngine | None = None
        self._engine_of: object = None
        self.declared: dict[str, Plan] = {}

    @property
    def results(self) -> ResultStore | None:
        """The store of this process that keeps them; None if there is none."""
        return self._connections.results()

    @property
    def engine(self) -> ScheduleEngine:
        """The engine on this process's connections."""
        results = self.results
        store = schedules_of(results)
        if results is None or store is None:
            raise ConfigurationError(NO_RESULTS)
        if self._engine is None or self._engine_of is not store:
            self._engine_of = store
            if self._acts_for is not None:
                store = store.of(self._acts_for)
            code = Code(self._app_name, self.declared, self._tasks)
            self._engine = ScheduleEngine(
                results, store, self._codec, self._sends, code, workflows=self._workflows
            )
        return self._engine

    def act_for(self, owner: Owner) -> None:
        """Act on the schedules of this owner: for commands that no app was named for."""
        self._acts_for, self._engine = owner, None

    def full_name(self, name: str) -> str:
        """The name, with the app's in front if it has no dot. Raises ConfigurationError."""
        if (
            not isinstance(name, str)
            or not 0 < len(name) <= NAME_CHARACTERS
            or (not name.isprintable())
        ):
            raise ConfigurationError(
                f"a schedule's name is a text of 1 to {NAME_CHARACTERS} printable characters, not "
                f"{name!r:.80}"
            )
        return name if "." in name else f"{self._app_name}.{name}"

    # -- definitions -------------------------------------------------------------------------

    def plan(self, name: str, call: Graph, **options: Unpack[ScheduleOptions]) -> Plan:
        """Check a schedule. Raises ConfigurationError, and TypeError for wrong arguments."""
        full, where = self.full_name(name), f"schedule {name!r}"
        check_options(options, ScheduleOptions, where)
        if not isinstance(call, Graph):
            raise ConfigurationError(
                f"{where} takes a call of a task or a workflow, such as report.s(), not "
                f"{call!r:.80}"
            )
        if next(calls_of(call), None) is None:
            raise ConfigurationError(f"{where}: the workflow has no tasks")
        self._workflows.check(call)
        release: object = options.get("release", 0)
        if type(release) is not int or not 0 <= release < 10**9:
            raise ConfigurationError(f"{where}: release takes a whole number, not {release!r}")
        times = (options.get("cron"), options.get("every"), options.get("at"))
        trigger = trigger_of(where, *times, options.get("tz", "UTC"))
        return Plan(full, call, trigger, checked_rules(where, options), release)

    def declare(self, plan: Plan) -> Plan:
        """Add a schedule of the code. Raises DuplicateTask if the name is taken."""
        if plan.name in self.declared and not interactive():
            raise DuplicateTask(f"two schedules have the name {plan.name}; rename one of them")
        self.declared[plan.name] = plan
        return plan

    def create(self, name: str, call: Graph, **options: Unpack[ScheduleOptions]) -> None:
        """Make a schedule at run time, or replace one that was made at run time.

        ::

            app.schedules.create(f"report-{customer}", report.s(customer), cron="0 6 * * 1")

        It lasts until `delete`, whatever code runs. Options and errors are those of `App.schedule`.
        Workers notice it within 2 seconds, and within 30 seconds on Azure Tables. Raises
        DuplicateTask if the code of an app declares a schedule of that name.
        """
        self.make(self.plan(name, call, **options))

    def make(self, plan: Plan) -> None:
        """As `create`, for a schedule that was checked."""
        engine = self.engine
        definition = self._definition(plan)
        for _ in range(4):
            view = _readable(engine, plan.name)
            if plan.name in self.declared or (view and view.schedule.of_code):
                raise DuplicateTask(f"schedule {plan.name} is one of the code; choose another name")
            if view is not None and view.schedule.digest == definition.digest:
                return
            if engine.define(definition, plan.release, "", view, of_code=False):
                return
        raise ConfigurationError(f"schedule {plan.name} is being changed by others; try again")

    def delete(self, name: str) -> bool:
        """Delete a schedule with its occurrences; False if there was none.

        Tasks that were sent stay. Workers whose code declares the schedule make it again.
        """
        engine, full = self.engine, self.full_name(name)
        with suppress(Damaged):  # then it is ours, and deleting it is the way to make it anew
            if engine.view(full) is None:
                return False
        return engine.store.delete(full)

    def _definition(self, plan: Plan) -> Definition:
        call = next(calls_of(plan.call))
        task, options = cast("Task[..., Any]", call.task), call.options
        if call is not plan.call:
            body, queue = pack_graph(self._codec, plan.call), self._sends.route(task, options)
            message = TaskMessage(plan.name, task.name, queue, body)
            digests = self._codec.digests
            return Definition(message, plan.trigger, plan.rules, graph=True, digests=digests)
        body, content_type, encoding = self._codec.encode_arguments(*call.plain_arguments())
        message = TaskMessage(
            plan.name,
            task.name,
            self._sends.route(task, options),
            body,
            content_type,
            encoding,
            session=options.get("session"),
            ordered=options.get("ordered", task.ordered),
        )
        expires = options.get("expires", task.expires)
        return Definition(
            message,
            plan.trigger,
            plan.rules,
            float(options.get("delay", 0.0)),
            expires,
            digests=self._codec.digests,
        )

    # -- control -----------------------------------------------------------------------------

    def view(self, name: str) -> View | None:
        """A schedule as the store has it; None if there is none. Raises Damaged."""
        return self.engine.view(self.full_name(name))

    def pause(self, name: str) -> bool:
        """Make no occurrences until `resume`; False if there is no such schedule."""

        def paused(view: View) -> Schedule | None:
            if view.schedule.paused_at is not None:
                return None
            return replace(view.schedule, paused_at=self.engine.store.now())

        return self.engine.change(self.full_name(name), paused) is not None

    def resume(self, name: str) -> bool:
        """Go on after `pause`; False if there is no such schedule.

        Occurrences of the time in between are not made: `backfill` makes them.
        """

        def resumed(view: View) -> Schedule | None:
            if view.schedule.paused_at is None:
                return None
            now = self.engine.store.now()
            return replace(view.schedule, paused_at=None, watermark=now, left={})

        return self.engine.change(self.full_name(name), resumed) is not None

    def trigger(self, name: str) -> str | None:
        """Send the schedule's task now; returns the task's id, None if there is no such schedule.

        The other occurrences stay as they are, and `overlap` does not matter. If the process dies
        on the way, workers send the task. Raises ConfigurationError if its definition is damaged.
        """
        engine, full = self.engine, self.full_name(name)
        token = chance.token(4)

        def add(view: View) -> tuple[Schedule, list[Made]]:
            now = round(engine.store.now(), 3)
            task_id = f"{task_id_of(full, now, view.mark)}-{token}"
            made = Made(now, task_id, now, TRIGGERED, DUE, "", "command")
            return replace(view.schedule, made=view.schedule.made + 1), [made]

        view = engine.transact(full, add)
        if view is None:
            return None
        made = next(each for each in view.open if each.task_id.endswith(token))
        sent = engine.send(view, made)
        if sent.state != SENT:
            raise ConfigurationError(f"schedule {full}: its task was not sent: {sent.why}")
        return sent.task_id

    def backfill(self, name: str, start: datetime, end: datetime) -> list[str] | None:
        """Send the tasks of past times from `start` to `end`, those that were not sent before.

        Returns the ids of the tasks, at most `MOST_BACKFILLED`; None if there is no such schedule.
        A time whose occurrence was sent is skipped, as long as its row or its result is kept. Times
        after the schedule's watermark come by themselves, and are skipped, too.
        """
        engine, full = self.engine, self.full_name(name)
        view = engine.view(full)
        if view is None:
            return None
        times = past_times(engine, view, start, end)
        ids: list[str] = []
        for number in range(0, len(times), COMMITTED):
            ids += self._backfill(full, times[number : number + COMMITTED])
        return ids

    def _backfill(self, full: str, times: Sequence[float]) -> list[str]:
        engine = self.engine
        rows = engine.store.newest(full, 10 * MOST_BACKFILLED, key_of(times[-1]))
        known = {row.key for row in rows}
        new = [at for at in times if key_of(at) not in known]
        if not new:
            return []

        def add(view: View) -> tuple[Schedule, list[Made]]:
            now = engine.store.now()
            made = [
                Made(at, task_id_of(full, at, view.mark), now, BACKFILLED, DUE, "", "command")
                for at in new
            ]
            return replace(view.schedule, made=view.schedule.made + len(made)), made

        view = engine.transact(full, add)
        if view is None:
            return []
        keys = {key_of(at) for at in new}
        sent = [each for each in view.open if each.key in keys]
        ended = [engine.send(view, made) for made in sent]
        return [made.task_id for made in ended if made.state == SENT]

    # -- workers -----------------------------------------------------------------------------

    def definitions(self) -> list[Definition]:
        """The definitions of the code's schedules."""
        return [self._definition(plan) for plan in self.declared.values()]

    def runner(self, by: str, part: Part | None = None) -> Runner:
        """What a worker does for schedules, see `Runner`. `by`: its name."""
        declared = [_InCode(plan.name, plan.release, plan, self) for plan in self.declared.values()]
        return Runner(self.engine, declared, by, part=part)

    @property
    def wanted(self) -> bool:
        """True if there is something to do: a schedule in the code, or one in the store."""
        if self.declared:
            return True
        store = schedules_of(self._connections.results())
        return store is not None and store.any()


def _readable(engine: ScheduleEngine, name: str) -> View | None:
    try:
        return engine.view(name)
    except Damaged as damage:
        raise ConfigurationError(
            f"schedule {name} cannot be read ({damage.reason}); delete it and make it again"
        ) from None


def past_times(engine: ScheduleEngine, view: View, start: datetime, end: datetime) -> list[float]:
    """The times that `Schedules.backfill` looks at, in order, at most `MOST_BACKFILLED`."""
    first, last = to_epoch_seconds(start, "start"), to_epoch_seconds(end, "end")
    last = min(last, view.schedule.watermark)
    if first >= last:
        return []
    trigger = engine.definition(view).trigger
    return latest_times(trigger, first - 0.001, last, MOST_BACKFILLED)
