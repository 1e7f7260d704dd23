"""The core of a worker: one loop that moves deliveries from the intakes through the pool to
settlement.

What comes in                                     what goes out
    `received`  new deliveries, from an intake        to the pauses, then to be claimed
    `admitted`  from the slots of limits              `claim`, or to the pool
    `claimed`   from the result store                 to the pool (`PoolDispatcher.feed`)
    answers     from the pool (`PoolDispatcher`)      `finish`
    `finished`  recorded and settled                  `ended`, or held, or tried again
    `lease_renewed`, `lease_lost`                     to the running task
    `tick`      time has passed                       time limits, retries, chores

Rules
1. Only the loop changes the stages of deliveries and the pool processes. Other threads post calls
   to its mailbox.
2. No task code runs in this process, so a task cannot delay a renewal.
3. An error of one delivery is confined to it (`aztask.worker.stages`); any other ends the worker.
4. Nothing here waits but `turn`, in the mailbox: with stepped parts, a test runs all of this in one
   thread (`aztask.worker.ports`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

from aztask.app import App
from aztask.limits.breakers import OpenBreaker
from aztask.limits.control import ControlState
from aztask.queues.delivery import Delivery
from aztask.queues.lease.state import Lease
from aztask.support.failpoint import hit
from aztask.support.parts import Part, watch_parts
from aztask.worker.breaking import Breaking
from aztask.worker.givingback import GivingBack
from aztask.worker.intake.allintakes import Intakes, prefetch, tell_ended
from aztask.worker.lane import Lane, Work
from aztask.worker.limiting.stage import LimitStage
from aztask.worker.options import WorkerOptions
from aztask.worker.pausing import Pausing, Scaling
from aztask.worker.pipeline.pipeline import Pipeline
from aztask.worker.pipeline.work import Stage, WorkItem, report_received
from aztask.worker.pool.dispatcher import PoolDispatcher
from aztask.worker.pool.link import PoolPlan
from aztask.worker.pool.pool import Pool
from aztask.worker.pool.requests import TaskRequests
from aztask.worker.pool.timelimits import TimeLimits
from aztask.worker.ports import Shell
from aztask.worker.runtime import WorkerRuntime
from aztask.worker.stages import Source, Stages, each, failed_try
from aztask.worker.upkeep.controlwatch import ControlWatch
from aztask.worker.upkeep.heartbeat import Heartbeat
from aztask.worker.upkeep.housekeeping import Housekeeping
from aztask.worker.upkeep.leasewatch import LeaseWatch

logger = logging.getLogger(__name__)

# -- The lanes of the claim and of the settlement --------------------------------------------------
#
# And what each does with a batch. Tasks of workflows have a finish lane of their own, so that they
# delay no other task.
#
# The bits of a group's members are in rows that many workers change. Waiting for a turn there must
# not hold up the settlements of unrelated tasks. The lane has one thread: what ends while it works
# becomes its next batch, so that a worker's own ends never compete for a row.


class Claiming(Work[WorkItem]):
    """The work of the claim lane."""

    def __init__(self, pipeline: Pipeline, core: Stages) -> None:
        self._pipeline = pipeline
        self._core = core

    def work(self, batch: Sequence[WorkItem]) -> None:
        """Own the start rows of these deliveries."""
        self._pipeline.claim(batch)

    def done(self, batch: Sequence[WorkItem]) -> None:
        """Hand them back, claimed or not."""
        self._core.claimed(batch)

    def failed(self, batch: Sequence[WorkItem]) -> None:
        """The next try comes after a longer pause."""
        failed_try(batch)


class Finishing(Claiming):
    """The work of the finish lanes."""

    def work(self, batch: Sequence[WorkItem]) -> None:
        """Record the outcomes, then settle the messages."""
        self._pipeline.finish(batch)

    def done(self, batch: Sequence[WorkItem]) -> None:
        """Hand them back, settled or not."""
        self._core.finished(batch)


class FinishLanes:
    """Like a `Lane`, for items with an outcome. Where lanes work inline, there is only one."""

    def __init__(self, runtime: WorkerRuntime, work: Work[WorkItem]) -> None:
        self._runtime = runtime
        self._work = work
        self._threads = runtime.lane_threads
        self._plain = runtime.lane("finish", work, threads=self._threads, essential="finish")
        self._workflows: Lane[WorkItem] | None = None

    @property
    def waiting(self) -> bool:
        """Whether something is left for the next turn."""
        return self._plain.waiting

    def submit(self, items: Iterable[WorkItem]) -> None:
        """Queue these items, each on its lane."""
        if not self._threads:
            self._plain.submit(items)
            return
        given = list(items)
        joined = [item for item in given if item.place is not None]
        if joined:
            if self._workflows is None:
                self._workflows = self._runtime.lane("workflows", self._work, threads=1)
            self._workflows.submit(joined)
            given = [item for item in given if item.place is None]
        if given:
            self._plain.submit(given)

    def turn(self) -> None:
        """Work on everything that is queued, if the lanes work inline."""
        self._plain.turn()

    def stop(self) -> None:
        """Finish what is queued and end the threads."""
        self._plain.stop()
        if self._workflows is not None:
            self._workflows.stop()


# -- The loop --------------------------------------------------------------------------------------

TICK_SECONDS = 0.05
IDLE_TICK_SECONDS = 1.0
RECYCLE_SECONDS = 1.0
STUCK_SECONDS = 30.0  # for a turn of the loop


class Core:
    """The loop and its stages; `aztask.worker.supervisor` begins and ends it.

    * `draining`: nothing is received from now on.
    """

    def __init__(self, app: App, app_spec: str, options: WorkerOptions, shell: Shell) -> None:
        runtime = self.runtime = WorkerRuntime.create(app, options, shell, self)
        self._app, self._options, self._clock = app, options, runtime.clock
        self._mailbox, self.deliveries = runtime.mailbox, runtime.deliveries
        self._keeper, self._journal = runtime.keeper, runtime.journal
        pipeline = self.pipeline = Pipeline(
            app,
            runtime.keeper,
            name=runtime.name,
            clock=runtime.clock,
            incarnation=runtime.incarnation,
        )
        plan = PoolPlan(app_spec, options.processes, options.slots, runtime.name, options.pool)
        pool = self.pool = Pool(
            plan, shell.starter(runtime.mailbox, foreground=plan.foreground), clock=shell.clock
        )
        self.claims = runtime.lane(
            "claim", Claiming(pipeline, self), threads=runtime.lane_threads, essential="claim"
        )
        self.finishes = FinishLanes(runtime, Finishing(pipeline, self))
        self.time_limits = TimeLimits(runtime, pool, self)
        self.requests = TaskRequests(runtime, self.time_limits)
        self.dispatcher = PoolDispatcher(runtime, pool, pipeline, self.requests, self)
        self.control = ControlWatch(runtime, self)
        self.breaking = Breaking(runtime, self)
        self._pausing = Pausing(runtime, pipeline.put_offs, self.control, self.breaking, self)
        self.limits = LimitStage(runtime, pipeline, self._pausing, self)
        closes = bool(app.hooks.lifespan or app.hooks.process)
        held = (runtime.deliveries, pool, pipeline, self.limits)
        self.giving_back = GivingBack(*held, self, closes=closes)
        self.leases = LeaseWatch(runtime)
        self.intakes = Intakes(runtime, self.leases, self)
        self._scaling = Scaling(runtime, pool, self.intakes)
        self.heartbeat = Heartbeat(runtime, pool)
        self.chores = Housekeeping(runtime, self.heartbeat, self)
        self._part = Part("loop", longest=STUCK_SECONDS)
        self._next_tick = self._recycle_at = 0.0
        self.draining = False

    @property
    def drained(self) -> bool:
        """Whether nothing is held, queued or delayed."""
        return not self.deliveries and self.intakes.idle and self.chores.drained()

    # -- the turn ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Start what receives, renews and runs."""
        self._part.adopt()
        now = self._clock.monotonic()
        self.control.tick(now)
        self.breaking.tick(now)
        self.dispatcher.fill()
        self._keeper.start()
        self.intakes.start()
        self.chores.start()

    def turn(self) -> None:
        """Wait until something comes in, and handle all of it."""
        self._journal.flush()
        self._part.rest()
        self._mailbox.wait(self._patience(), self._part)
        self.dispatcher.bury()
        self.finishes.turn()
        self._claim_some()
        if self.limits.on:
            self.deliveries.back(self.limits.due())
        self.dispatcher.feed()
        self._allow()
        if (now := self._clock.monotonic()) >= self._next_tick:
            self.tick(now)

    def _patience(self) -> float:
        if (
            self.claims.waiting
            or self.finishes.waiting
            or self.limits.waiting
            or (self.deliveries.ready and self.pool.room())
        ):
            return 0.0
        return max(0.0, min(self._next_tick, self.limits.next_at) - self._clock.monotonic())

    def tick(self, now: float) -> None:
        """Check time limits, retry stages that are due, replace stuck and missing processes."""
        busy = bool(self.deliveries) or self._options.burst or self.draining
        self._next_tick = now + (TICK_SECONDS if busy else IDLE_TICK_SECONDS)
        self.time_limits.enforce(now)
        self._journal.tick(now)
        self.pipeline.floods.tick(now)
        self.deliveries.back(self.pool.take_back_stuck(now) + self.pool.shrink())
        self.end_holds(math.inf if self.draining else now)
        due = self.deliveries.due(now)
        self.finish(item for item in due if item.decided is not None)
        self.claim(self.limits.sort([item for item in due if item.decided is None]))
        self.pool.check_starter()
        self.dispatcher.watch.tick(now)
        if now >= self._recycle_at:
            self._recycle_at = now + RECYCLE_SECONDS
            options = self._options
            self.pool.recycle(options.max_tasks_per_child, options.max_memory_per_child)
        self.dispatcher.fill()
        self.chores.tick(now)
        self.leases.tick(now)
        self.control.tick(now)
        self.breaking.tick(now)
        self.limits.tick(now)
        watch_parts()
        if listeners := self._app.hooks.status:
            listeners.notify(self.heartbeat.status(draining=self.draining))

    # -- receiving ---------------------------------------------------------------------------

    def received(self, source: Source, deliveries: Sequence[Delivery], asked_at: float) -> None:
        """Hold the leases of new deliveries, open them, and pass them to the next stage."""
        hit("received", len(deliveries))
        self.intakes.received(source.queue, len(deliveries))
        add, session = self.deliveries.add, source.session
        items = [add(source.queue, source.receiver, one, session) for one in deliveries]
        self._keeper.hold(source.receiver, [item.lease for item in items])
        if self.draining:  # this receive had begun before the drain
            self.giving_back.these(items)
            return
        self.pipeline.open(items)
        if hook := self._app.hooks.receive:
            report_received(hook, source.queue, items, asked_at, self._clock.wall())
        each(items, self._note_received, self)
        self.finish(item for item in items if item.stage is Stage.DECIDED)
        opened = [item for item in items if item.stage is Stage.RECEIVED]
        if self._pausing.active:
            opened = self._pausing.admit(opened)
        self.deliveries.opened.extend(opened)

    def _note_received(self, item: WorkItem) -> None:
        self._journal.received([item])
        self.leases.received([item])

    def _allow(self) -> None:
        """Tell the intakes how many more deliveries there is room for."""
        capacity = self.pool.capacity
        window = capacity + prefetch(self._options, self.pool)
        if self._options.max_tasks is not None:
            window = min(window, self._options.max_tasks - self.deliveries.finished)
        held = len(self.deliveries) - self.deliveries.held - self.limits.parked
        room = min(window - held, self._room_in_bytes(held))
        if not self.draining and self._pausing.known:
            wait = 0 < room < min(window // 4, 64) and bool(self.deliveries.opened)
            ahead = window > capacity
            paused = self._pausing.queues
            self.intakes.allow(room, wait=wait, paused=paused, window=window, ahead=ahead)

    def _room_in_bytes(self, held: int) -> int:
        """How many more messages of the usual size fit into `prefetch_bytes`.

        As many as can run are always received: without them the pool would stand still.
        """
        left = self._options.prefetch_bytes - self.deliveries.bytes
        return max(self.pool.capacity - held, int(left / max(1.0, self.deliveries.usual_bytes)))

    # -- stages ------------------------------------------------------------------------------

    def _claim_some(self) -> None:
        """Claim only what the pool can take now, because a claim counts as a start."""
        opened = self.deliveries.opened
        if opened:
            room = self.pool.room() + self._scaling.claims_ahead
            room -= len(self.deliveries.ready) + len(self.claims) + self.limits.held
            if room > 0:
                batch = [opened.popleft() for _ in range(min(room, len(opened)))]
                self.claim(self.limits.sort(batch))
            if self.limits.on:
                self.limits.take_far(opened)
        self.limits.turn()
        self.claims.turn()

    def claim(self, items: Iterable[WorkItem]) -> None:
        """Own the start rows of these deliveries; `claimed` takes them back."""
        self.claims.submit(items)

    def late(self, items: Sequence[WorkItem]) -> None:
        """Let claimed deliveries that missed their slots get others."""
        self.limits.late(items)

    def admitted(self, items: Sequence[WorkItem]) -> None:
        """Claim what the gate let through, and what has to be claimed before it is put off."""
        claims: list[WorkItem] = []
        now = self._clock.monotonic()

        def sort(item: WorkItem) -> None:
            if item.stage is Stage.DECIDED:
                self.finish([item])
            elif not item.settled and not item.lease.alive(now):
                self.ended([item])
            elif self.draining:
                self.giving_back.these([item])
            elif item.stage is Stage.READY and item.window is not None:
                self.limits.time(item)
            elif item.stage is Stage.RECEIVED and (item.window or item.waits) is not None:
                claims.append(item)
            else:
                self._try_later(item)

        each(items, sort, self)
        if self._pausing.active:  # they may have waited for long
            decided = [item for item in claims if item.waits is not None]
            claims = decided + self._pausing.admit([each for each in claims if not each.waits])
        self.claim(claims)

    def claimed(self, items: Sequence[WorkItem]) -> None:
        """Pass claimed deliveries to the pool, and those that are decided to settlement."""
        each(items, self._claimed_one, self)
        self.finishes.turn()

    def _claimed_one(self, item: WorkItem) -> None:
        self.deliveries.swapped(item)
        if item.stage is Stage.READY and self.draining and not item.settled:
            self.giving_back.these([item])
        elif item.stage is Stage.READY:
            self.limits.claimed(item)
        elif item.stage is Stage.ENDED:
            self.ended([item])
        elif item.stage is Stage.DECIDED:
            self.finish([item])
        else:
            self._try_later(item)

    def finish(self, items: Iterable[WorkItem]) -> None:
        """Record and settle these deliveries; `finished` takes them back."""
        self.finishes.submit(items)

    def finished(self, items: Sequence[WorkItem]) -> None:
        """Forget the deliveries that have ended; hold the others, or try them again later."""
        done = [item for item in items if item.stage is Stage.ENDED]
        if len(done) < len(items):
            left = [item for item in items if item.stage is not Stage.ENDED]
            again = [item for item in left if item.stage is not Stage.HELD]
            each((item for item in left if item.stage is Stage.HELD), self._hold, self)
            each(again, self._try_later, self)
        self.deliveries.finished += sum(not item.waits_in_queue for item in done)
        self.ended(done)

    def _hold(self, item: WorkItem) -> None:
        """Keep the item under its lease until its retry is due; it occupies no slot.

        A worker holds at most `max_held` such items. Beyond that the lease is left to expire, and
        the message waits in the queue (see `Hold`): memory and renewals stay bounded.
        """
        self._journal.ended(item)
        self.breaking.ended(item)
        self.limits.ended(item)
        item.rest()
        if item.session is not None:  # the number of sessions already bounds these
            item.session.held()
        room = item.session is not None or self.deliveries.held < self._app.settings.max_held
        if self.draining or room:
            self._next_tick = min(self._next_tick, self.deliveries.hold(item))
        else:
            self.ended([item])

    def end_holds(self, now: float) -> None:
        """Finish the held items whose retry is due by `now`."""
        items = self.deliveries.let_go(now)
        each(items, WorkItem.due, self)
        self.finish(item for item in items if item.stage is not Stage.ENDED)

    def _try_later(self, item: WorkItem) -> None:
        self._next_tick = min(self._next_tick, self.deliveries.try_later(item))

    def ended(self, items: Sequence[WorkItem]) -> None:
        """Forget these deliveries, whatever their outcome, once.

        A session is told once for each: a second call would start its next message too early.
        """
        for item in items:
            item.end()
        self._keeper.drop(lease for item in items for lease in item.leases)
        ended = [item for item in items if self.deliveries.remove(item)]
        each(ended, self._note_ended, self)
        tell_ended(ended)

    def _note_ended(self, item: WorkItem) -> None:
        self._journal.ended(item)
        if self.breaking.on:
            self.breaking.ended(item)
        self.leases.ended(item)
        if item.permits or item.weighed:
            self.limits.ended(item)

    def put_aside(self, item: WorkItem, error: Exception) -> None:
        """Leave the delivery to its lease, and log why; many of one kind are one line."""
        kind = type(error).__name__
        text = "%s failed unexpectedly, it is left to its lease and redelivered"
        self.pipeline.floods.warning(logger, kind, text, item.label, error=error)
        self.ended([item])

    # -- leases ------------------------------------------------------------------------------

    def lease_renewed(self, lease: Lease, age: float) -> None:
        """Tell the pool process the new deadline."""

        def renewed(item: WorkItem) -> None:
            self._journal.renewed(item, age)
            deadline = min(lease.deadline, item.permits_until)
            self.tell(item, ["renewed", item.number, deadline])

        if item := self.deliveries.of(lease):
            each([item], renewed, self)

    def lease_lost(self, lease: Lease) -> None:
        """Stop the task, settle nothing."""

        def lost(item: WorkItem) -> None:
            if item.stage is Stage.RUNNING:
                self.time_limits.stop(item, "lease", lease.lost_reason)
            elif item.stage is Stage.HELD:
                item.note("lease_lost", lease.lost_reason)
                self.ended([item])
            else:
                line = "%s: the lease was lost before the task started, it will be redelivered: %s"
                logger.info(line, item.label, lease.lost_reason)

        if item := self.deliveries.of(lease):
            each([item], lost, self)

    def tell(self, item: WorkItem, packet: list[Any]) -> None:
        """Send a control packet to the process that runs the delivery."""
        self.dispatcher.tell(item, packet)

    # -- control -----------------------------------------------------------------------------

    def control_changed(self, former: ControlState, now: ControlState) -> None:
        """Obey other pauses, other numbers of limits, and another number of tasks at a time."""
        self._scaling.obey(now)
        self.limits.obey(former, now)
        self.dispatcher.fill()
        self._pausing.control_changed(former, now)

    def breakers_changed(self, changes: Sequence[tuple[OpenBreaker, str]]) -> None:
        """Obey circuit breakers that have opened or closed."""
        self._pausing.breakers_changed(changes)

    def reconsidered(self, item: WorkItem) -> None:
        """Sort a delivery again that waited for the answer about a probe."""
        self._pausing.reconsidered(item)

    def cancel(self, task_ids: Sequence[str]) -> None:
        """Stop these tasks, as far as they run here."""
        found = [one for one, _ in self.pool.running() if one.key.task_id in task_ids]
        each(found, self.time_limits.cancel, self)
