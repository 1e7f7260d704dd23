"""A worker inside the calling thread: it runs what is due, through the real pipeline.

Rules
1. Deliveries, claims, outcomes, retries and dead letters are those of a real worker: the same
   broker engine, result store, codec and pipeline, all in memory.
2. Time stands still and moves only by `jump`. So a task never loses its lease by being slow.
3. No lock is held while task code runs: a task may send, and wait for what it sent.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from aztask.app import App
from aztask.context import TaskLease, set_current_context
from aztask.errors import AztaskError, MessageTooLarge
from aztask.hooks import HookedSink
from aztask.queues.base import ANY_SESSION, Receiver, SessionHolder
from aztask.queues.delivery import Renewed
from aztask.queues.lease.keeper import LeaseKeeper
from aztask.queues.local.broker import LocalBroker
from aztask.schedules.stored import DUE
from aztask.schedules.view import View
from aztask.settlement import Abandon, Complete, Defer, Hold, Lapse, Resubmit, from_record
from aztask.steps.suspension import Suspension
from aztask.stores.events.sink import NullEventSink
from aztask.stores.records.base import State
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.threadpool import LoopThread
from aztask.uniqueness.rules import QUIET
from aztask.worker.pipeline.deliveries import Deliveries
from aztask.worker.pipeline.pipeline import Pipeline
from aztask.worker.pipeline.uniquekeys import unique_engine
from aztask.worker.pipeline.work import Stage, WorkItem, message_of
from aztask.worker.pool.attempt import OpenRun, RunReader
from aztask.worker.pool.packets import LOST, TOO_LARGE, Answers
from aztask.worker.pool.requests import RETRY_RESERVE
from aztask.worker.upkeep.journal import Journal

# -- The requests of tasks that run inline: checkpoints, session state, longer leases.


class InlineRequests:
    """Takes the packets that a pool process would send, and answers at once."""

    def __init__(self, app: App, keeper: LeaseKeeper, clock: Clock) -> None:
        self._app = app
        self._keeper = keeper
        self._clock = clock
        self._lock = threading.Lock()
        self._running: dict[int, tuple[WorkItem, TaskLease]] = {}
        self.answers = Answers()

    @contextmanager
    def of(self, item: WorkItem, lease: TaskLease) -> Iterator[None]:
        """In the block, requests about this delivery are answered."""
        self._running[item.number] = (item, lease)
        try:
            yield
        finally:
            del self._running[item.number]

    def send(self, packet: list[Any]) -> None:
        """Carry out a request: see the packets of `aztask.worker.pool.runner`."""
        kind, number, *details = packet
        item, lease = self._running[number]
        if kind == "extend":
            lease.renewed(max(item.delivery.deadline, self._clock.monotonic() + details[0]))
            return
        if kind == "spent":  # limits do not apply
            return
        error, value = "", None
        try:
            with self._lock:
                if kind == "save":
                    error = self._save(item, details[0])
                else:
                    value = self._exchange(item, kind, *details)
        except MessageTooLarge as problem:
            error = f"{TOO_LARGE}{problem}"
        except AztaskError as problem:
            error = str(problem)
        self.answers.answer(number, error, value)

    def _save(self, item: WorkItem, state: bytes) -> str:
        envelope = self._app.codec.to_envelope(replace(message_of(item), saved=state))
        self._app.broker.check(envelope, reserve=RETRY_RESERVE)
        if not isinstance(self._keeper.update(item.lease, item.receiver, envelope), Renewed):
            return LOST
        item.rewrite(saved=state)
        return ""

    @staticmethod
    def _exchange(item: WorkItem, kind: str, *details: Any) -> bytes | None:
        holder, session = item.receiver, item.delivery.session or ""
        assert isinstance(holder, SessionHolder)  # noqa: S101  # the local broker has sessions
        if kind == "state":
            return holder.session_state(session)
        holder.set_session_state(session, details[0])
        return None


NAME: Final = "inline"


class InlineClock:
    """A clock that stands still until it is moved."""

    def __init__(self, start: datetime | None = None) -> None:
        """start: what the wall clock says at first; by default, the time of this machine."""
        self._moved = 0.0
        monotonic = SYSTEM_CLOCK.monotonic()
        wall = SYSTEM_CLOCK.wall() if start is None else start.timestamp()
        self.clock = Clock(lambda: monotonic + self._moved, lambda: wall + self._moved)

    def move(self, seconds: float) -> None:
        """Move it forward by so many seconds."""
        self._moved += max(0.0, seconds)


class InlineSchedules:
    """Makes the occurrences of the app's schedules, at the times of the inline clock.

    There is no other worker, so it needs no claims; otherwise it does what a worker does.
    """

    def __init__(self, app: App, clock: Clock) -> None:
        self._app = app
        self._clock = clock

    def _views(self) -> Iterator[View]:
        """The schedules that are not paused: those of the code, and those made at run time."""
        schedules = self._app.schedules
        for definition in schedules.definitions():
            if schedules.view(definition.name) is None:
                schedules.engine.define(definition, 0, NAME, None, of_code=True)
        for _, view in schedules.engine.views():
            if isinstance(view, View) and view.schedule.paused_at is None:
                yield view

    def next_at(self) -> float | None:
        """When the next occurrence is due, UTC epoch seconds; None if none is."""
        engine = self._app.schedules.engine
        times = [due for view in self._views() if (due := engine.next_due(view)) is not None]
        return min(times, default=None)

    def turn(self) -> None:
        """Make and send what is due, and what waited for the occurrence before it."""
        engine, now = self._app.schedules.engine, self._clock.wall()
        for each in list(self._views()):
            view: View | None = each
            due = engine.next_due(each)
            if due is not None and due <= now:
                view = engine.fire(each, NAME)
            if view is not None and view.waiting:
                view = engine.admit(view, NAME)
            for made in () if view is None else view.open:
                if view is not None and made.state == DUE:
                    engine.send(view, made)


class InlineSession:
    """Holds the session of one delivery; see `aztask.worker.pipeline.work.HeldSession`."""

    def held(self) -> None:
        """The delivery waits under its lease: nothing else can take the session."""

    def ended(self, item: WorkItem) -> None:
        """The delivery has ended; its receiver is closed by the worker."""


@dataclass(frozen=True, slots=True, order=True)
class Due:
    """A time at which something becomes due. at: seconds of the wall clock."""

    at: float
    retry: bool


class InlineWorker:
    """Runs deliveries one by one, in the thread that asks for it."""

    def __init__(self, app: App, broker: LocalBroker, clock: InlineClock) -> None:
        self._app = app
        self._broker = broker
        self._time = clock
        self._clock = clock.clock
        self._lock = threading.RLock()
        self._loop = LoopThread("aztask-inline")
        self._keeper = LeaseKeeper(broker, clock=self._clock, threads=False)
        self._pipeline = Pipeline(app, self._keeper, name=NAME, clock=self._clock)
        self._deliveries = Deliveries(NAME, self._clock)
        self._journal = Journal(HookedSink(NullEventSink(), app.hooks.event), self._clock)
        self._requests = InlineRequests(app, self._keeper, self._clock)
        self._attempts = RunReader(
            app,
            self._requests,
            self._requests.answers,
            os.getpid(),
        )
        self._receivers: dict[str, Receiver] = {}
        self._held: list[WorkItem] = []
        self._nested = threading.local()
        self._due: list[Due] = []
        debounced = any(task.unique and task.unique.until == QUIET for task in app.tasks.values())
        self._unique = unique_engine(app) if debounced else None
        self._schedules = InlineSchedules(app, self._clock)
        self._schedules.next_at()  # the first occurrences come after now
        self._lifespans = app.hooks.lifespan.open(self._loop.run) if app.hooks.lifespan else None

    def close(self) -> None:
        """Close the lifespans and the loop; messages that wait are dropped with the queues."""
        if self._lifespans is not None:
            self._lifespans.close()
        self._loop.close()
        for receiver in self._receivers.values():
            receiver.close()
        self._journal.close()
        self._keeper.stop()

    @property
    def depth(self) -> int:
        """How many tasks the calling thread runs, one inside the other."""
        return getattr(self._nested, "depth", 0)

    # -- time --------------------------------------------------------------------------------

    def expect(self, delay: float) -> None:
        """Note that something was sent that becomes due after `delay` seconds."""
        if delay > 0:
            self._note_due(self._clock.wall() + delay, retry=False)

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass; everything that becomes due in them runs at its time."""
        end = self._clock.wall() + seconds
        self.run()
        while True:
            due = min(filter(None, (self._next(), self._quiet(), self._planned())), default=None)
            if due is None or due.at > end:
                break
            self._jump(due)
            self.run()
            self._schedules.turn()
            self.run()
        self._move(end - self._clock.wall())
        self.run()  # an eta becomes a delay twice, milliseconds apart: here and in the message

    def run(self) -> bool:
        """Run all that is due, and retries when their delays have passed; True if anything ran."""
        ran = self._unique is not None and self._unique.repair() > 0
        while True:
            while self._run_one():
                ran = True
            due = self._next(retry=True)
            if due is None:
                return ran
            self._jump(due)

    def _note_due(self, at: float, *, retry: bool) -> None:
        with self._lock:
            self._due.append(Due(at, retry))
            self._due.sort()

    def _next(self, *, retry: bool = False) -> Due | None:
        with self._lock:
            return next((due for due in self._due if due.retry or not retry), None)

    def _quiet(self) -> Due | None:
        """When the next debounced task is sent: just after its time, at which it is not yet due."""
        found = self._unique.store.due(math.inf, 1) if self._unique is not None else []
        soon = [Due(each.due + 0.001, retry=False) for each in found]
        return next((due for due in soon if due.at > self._clock.wall()), None)

    def _planned(self) -> Due | None:
        at = self._schedules.next_at()
        return None if at is None else Due(at, retry=False)

    def _jump(self, due: Due) -> None:
        with self._lock:
            self._move(due.at - self._clock.wall())
            if due in self._due:
                self._due.remove(due)

    def _move(self, seconds: float) -> None:
        """Move the clock in steps, so that the leases of running and held tasks are renewed."""
        with self._lock:
            while seconds > 0:
                step = seconds
                leases = [lease.seconds for item in self._deliveries for lease in item.leases]
                if leases:
                    step = min(seconds, min(leases) / 8)
                self._time.move(step)
                self._keeper.turn()
                seconds -= step

    # -- one delivery ------------------------------------------------------------------------

    def _run_one(self) -> bool:
        """Run one delivery that is due; False if there is none."""
        with self._lock:
            item = self._take()
            if item is None:
                return False
            if item.decided is None:
                self._pipeline.following.refresh()
                self._pipeline.claim([item])
            ready = item.stage is Stage.READY
            if ready:
                item.sent()
        if ready:
            self._run(item)
        with self._lock:
            self._finish(item)
        return True

    def _take(self) -> WorkItem | None:
        now = self._clock.monotonic()
        for item in self._held:
            if item.held_until <= now:
                self._held.remove(item)
                item.due()
                return item
        for queue in self._broker.queues():
            in_session = self._broker.engine.queue(queue).sessions
            receiver = self._receiver(queue, in_session)
            for delivery in receiver.receive(1, 0.0):
                slot = InlineSession() if in_session else None
                item = self._deliveries.add(queue, receiver, delivery, slot)
                self._keeper.hold(receiver, [item.lease])
                self._pipeline.open([item])
                self._journal.received([item])
                return item
            if in_session:
                receiver.close()
        return None

    def _receiver(self, queue: str, in_session: bool) -> Receiver:
        lease = self._app.lease_seconds(queue)
        if in_session:  # one for each message: it holds the session until the message has ended
            return self._broker.receiver(queue, lease=lease, session=ANY_SESSION)
        if queue not in self._receivers:
            self._receivers[queue] = self._broker.receiver(queue, lease=lease)
        return self._receivers[queue]

    def _run(self, item: WorkItem) -> None:
        """Run the task and decide. KeyboardInterrupt and the outcomes of pytest go through."""
        started = time.monotonic()
        self._nested.depth = self.depth + 1
        try:
            answer = contextvars.copy_context().run(self._answer, item)
        except BaseException:
            with self._lock:
                item.decide(Complete())  # it must not run again in the same test
                self._pipeline.finish([item])
                self._over(item)
            raise
        finally:
            self._nested.depth -= 1
            if item.run is not None:
                item.run.started_at = self._clock.monotonic()
                item.run.duration = time.monotonic() - started
        kind, *details = answer
        decisions = self._pipeline.decisions
        if kind == "done":
            decisions.succeeded(item, details[0])
        elif kind == "failed":
            record, error_type, error, trace = details
            decisions.failed(item, from_record(record), error_type, error, trace)
        elif kind == "parked":
            decisions.parked(item, *details)
        elif kind == "renewed":
            decisions.renewed(item, *details)
        else:
            item.decide(Abandon())

    def _answer(self, item: WorkItem) -> list[Any]:
        attempts, message = self._attempts, message_of(item)
        lease = TaskLease(
            item.delivery.deadline,
            ask=lambda seconds: attempts.send(["extend", item.number, seconds]),
            clock=self._clock,
        )
        received = item.delivery
        given = () if item.input is None else (item.input.packet(),)
        delivery = OpenRun(
            item.number, message, received.delivery_count, received.enqueued_at, lease, 0.0, given
        )
        try:
            with self._requests.of(item, lease):
                call = attempts.open(delivery)
                set_current_context(call.context)
                with attempts.hooks(call.context):
                    value = call.begin()
                    if inspect.isawaitable(value):
                        value = self._loop.run(value)
                return attempts.value(value, call)
        except (Exception, Suspension, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001
            return attempts.error(error, message)

    def _finish(self, item: WorkItem) -> None:
        if item.stage is Stage.DECIDED:
            self._pipeline.finish([item])
        state = item.outcome.state if item.outcome is not None else None
        if state is State.RETRYING or isinstance(item.settlement, Resubmit | Defer | Hold):
            self._note_due(self._again_at(item), retry=state is State.RETRYING)
        if item.stage is Stage.HELD:
            self._journal.ended(item)
            item.rest()
            self._held.append(item)
        else:
            self._over(item)

    def _again_at(self, item: WorkItem) -> float:
        """When the message of a decided item comes again, on the wall clock."""
        settlement, now = item.settlement, self._clock.wall()
        if isinstance(settlement, Resubmit | Defer | Hold):
            return now + settlement.delay if settlement.due is None else settlement.due
        if isinstance(settlement, Lapse):
            return now + item.delivery.deadline - self._clock.monotonic()
        return now

    def _over(self, item: WorkItem) -> None:
        self._journal.ended(item)
        item.end()
        self._keeper.drop(item.leases)
        self._deliveries.remove(item)
        if item.session is not None:
            item.receiver.close()
