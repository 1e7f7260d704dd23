"""Periodic chores of a worker: heartbeats, cancelled runs, old rows and events, workflows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from aztask.address.owner import NO_OWNER
from aztask.errors import AztaskError, CodecError, QueueNotFound
from aztask.limits.rates import ENTRY_PREFIX, ENTRY_SECONDS
from aztask.limits.storeclock import KEPT_SECONDS
from aztask.message.message import TaskMessage
from aztask.queues.base import Peeked, Position, QueueStats
from aztask.settlement import DeadLetter
from aztask.steps.keeping import StepPurge
from aztask.steps.parts import parts_of as streams_of
from aztask.steps.records import steps_of
from aztask.stores.events.retention import remove_old
from aztask.stores.payloads.holders import PayloadHolders, remove_ended
from aztask.stores.payloads.payloads import Payloads
from aztask.stores.records.base import Outcome, ResultStore, RunKey, RunRecord, State, WorkerRecord
from aztask.stores.records.controls import controls_of
from aztask.stores.records.schedules import schedules_of
from aztask.stores.records.tallies import Author
from aztask.stores.records.uniques import uniques_of
from aztask.stores.records.workflows import workflows_of
from aztask.stores.rows import KeepsRows
from aztask.support import chance
from aztask.support.parts import Part
from aztask.uniqueness.rules import QUIET
from aztask.version import release_of
from aztask.worker.lane import Work
from aztask.worker.pipeline.uniquekeys import unique_engine
from aztask.worker.pipeline.workflowends import WorkflowEnds
from aztask.worker.runtime import WorkerRuntime
from aztask.worker.stages import Stages
from aztask.worker.upkeep.heartbeat import Heartbeat, LostRuns
from aztask.worker.upkeep.recording import BacklogLooks, Recording
from aztask.workflows.joins import TaskEnd
from aztask.workflows.place import NodePlace
from aztask.workflows.repair import Repair
from aztask.workflows.starting import WorkflowLauncher

# -- Finds messages that the broker itself dead-lettered, by its own count or time to live.
#
# No worker sees that happen, so without this watch a caller would wait for their results forever.
# Each look reads some pages of each queue's dead letters, more while they bring news, and the next
# look continues there: at once, if the time of the look ended before the news did, so that other
# chores have their turn in between. So its cost does not depend on the number of dead letters, but
# the time until each one is found does. The first worker to find a dead letter records it, and only
# that worker reports it. Without a result store there is nothing to record, and no watch.

PAGE: Final = 100
OLD_PAGES: Final = 5
"""So many pages of a queue are read at one look without news."""
LOOK_SECONDS: Final = 2.0
"""After so many seconds a look reads no further page, but at least one of each queue."""

COUNT_EXCEEDED: Final = "MaxDeliveryCountExceeded"
TIME_EXPIRED: Final = "TTLExpiredException"
REASONS: Final = {COUNT_EXCEEDED: State.FAILED, TIME_EXPIRED: State.EXPIRED}
"""The broker's own reasons, as Service Bus spells them (its documentation of dead-letter queues),
and the state of a task after each."""


class DeadWatch:
    """Reads the dead letters of the worker's queues, some pages at a time."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._app = runtime.app
        self._clock = runtime.clock
        self._mailbox = runtime.mailbox
        self._journal = runtime.journal
        self._after: dict[str, Position | None] = dict.fromkeys(runtime.options.queues)

    @property
    def useful(self) -> bool:
        """Whether the broker dead-letters by itself and there is a result store."""
        return self._app.broker.capabilities.native_dead_letter and self._app.results is not None

    def look(self) -> bool:
        """Read the next pages of each queue. A queue that refuses does not stop the others.

        Returns whether the time of the look ended before the news did.
        """
        until, more = self._clock.monotonic() + LOOK_SECONDS, False
        for queue in self._after:
            try:
                more = self._look_at(queue, until) or more
            except AztaskError as error:
                logger.info(
                    "queue %s: its dead letters cannot be read, retry later: %s", queue, error
                )
        return more

    def _look_at(self, queue: str, until: float) -> bool:
        old = 0
        while old < OLD_PAGES:
            after = self._after[queue]
            page = self._app.broker.peek(queue, dead_letter=True, after=after, limit=PAGE)
            news = self._note(queue, page)
            old += not news
            self._after[queue] = page[-1].position if len(page) == PAGE else None
            if len(page) < PAGE:
                return False
            if self._clock.monotonic() >= until:
                return news
        return False

    def _note(self, queue: str, page: Sequence[Peeked]) -> bool:
        """Record the new ones, then report them. Returns whether there were any.

        Crash window: if the process dies in between, they are recorded but no worker reports them.
        The results are right; the event and the log line are missing.
        """
        found = list(self._own(queue, page))
        results = self._app.results
        if results is None or not found:
            return False
        news = results.bury([record for _, _, record in found])
        found = [each for each, new in zip(found, news, strict=True) if new]
        for message, letter, record in found:
            if record.outcome is not None:
                dead = DeadLetter(record.outcome.error_type, record.outcome.error)
                logger.warning(
                    "task %s %s was dead-lettered by the broker: %s: %s",
                    message.task,
                    message.id,
                    dead.reason,
                    dead.description,
                )
                count = letter.delivery_count
                self._mailbox.post(partial(self._journal.buried, message, queue, count, dead))
            if message.continued:  # the row of its wait admits signals
                with suppress(AztaskError):  # workers look at it again
                    self._app.sends.signals.ended(message.id, dead=True)
        self._set_bits(found)
        return bool(found)

    def _set_bits(self, found: Sequence[tuple[TaskMessage, Peeked, RunRecord]]) -> None:
        """Set the bits of tasks of workflows; what fails here, housekeeping of workflows does."""
        ends = [
            TaskEnd(
                message.workflow,
                NodePlace.read(message.node),
                message.generation,
                record.state,
                None,
                record.outcome.error_type if record.outcome else "",
                record.outcome.error if record.outcome else "",
                repeated=True,
            )
            for message, _, record in found
            if message.workflow is not None and message.node is not None
        ]
        if ends:
            WorkflowEnds(self._app.workflows.engine).ended(ends)

    def _own(
        self, queue: str, page: Sequence[Peeked]
    ) -> Iterable[tuple[TaskMessage, Peeked, RunRecord]]:
        """The letters that the broker itself made, each with the record of the run it ended."""
        now = self._clock.wall()
        oldest = now - self._app.settings.result_retention_seconds
        for letter in page:
            state = REASONS.get(letter.dead_letter_reason or "")
            if state is None or letter.enqueued_at < oldest:
                continue  # a worker's own, with an outcome; or older than the results that are kept
            try:
                message = self._app.message_in(
                    letter.envelope, queue, letter.position, any_age=True
                )
            except CodecError:
                continue  # not a message of aztask
            dead = DeadLetter(letter.dead_letter_reason or "", letter.dead_letter_description or "")
            outcome = Outcome(state, dead, None, dead.reason, dead.description, at=now)
            key = RunKey(*message.key)
            yield message, letter, RunRecord(key, message.task, queue, state, outcome=outcome)


logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
PROGRESS_SECONDS = 1.0
"""While a checkpoint is new, a heartbeat comes this long after the one before."""

PURGE_SECONDS = 60.0
PURGE_AGAIN_SECONDS = 5.0
EVENTS_SECONDS = 3600.0
PAYLOAD_SECONDS = 3600.0
STEPS_SECONDS = 3600.0
UNOWNED_SECONDS = 3600.0
"""Seconds between two looks for limits' entries that a former release left."""

PURGED_MANY = 1000
"""After a purge of this many records more may be left, since some stores stop after some seconds:
the next purge comes sooner."""

DRAINED_SECONDS = 0.1
DEAD_SECONDS = 15.0
GRAPH_SECONDS = 5.0
REMOTE_GRAPH_SECONDS = 30.0
IDLE_GRAPH_SECONDS = 60.0
"""Seconds between two looks at open workflows; the last one if the store is remote and there are
none, since every look costs requests."""

NO_LOSS_SECONDS = 3600.0
"""The same for runs of at-most-once tasks, if the app declares none: a former release of it may
have."""

AGAIN_SECONDS = 10.0
"""Seconds until a chore that failed is tried again, if its own time does not come before."""

QUIET_SECONDS = 1.0
REMOTE_QUIET_SECONDS = 5.0
REMOTE_WAITS_SECONDS = 2.0
"""Seconds between two looks at debounced tasks whose quiet time may be over. The last one is
between two looks for signals, while tasks wait."""

