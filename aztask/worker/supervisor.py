"""The supervisor: one loop that moves deliveries from the intakes through the pool to settlement.

Threads: this loop; an intake for each queue; the lease keeper; and, if the broker or the result
store is remote, lanes. Only the loop changes the stages of items and the pool processes; the other
threads post calls to its mailbox. No task code runs in this process, so a task cannot delay a
renewal.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Sequence
from types import FrameType

from aztask.app import App
from aztask.brokers.delivery import Delivery
from aztask.lease.state import Lease
from aztask.results.base import WorkerRecord
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.failpoint import hit
from aztask.worker.finishing import FinishLanes
from aztask.worker.intake.intakes import Intakes, Source, prefetch, tell_over
from aztask.worker.intake.sessions import SessionSlot
from aztask.worker.lane import Lane
from aztask.worker.leasenews import LeaseNews
from aztask.worker.limiting.gating import Gating
from aztask.worker.options import WorkerOptions
from aztask.worker.pausing import Pausing
from aztask.worker.pipeline.pipeline import Pipeline
from aztask.worker.pipeline.reporting import report_received
from aztask.worker.pipeline.work import Stage, WorkItem, names
from aztask.worker.pool.children import Pool, PoolPlan
from aztask.worker.pool.dispatcher import PoolDispatcher
from aztask.worker.pool.forking import ForkServerHandle
from aztask.worker.pool.requests import TaskRequests
from aztask.worker.pool.timelimits import TimeLimits
from aztask.worker.runtime import WorkerRuntime
from aztask.worker.scaling import Scaling
from aztask.worker.upkeep.heartbeat import Heartbeat
from aztask.worker.upkeep.housekeeping import Housekeeping
from aztask.worker.upkeep.leasewatch import LeaseWatch

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.05
IDLE_TICK_SECONDS = 1.0


class Supervisor:
    """One worker: `run` returns when the worker has stopped.

    server: the fork server, if one was made before the app was imported.
    """

    def __init__(
        self,
        app: App,
        app_spec: str,
        options: WorkerOptions,
        *,
        clock: Clock = SYSTEM_CLOCK,
        server: ForkServerHandle | None = None,
    ) -> None:
        runtime = self._runtime = WorkerRuntime.create(
            app, options, clock, on_lost=self._lease_lost, on_renewed=self._renewed
        )
        self.name, self.app, self.options, self._clock = runtime.name, app, options, clock
        self.keeper, self.journal = runtime.keeper, runtime.journal
        self._mailbox, self._deliveries = runtime.mailbox, runtime.deliveries
        self.pipeline = Pipeline(app, self.keeper, name=self.name, clock=clock)
        self._claims = Lane(
            "claim",
            self.pipeline.claim,
            self._claimed,
            self._mailbox,
            threads=runtime.lane_threads,
        )
        self._finishes = FinishLanes(self._finish_lane, runtime.lane_threads)
        self._gating = Gating(runtime, self.pipeline, self._gated)
        plan = PoolPlan(app_spec, options.processes, options.slots, self.name, options.pool)
        self._pool = Pool(plan, clock=clock, server=server)
        self._scaling = Scaling(runtime, self._pool, lambda: self._intakes)
        self._limits = TimeLimits(runtime, self._pool)
        self._requests = TaskRequests(runtime, self._limits)
        self._dispatcher = PoolDispatcher(
            runtime,
            self._pool,
            self.pipeline,
            self._requests,
            finish=self._finishes.submit,
            over=self._over,
            late=self._gating.late,
        )
        self._gating.tell = self._dispatcher.tell
        self._news = LeaseNews(runtime, self._limits, self._dispatcher, self._over)
        self._pausing = Pausing(
            runtime,
            self.pipeline.put_offs,
            claim=self._claims.submit,
            finish=self._finishes.submit,
            changed=self._scaling.obey,
        )
        self._gating.pauses_by(self._pausing.tenant)
        self._chores = Housekeeping(runtime)
        self._leases = LeaseWatch(runtime)
        self._intakes = self._new_intakes()
        self._heartbeat = Heartbeat(runtime, self._pool)
        self._next_tick, self._signals = 0.0, 0
        self._draining_until: float | None = None
        self.finished = 0

    def _new_intakes(self) -> Intakes:
        return Intakes(
            self.app,
            self.options,
            self._leases.seconds,
            self._take,
            weights=self._deliveries.weights,
            wake=self._mailbox.wake,
        )

    def _finish_lane(self, name: str, threads: int) -> Lane[WorkItem]:
        return Lane(name, self.pipeline.finish, self._finished, self._mailbox, threads=threads)

    # -- life --------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until a signal or `stop` ends the worker, or `burst` or `max_tasks` is reached."""
        self._pausing.tick(self._clock.monotonic())
        self._pool.fill()
        self.keeper.start()
        self._intakes.start()
        self._chores.start()
        try:
            while not self._done():
                self._turn()
        except BaseException:
            self._shut(self._give_back_begun)
            raise
        self._shut()

    def stop(self, signum: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        """Drain and end; the second call gives everything back at once. A signal handler."""
        self._signals += 1
        self._mailbox.wake()

    def _done(self) -> bool:
        if self._draining_until is None:
            if self._signals or self._enough() or self._drained():
                self._drain()
            return False
        if not self._deliveries:
            return True
        if self._signals > 1 or self._clock.monotonic() >= self._draining_until:
            self._give_back_running()
            return True
        return False

    def _enough(self) -> bool:
        return self.options.max_tasks is not None and self.finished >= self.options.max_tasks

    def _drained(self) -> bool:
        """Whether a burst is complete: nothing is held, queued or delayed."""
        if not self.options.burst or self._deliveries:
            return False
        return self._intakes.idle and self._chores.drained()

    def _record(self, *, stopped: bool = False) -> WorkerRecord:
        return self._heartbeat.record(self.finished, stopped=stopped)

    def _stop_cancelled(self, task_ids: Sequence[str]) -> None:
        for item, _ in self._pool.running():
            if item.key.task_id in task_ids:
                self._limits.cancel(item)

    def _drain(self) -> None:
        """Stop receiving, give back what has not started, and let running tasks finish."""
        self._draining_until = self._clock.monotonic() + self.options.shutdown_timeout
        self._intakes.stop()
        self._abandon_held(math.inf)
        self._give_back_waiting()
        if running := len(self._pool.running()):
            logger.info(
                "stopping: waiting up to %g s for %d running task%s; press Ctrl-C (or send "
                "SIGTERM) again to return %s now",
                self.options.shutdown_timeout,
                running,
                *(("", "it") if running == 1 else ("s", "them")),
            )

    def _give_back_waiting(self) -> None:
        waiting = self._deliveries.waiting() + self._gating.take_all()
        for process in self._pool.processes:
            waiting += process.take_back()
        self._give_back(waiting)

    def _give_back(self, items: Sequence[WorkItem]) -> None:
        """Release deliveries that have not started."""
        if items:
            self.pipeline.release(items)
            self._over(items)

    def _give_back_running(self) -> None:
        """Kill the pool and give back the running tasks; their starts do not count."""
        items = list(self._deliveries)
        for process in self._pool.processes:
            process.kill("the worker stopped")
        for process in self._pool.processes:
            process.wait()
        logger.warning(
            "gave back %d running task(s), any worker runs them again: %s", len(items), names(items)
        )
        self.pipeline.release([item for item in items if item.decided is None])
        self._over(items)

    def _give_back_begun(self, items: Sequence[WorkItem]) -> None:
        """After an error that ends the worker: started tasks count as started (see `abandon`)."""
        begun = [item for item in items if item.claimed is not None and not item.settled]
        self.pipeline.abandon(begun)
        self.pipeline.release([item for item in items if item not in begun])
        self._over(items)

    def _shut(self, give_back: Callable[[Sequence[WorkItem]], None] | None = None) -> None:
        """End all parts. give_back: takes what is still held, instead of `_give_back`."""
        self._intakes.stop()
        for process in self._pool.processes:
            process.retire()
        self._intakes.join(5.0)
        self._mailbox.run()
        # After an unexpected error of this loop, tasks may still be running. The pool ends first,
        # so that no task is given back while it runs.
        self._pool.close()
        (give_back or self._give_back)(list(self._deliveries))
        self._gating.stop()
        self._claims.stop()
        self._finishes.stop()
        self.keeper.stop()
        self._requests.stop()
        self._chores.tell(self._record(stopped=True))
        self._chores.stop()
        self._pausing.stop()
        self._leases.stop()
        self._intakes.close()
        self.pipeline.close()
        self.journal.close()
        self._mailbox.close()

    # -- the turn ----------------------------------------------------------------------------

    def _turn(self) -> None:
        self.journal.flush()
        self._mailbox.wait(self._patience())
        self._finishes.turn()
        self._claim()
        if self._gating.on:
            self._deliveries.back(self._gating.due())
        self._dispatcher.feed()
        self._allow()
        now = self._clock.monotonic()
        if now >= self._next_tick:
            self._tick(now)

    def _patience(self) -> float:
        if (
            self._claims.waiting
            or self._finishes.waiting
            or self._gating.waiting
            or (self._deliveries.ready and self._pool.room())
        ):
            return 0.0
        return max(0.0, min(self._next_tick, self._gating.next_at) - self._clock.monotonic())

    def _tick(self, now: float) -> None:
        """Check time limits, retry stages that are due, replace stuck and missing processes."""
        busy = bool(self._deliveries) or self.options.burst or self._draining_until is not None
        self._next_tick = now + (TICK_SECONDS if busy else IDLE_TICK_SECONDS)
        self._limits.enforce(now)
        self.journal.tick(now)
        self.pipeline.floods.tick(now)
        self._deliveries.back(self._pool.take_back_stuck(now) + self._pool.shrink())
        self._abandon_held(now if self._draining_until is None else math.inf)
        due = self._deliveries.due(now)
        self._finishes.submit(item for item in due if item.decided is not None)
        self._claims.submit(self._gating.sort([item for item in due if item.decided is None]))
        self._pool.check_server()
        self._pool.fill()
        self._chores.tick(now, self._record, self._heartbeat.running_ids, self._stop_cancelled)
        self._leases.tick(now)
        self._pausing.tick(now)
        self._gating.tick(now)
        if listeners := self.app.hooks.status:
            listeners.notify(self._heartbeat.status(draining=self._draining_until is not None))

    # -- receiving ---------------------------------------------------------------------------

    def _take(self, source: Source, deliveries: list[Delivery], asked_at: float) -> None:
        self._mailbox.post(lambda: self._received(source, deliveries, asked_at))

    def _received(self, source: Source, deliveries: list[Delivery], asked_at: float) -> None:
        """Hold the leases of new deliveries, open them, and pass them to the next stage."""
        hit("received", len(deliveries))
        self._intakes.received(source.queue, len(deliveries))
        session = source if isinstance(source, SessionSlot) else None
        items = [
            self._deliveries.add(source.queue, source.receiver, each, session)
            for each in deliveries
        ]
        self.keeper.hold(source.receiver, [item.lease for item in items])
        if self._draining_until is not None:  # this receive had begun before the drain
            self._give_back(items)
            return
        self.pipeline.open(items)
        if hook := self.app.hooks.receive:
            report_received(hook, source.queue, items, asked_at, self._clock.wall())
        self.journal.received(items)
        self._leases.received(items)
        self._finishes.submit(item for item in items if item.decided is not None)
        opened = [item for item in items if item.decided is None]
        if self._pausing.active:
            opened = self._pausing.admit(opened)
        self._deliveries.opened.extend(opened)

    def _allow(self) -> None:
        """Tell the intakes how many more deliveries there is room for."""
        window = self._pool.capacity + prefetch(self.options, self._pool)
        if self.options.max_tasks is not None:
            window = min(window, self.options.max_tasks - self.finished)
        room = window - (len(self._deliveries) - self._deliveries.held - self._gating.parked)
        if self._draining_until is None and self._pausing.known:
            wait = 0 < room < min(window // 4, 64) and bool(self._deliveries.opened)
            ahead = window > self._pool.capacity
            paused = self._pausing.queues
            self._intakes.allow(room, wait=wait, paused=paused, window=window, ahead=ahead)

    # -- stages ------------------------------------------------------------------------------

    def _claim(self) -> None:
        """Claim only what the pool can take now, because a claim counts as a start."""
        opened = self._deliveries.opened
        if opened:
            room = self._pool.room() + self._scaling.claims_ahead
            room -= len(self._deliveries.ready) + len(self._claims) + self._gating.held
            if room > 0:
                batch = [opened.popleft() for _ in range(min(room, len(opened)))]
                self._claims.submit(self._gating.sort(batch))
            if self._gating.on:
                self._gating.take_far(opened)
        self._gating.turn()
        self._claims.turn()

    def _gated(self, items: Sequence[WorkItem]) -> None:
        """Claim what the gate let through, and what has to be claimed before it is put off."""
        claims, now = [], self._clock.monotonic()
        for item in items:
            if item.stage is Stage.DECIDED:
                self._finishes.submit([item])
            elif not item.settled and not item.lease.alive(now):
                self._over([item])
            elif self._draining_until is not None:
                self._give_back([item])
            elif item.stage is Stage.READY and item.window is not None:
                self._gating.time(item)
            elif item.stage is Stage.RECEIVED and (item.window or item.put_off) is not None:
                claims.append(item)
            else:
                self._try_later(item)
        if self._pausing.active:  # they may have waited for long
            decided = [item for item in claims if item.put_off is not None]
            claims = decided + self._pausing.admit([each for each in claims if not each.put_off])
        self._claims.submit(claims)

    def _claimed(self, items: Sequence[WorkItem]) -> None:
        draining = self._draining_until is not None
        for item in items:
            self._deliveries.swapped(item)
            if item.stage is Stage.READY and draining and not item.settled:
                self._give_back([item])
            elif item.stage is Stage.READY:
                self._gating.claimed(item)
            elif item.stage is Stage.ENDED:
                self._over([item])
            elif item.stage is Stage.DECIDED:
                self._finishes.submit([item])
            else:
                self._try_later(item)
        self._finishes.turn()

    def _finished(self, items: Sequence[WorkItem]) -> None:
        done = [item for item in items if item.stage is Stage.ENDED]
        if len(done) < len(items):
            for item in items:
                if item.stage is Stage.HELD:
                    self._hold(item)
                elif item.stage is not Stage.ENDED:
                    self._try_later(item)
        self.finished += sum(not item.waits_in_queue for item in done)
        self._over(done)

    def _hold(self, item: WorkItem) -> None:
        """Keep the item under its lease until its retry is due; it occupies no slot.

        A worker holds at most `max_held` such items. Beyond that the lease is left to expire, and
        the message waits in the queue (see `Hold`): memory and renewals stay bounded.
        """
        self.journal.ended(item)
        self._gating.ended(item)
        item.rest()
        if item.session is not None:  # the number of sessions already bounds these
            item.session.held()
        room = item.session is not None or self._deliveries.held < self.app.settings.max_held
        if self._draining_until is not None or room:
            self._next_tick = min(self._next_tick, self._deliveries.hold(item))
        else:
            self._over([item])

    def _abandon_held(self, now: float) -> None:
        items = self._deliveries.let_go(now)
        for item in items:
            item.due()
        self._finishes.submit(items)

    def _try_later(self, item: WorkItem) -> None:
        self._next_tick = min(self._next_tick, self._deliveries.try_later(item))

    def _over(self, items: Sequence[WorkItem]) -> None:
        """End these deliveries, whatever their outcome. Those that have ended before are skipped.

        A session is told once for each: a second call would start its next message too early.
        """
        for item in items:
            item.end()
        self.keeper.drop(lease for item in items for lease in item.leases)
        ended = [item for item in items if self._deliveries.remove(item)]
        for item in ended:
            self.journal.ended(item)
            self._leases.ended(item)
            if item.permits:
                self._gating.ended(item)
        tell_over(ended)

    # -- leases ------------------------------------------------------------------------------

    def _renewed(self, lease: Lease, age: float) -> None:
        self._news.renewed(lease, age)

    def _lease_lost(self, lease: Lease) -> None:
        self._news.lost(lease)