MOST_WAITING = 10_000
"""So many tasks that wait are read before a worker ends because its queues are empty."""


@dataclass(frozen=True, slots=True)
class Chore:
    """Something to do from time to time. name: what health shows if it fails."""

    name: str
    do: Callable[[], object]


class ChoreLane(Work[Chore]):
    """Does chores one after the other, on a thread of its own."""

    def __init__(self, runtime: WorkerRuntime, name: str) -> None:
        """name: of the part and the thread."""
        self._clock = runtime.clock
        self._lane = runtime.lane(name, self, threads=1)
        self._again: dict[str, tuple[float, Callable[[], object]]] = {}

    def __len__(self) -> int:
        return len(self._lane)

    @property
    def part(self) -> Part:
        """Where the chores that fail are noted, with their errors."""
        return self._lane.part

    def submit(self, name: str, chore: Callable[[], object]) -> None:
        """Do it as soon as those before it are done. name: what health shows if it fails."""
        self._again.pop(name, None)
        self._lane.submit([Chore(name, chore)])

    def try_again(self, now: float) -> None:
        """Start those that failed `AGAIN_SECONDS` ago."""
        for name, (at, chore) in list(self._again.items()):
            if now >= at:
                self.submit(name, chore)

    def stop(self) -> None:
        """Finish the pending chores and end the thread."""
        self._lane.stop()

    def work(self, chores: Sequence[Chore]) -> None:
        """Do these; one that fails is put aside until it succeeds, and the others are done."""
        part = self._lane.part
        for chore in chores:
            item = f"chore {chore.name}"
            try:
                chore.do()
            except Exception as error:  # the other chores are done
                known = item in part.aside()
                part.put_aside(item, error)
                self._again[chore.name] = (self._clock.monotonic() + AGAIN_SECONDS, chore.do)
                if isinstance(error, AztaskError):
                    logger.warning("%s failed, it will be tried again: %s", item, error)
                elif not known:
                    logger.error(
                        "%s failed unexpectedly, it will be tried again", item, exc_info=error
                    )
            else:
                part.take_back(item)


class Housekeeping:
    """Does the chores on threads of their own, so that none of them delays the supervisor.

    Heartbeats have a lane of their own: other workers end the at-most-once runs of a worker whose
    heartbeats stop. Deletions have one, too: they may take minutes, and tasks wait for the others.
    """

    def __init__(self, runtime: WorkerRuntime, heartbeat: Heartbeat, core: Stages) -> None:
        """heartbeat: knows what runs. core: stops the tasks that were cancelled."""
        app, clock = runtime.app, runtime.clock
        self._heartbeat = heartbeat
        self._core = core
        self._dead = DeadWatch(runtime)
        self._queues = runtime.options.queues
        self._dead_at = 0.0
        self._graphs_at = 0.0
        self._repair: Repair | None = None
        self._app = app
        self._on_rows = isinstance(app.results, KeepsRows)
        self._clock, self._store_clock = clock, runtime.store_clock
        self._clock_at = 0.0
        self._mailbox = runtime.mailbox
        self._lane = ChoreLane(runtime, "chores")
        self._deletions = ChoreLane(runtime, "deletions")
        self._beats = ChoreLane(runtime, "heartbeats")
        self._heartbeat_at = self._progress_at = self._cancelled_at = 0.0
        # At random within the first minute: workers that live for a few seconds purge, too, in
        # proportion to the time that they live, and those that start together take turns.
        self._purge_at = clock.monotonic() + chance.uniform(0.0, PURGE_SECONDS)
        self._events_at = self._payloads_at = self._purge_at
        self._look_at = 0.0
        self._said_why = False
        self._unique_at = self._lost_at = 0.0
        self._lost = LostRuns(runtime)
        self._waits_at = clock.monotonic() + QUIET_SECONDS
        self._unowned_at = self._steps_at = self._schedules_at = self._purge_at
        release = release_of(app.settings.version)
        author = Author.of(runtime.name, clock.wall(), release)
        looks = BacklogLooks(app.broker, runtime.options.queues, clock)
        recorder = runtime.journal.recorder
        self._recording = Recording(recorder, author, runtime.holder, looks, clock, self._purge_at)
        self._scheduling = (
            runtime.shell.scheduling(app, runtime.name) if runtime.options.schedules else None
        )

    def start(self) -> None:
        """Begin to make occurrences if the app declares schedules."""
        if self._scheduling is not None and self._app.schedules.declared:
            self._scheduling.start()

    @property
    def busy(self) -> bool:
        """Whether chores are queued or done now."""
        return any(map(len, (self._lane, self._deletions, self._beats)))

    def tick(self, now: float) -> None:
        """Start the chores that are due."""
        results = self._app.results
        if results is not None and not len(self._beats):
            self._tell_news(now)
        if not len(self._lane):
            self._lane.try_again(now)
            self._look_around(results, now)
        # Until the store's clock is known, nothing is known to be old.
        known = self._store_clock is None or self._store_clock.known
        if known and not len(self._deletions):
            self._deletions.try_again(now)
            self._delete_old(results, now)

    def _look_around(self, results: ResultStore | None, now: float) -> None:
        """Start what tasks wait for."""
        if self._store_clock is not None and now >= self._clock_at:
            self._clock_at = now + KEPT_SECONDS
            self._submit("clock", self._store_clock.refresh)
        if results is None:
            return
        if now >= self._cancelled_at:
            self._cancelled_at = now + HEARTBEAT_SECONDS
            if ids := self._heartbeat.running_ids():
                self._submit("cancelled tasks", partial(self._look_for_cancelled, results, ids))
        if now >= self._dead_at and self._dead.useful:
            self._dead_at = now + DEAD_SECONDS
            self._submit("dead letters", self._look_for_dead)
        self._look_after(results, now)
        if (write := self._recording.write_due(results, now)) is not None:
            self._submit("history", write)
        if (look := self._recording.look_due(results, now)) is not None:
            self._submit("backlog", look)
        if self._scheduling is not None and now >= self._schedules_at:
            self._schedules_at = now + PURGE_SECONDS
            if schedules_of(results) is not None:
                self._submit("schedules", self._scheduling.start_if_wanted)

    def _delete_old(self, results: ResultStore | None, now: float) -> None:
        """Start the deletions of what is old."""
        if now >= self._events_at and self._app.settings.events is not None:
            self._events_at = now + EVENTS_SECONDS
            self._deletions.submit("old events", self._remove_old_events)
        if now >= self._payloads_at and self._app.payloads is not None:
            self._payloads_at = now + PAYLOAD_SECONDS
            remove = partial(self._remove_old_payloads, self._app.payloads)
            self._deletions.submit("payloads", remove)
        if results is None:
            return
        if now >= self._steps_at and self._on_rows:
            self._steps_at = now + STEPS_SECONDS
            self._deletions.submit("steps", partial(self._purge_steps, results))
        if (merge := self._recording.merge_due(results, now)) is not None:
            self._deletions.submit("merge of the history", merge)
        if now >= self._purge_at:
            self._purge_at = now + PURGE_SECONDS
            self._deletions.submit("purge", partial(self._purge, results))

    def _tell_news(self, now: float) -> None:
        """Start a heartbeat, if one is due. One that failed is not repeated: the next is newer."""
        beats = now >= self._heartbeat_at
        if now >= self._progress_at and (beats or self._heartbeat.news()):
            self._progress_at = now + PROGRESS_SECONDS
            self.tell(self._heartbeat.record())
        if beats:
            self._heartbeat_at = now + HEARTBEAT_SECONDS

    def _look_after(self, results: ResultStore, now: float) -> None:
        """Start the looks at what several tasks share, where the store keeps it."""
        if now >= self._graphs_at and workflows_of(results) is not None:
            self._graphs_at = now + (REMOTE_GRAPH_SECONDS if results.remote else GRAPH_SECONDS)
            self._submit("workflows", partial(self._look_after_workflows, results))
        # A task that this worker has parked ends the long pause between two looks.
        soon = self._app.sends.signals.parks and self._waits_at > now + REMOTE_WAITS_SECONDS
        if (now >= self._waits_at or soon) and self._on_rows:
            self._waits_at = now + (REMOTE_WAITS_SECONDS if results.remote else QUIET_SECONDS)
            self._submit("waiting tasks", partial(self._wake_tasks, results))
        if now >= self._unique_at and uniques_of(results) is not None:
            self._unique_at = now + (REMOTE_GRAPH_SECONDS if results.remote else GRAPH_SECONDS)
            self._submit("unique tasks", partial(self._look_after_unique_tasks, results))
        if now >= self._lost_at and self._on_rows:
            usual = REMOTE_GRAPH_SECONDS if results.remote else GRAPH_SECONDS
            self._lost_at = now + (usual if self._lost.usual else NO_LOSS_SECONDS)
            self._submit("at-most-once runs", partial(self._lost.look, results))

    def _wake_tasks(self, results: ResultStore) -> None:
        """Wake tasks whose signallers could not; seldom where none waits and a look costs."""
        signals = self._app.sends.signals
        if results.remote and not signals.waiting:
            self._waits_at = self._clock.monotonic() + REMOTE_GRAPH_SECONDS
            return
        signals.repair()

    def _remove_old_events(self) -> None:
        settings = self._app.settings
        remove_old(
            Path(settings.events or "."),
            self._clock.wall() - settings.events_retention_seconds,
            uploaded_only=settings.events_container is not None,
        )

    def _remove_old_payloads(self, payloads: Payloads) -> None:
        holders = PayloadHolders(None, self._app.results)
        retention = self._app.settings.result_retention_seconds
        remove_ended(payloads, retention, holders, self._clock.wall())

    def _look_for_dead(self) -> None:
        if self._dead.look():
            self._dead_at = self._clock.monotonic()

    def _look_for_cancelled(self, results: ResultStore, ids: Sequence[str]) -> None:
        if found := results.to_stop(ids):
            self._mailbox.post(partial(self._core.cancel, found))

    def _look_after_workflows(self, results: ResultStore) -> None:
        if self._repair is None:
            self._repair = self._new_repair()
        if not self._repair.look() and results.remote:
            self._graphs_at = self._clock.monotonic() + IDLE_GRAPH_SECONDS

    def _look_after_unique_tasks(self, results: ResultStore) -> None:
        engine = unique_engine(self._app)
        if engine is None:
            self._unique_at = math.inf  # no task of this app is unique
            return
        engine.repair()
        if any(task.unique and task.unique.until == QUIET for task in self._app.tasks.values()):
            pause = REMOTE_QUIET_SECONDS if results.remote else QUIET_SECONDS
            self._unique_at = min(self._unique_at, self._clock.monotonic() + pause)

    def _new_repair(self) -> Repair:
        app, engine = self._app, self._app.workflows.engine
        return Repair(
            engine,
            WorkflowLauncher(engine, app.broker, app.codec, self._clock),
            app.broker,
            self._clock,
            app.tasks,
        )

    def _purge(self, results: ResultStore) -> None:
        before = self._clock.wall() - self._app.settings.result_retention_seconds
        if self._repair is not None:
            self._repair.purge(before)
        controls = controls_of(results)
        if controls is not None and self._app.limits:
            old = controls.time().at - ENTRY_SECONDS
            controls.purge(ENTRY_PREFIX, old)
            if controls.owner.known and self._clock.monotonic() >= self._unowned_at:
                # Slots of no owner: a former release wrote them, and all have passed.
                self._unowned_at = self._clock.monotonic() + UNOWNED_SECONDS
                controls.of(NO_OWNER).purge(ENTRY_PREFIX, old)
        if results.purge(before) >= PURGED_MANY:
            self._purge_at = min(self._purge_at, self._clock.monotonic() + PURGE_AGAIN_SECONDS)

    def _purge_steps(self, results: ResultStore) -> None:
        app = self._app
        before = self._clock.wall() - app.settings.result_retention_seconds
        if (steps := steps_of(results, app.codec)) is not None:
            StepPurge(steps, results, app.broker, app.payloads).purge(before)
        if (streams := streams_of(results, app.codec)) is not None:
            streams.purge(before, results)

    def tell(self, record: WorkerRecord) -> None:
        """Write a heartbeat to the result store, if there is one."""
        results = self._app.results
        if results is not None:
            self._beats.submit("heartbeat", partial(self._beat, results, record))

    def _beat(self, results: ResultStore, record: WorkerRecord) -> None:
        results.heartbeat(record)
        self._lost.beat(results, HEARTBEAT_SECONDS, stopped=record.stopped)

    def drained(self) -> bool:
        """Whether the queues are empty, delayed messages included, and no task of them waits.

        A missing queue is empty, too.
        """
        now = self._clock.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + DRAINED_SECONDS
        try:
            stats = [self._stats(queue) for queue in self._queues]
        except AztaskError as error:
            logger.warning("cannot check that the queues are empty, retry follows: %s", error)
            return False
        if any(each.active or each.leased for each in stats):
            return False
        inside = self._awaits_inside()
        if inside and not self._said_why:
            self._said_why = True
            logger.info(
                "the queues have no work now, but tasks wait inside their code, for a signal, a "
                "time or another task: --burst ends after them, or press Ctrl-C"
            )
        return not inside and not any(each.scheduled or each.total for each in stats)

    def _awaits_inside(self) -> bool:
        """Whether a task of these queues waits inside its code: no queue need show its timer."""
        try:
            waits = self._app.sends.signals.store
            return waits is not None and any(
                queue in self._queues for queue in waits.queues(MOST_WAITING)
            )
        except AztaskError as error:
            logger.warning("cannot check which tasks wait, retry follows: %s", error)
            return True

    def _stats(self, queue: str) -> QueueStats:
        try:
            return self._app.broker.stats(queue)
        except QueueNotFound:
            return QueueStats(queue, active=0, leased=0, scheduled=0, deferred=0, dead=0)

    def stop(self) -> None:
        """Finish the pending chores and end the threads."""
        if self._scheduling is not None:
            self._scheduling.stop()
        results = self._app.results
        if results is not None and (write := self._recording.write_due(results, math.inf)):
            self._submit("history", write)
        for lane in (self._lane, self._deletions, self._beats):
            lane.stop()

    def _submit(self, name: str, chore: Callable[[], object]) -> None:
        self._lane.submit(name, chore)
