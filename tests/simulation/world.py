"""The world: a clock, the queues and the rows, the actors, and the scheduler of their steps.

Rules
1. One step of one actor at a time. Who is next is drawn among those that can do something; time
   passes only when no actor can, up to the next moment at which one can.
2. A step is taken in a greenlet of its own, so that an actor can freeze in the middle of it.
3. While no worker holds a message, time leaps to the next one that is due, or the next decision.
4. After the quiet time everything must end. Then one task of each kind is sent, which must end too:
   nothing is stuck.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from greenlet import greenlet

from aztask.errors import AztaskError
from aztask.stores.records.base import Provisioned, RunRecord
from aztask.support import chance, failpoint
from aztask.support import clock as clocks
from aztask.worker.options import WorkerOptions

from . import ending, harms, operations, pace
from .actors import Actor, Sender, Worker
from .book import Book, Life, Violation
from .course import RETENTION, Course, Decision
from .flows import Flows
from .places import LocalSite, ServiceSite, Site, memory_file
from .points import Death, Failpoints
from .programs import Program
from .services import Blobs, ServiceBus, StorageQueues, Tables, Wire
from .stepped import Time
from .streams import Streams
from .weather import Weather

DEAD_SECONDS: Final = 300.0
LONGEST_LEAP: Final = 3600.0
LONGEST_LEAP_OF_ALL: Final = 18_000.0
"""In long courses. Less than any retention, within which workers have to look around."""
STILL_OPEN: Final = 6 * 3600.0 + max(RETENTION.values()) / 2
"""Seconds after the quiet time at which everything must have ended.

A timer of a wait that has ended stays in a Storage queue for up to half the retention.
"""

MOST_STEPS: Final = 500_000
"""Four schedules of 30 s have 30,000 occurrences in `STILL_OPEN`, of about twelve steps each."""


class World:
    """Everything that a course needs, until it has ended."""

    def __init__(self, course: Course) -> None:
        self.course = course
        self.dice = random.Random(course.seed)
        self.time = Time()
        clock = self.time.clock(lambda: self.actor.ahead if self.actor else 0.0)
        self.clock = replace(clock, sleep=self.sleep)
        self.fate = Weather(self)
        self.wire = Wire(self.time, self.fate)
        self.began = self.time.now
        self.book = Book(self)
        self.flows = Flows(self)
        self.streams = Streams(self)
        self.program = Program(self, course)
        self.sites = self._sites()
        self.workers: list[Worker] = []
        self.senders: dict[str, Sender] = {}
        self.standing: list[Sender] = []
        self.outages: list[tuple[float, str, str]] = []
        self.armed: dict[tuple[str, int], Decision] = {}
        self.points: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.workflows: list[tuple[str, str, Any]] = []
        self.todo = list(reversed(course.decisions))
        self.steps = self.leapt = self.waits = 0
        self.actor: Actor | None = None
        self.quiet = False
        self._main = greenlet.getcurrent()
        self._resting: list[greenlet] = []
        self.begun_workflows: set[str] = set()
        self.look_at = 0.0
        self._prepared: set[str] = set()
        self._names = self._came = 0
        self._patience = 1.0
        longer = min(course.quiet_at / 100.0, LONGEST_LEAP_OF_ALL)
        self._longest_leap = max(LONGEST_LEAP, longer)

    def _sites(self) -> dict[str, Site]:
        kind = self.course.kind
        sites: dict[str, Site] = {}
        if kind == "local":
            rows = memory_file(0)
            for number, label in enumerate(self.course.apps, 1):
                joint = self.course.joint and label == "a"
                file = rows if joint else memory_file(number)
                sites[label] = LocalSite(label, file, rows, self.course.shards)
            return sites
        clock = self.time.clock()
        tables, blobs = Tables(clock), Blobs(clock)
        for label in self.course.apps:
            queues = ServiceBus(clock) if kind == "bus" else StorageQueues(clock)
            sites[label] = ServiceSite(label, queues, tables, blobs, self.wire)
        return sites

    # -- the course --------------------------------------------------------------------------

    def run(self) -> None:
        """Run the course to its end. Raises Violation."""
        with self._surroundings():
            try:
                for label in self.course.apps:
                    self.sender(label)
                    for _ in range(self.course.workers):
                        self.start_worker(label)
                self._go(lambda: not self.todo and self.now >= self.course.quiet_at - 1e-6)
                harms.end_all(self)
                end = self.now + STILL_OPEN
                self._go(lambda: self.now > end or ending.is_still(self))
                ending.check(self, "everything-ends")
                operations.probe(self)
                end = self.now + STILL_OPEN
                self._go(lambda: self.now > end or ending.is_still(self))
                ending.check(self, "nothing-is-stuck")
                ending.check_at_last(self)
                self.streams.check_at_last()
                if self.book.violations:
                    raise self.book.violations[0]
            finally:
                self._close()

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        logging.disable(logging.CRITICAL)
        try:
            with (
                pace.slower(),
                chance.replaced(random.Random(self.course.seed + 1)),
                clocks.replaced(self.clock),
                failpoint.replaced(Failpoints(self)),
            ):
                yield
        finally:
            logging.disable(logging.NOTSET)

    def _close(self) -> None:
        for worker in self.workers:
            self.end_actor(worker)
        for sender in self.senders.values():
            self.end_actor(sender)
        for site in self.sites.values():
            site.close()

    @property
    def now(self) -> float:
        """Seconds since the course began."""
        return self.time.now - self.began

    # -- the scheduler -----------------------------------------------------------------------

    def _go(self, done: Callable[[], bool]) -> None:
        while not done():
            self._advance()

    def _advance(self) -> None:
        """Take a step, or let time pass until one is possible."""
        now = self.time.now
        while self.todo and self.todo[-1].at <= self.now + 1e-6:
            self.carry_out(self.todo.pop())
        if self.standing:
            for sender in [each for each in self.standing if each.frozen_until <= now]:
                self.standing.remove(sender)
                if sender.alive:
                    self.act(sender, None)
        ready = [each for each in self.workers if each.wake_at <= now and each.frozen_until <= now]
        while ready:
            at = self._draw(len(ready))
            worker = ready[at]
            if self._step(worker):
                return
            del ready[at]
        self._wait()

    def _draw(self, count: int) -> int:
        return int(self.dice.random() * count) if count > 1 and self.course.shuffled else 0

    def _step(self, worker: Worker) -> bool:
        if worker.parked is not None:
            self.act(worker, None)
            return True
        step = worker.machine.choose(self._draw)
        if step is None:
            worker.wake_at = worker.machine.next_at
            return False
        self.act(worker, step.take)
        return True

    def act(self, actor: Actor, call: Callable[[], object] | None) -> None:
        """Let the actor do this, or go on with what it was doing when it froze."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise Violation("everything-ends", "the course takes too many steps")
        former, self.actor = self.actor, actor
        if call is None:
            running, actor.parked = actor.parked, None
            running.switch()
        else:
            running = self._resting.pop() if self._resting else greenlet(self._take_steps)
            running.switch(actor, call)
        self.actor = former
        if isinstance(actor, Worker) and actor.over and actor.parked is None:
            self.bury(actor)
        if self.book.violations:
            raise self.book.violations[0]

    def _take_steps(self, actor: Actor, call: Callable[[], object]) -> None:
        """What a greenlet does: one step after the other, each to its end."""
        while True:
            self._try(actor, call)
            self._resting.append(greenlet.getcurrent())
            actor, call = self._main.switch()

    def _try(self, actor: Actor, call: Callable[[], object]) -> None:
        try:
            call()
        except Death:
            actor.parked = None
        except Exception as error:  # noqa: BLE001  # whatever it is, the course has failed
            if not isinstance(error, AztaskError) or isinstance(actor, Worker):
                self.book.complain("no-crash", f"{actor.name}: {type(error).__name__}: {error}")
                self.book.violations[-1].__cause__ = error

    def _wait(self) -> None:
        now = self.time.now
        self.flows.check_resting(self.workers)
        self.waits += 1
        if self.waits > MOST_STEPS:
            raise Violation("everything-ends", "the course waits too often")
        times = [max(each.wake_at, each.frozen_until) for each in self.workers]
        times += [each.frozen_until for each in self.standing]
        at = min(times, default=math.inf)
        todo = self.todo[-1].at + self.began if self.todo else math.inf
        if not self.todo and not self.quiet:
            todo = min(todo, self.course.quiet_at + self.began)
        at = min(at, todo)
        leap = min(todo, now + self._longest_leap)
        if leap > at and all(each.frozen_until <= now and each.idle() for each in self.workers):
            due = self._next_due()
            if min(due, leap) > at:
                self.leapt += 1
                at = min(due, leap)
        if math.isinf(at):
            at = now + 60.0
        self.time.now = max(now, at)
        if self.outages:
            self.outages = [each for each in self.outages if each[0] > self.time.now]

    def _next_due(self) -> float:
        """When the next message, or occurrence, is due."""
        wall = self.clock.wall() - self.time.now
        # What could be received and is not, because of a pause, is waited for longer and longer.
        came = self.book.counts["deliveries"]
        self._patience = (
            1.0 if came != self._came else min(2.0 * self._patience, self._longest_leap / 6.0)
        )
        self._came, soon = came, self.time.now + self._patience
        due = [site.next_due(self.time.now, soon, wall) for site in self.sites.values()]
        if self.course.every and not self.quiet:
            wall_now = self.clock.wall()
            due.append((wall_now // self.course.every + 1) * self.course.every + 0.01 - wall)
        at = min(due)
        if math.isinf(at) and (self.book.open or self.workflows_are_open()):
            at = self.time.now + 30.0  # housekeeping has to find it
        if len(self.book.open) > sum(site.living() for site in self.sites.values()):
            # What expired in a queue is found by looks at its dead letters, a page at a time.
            at = min(at, self.time.now + DEAD_SECONDS)
        return max(at, soon) if at < self.time.now else at

    def workflows_are_open(self) -> bool:
        """Whether a workflow has not ended."""
        return any(
            sender.results.workflows.open_workflows(1, "") for sender in self.senders.values()
        )

    def sleep(self, seconds: float) -> None:
        """A program waits, for an answer or between two tries: the others go on."""
        actor, here = self.actor, greenlet.getcurrent()
        if actor is None or here is self._main or seconds <= 0 or actor.site.locked():
            self.time.move(seconds)
            return
        actor.frozen_until, actor.parked = self.time.now + seconds, here
        if isinstance(actor, Sender):
            self.standing.append(actor)
        self._main.switch()
        if not actor.alive:
            raise Death

    # -- points ------------------------------------------------------------------------------

    def point(self, name: str) -> None:
        """The actor of this step has come to a point, where it may die or freeze."""
        self.points[name] += 1
        if not self.armed or self.actor is None or self.quiet:
            return
        label = self.actor.label
        place = next(
            (
                place
                for place, each in self.armed.items()
                if each.what[0] == name and each.app == label
            ),
            None,
        )
        if place is None:
            return
        decision = self.armed[place]
        left = decision.what[1] - 1
        self.armed[place] = Decision(
            decision.at, decision.kind, decision.app, (name, left, *decision.what[2:])
        )
        if left > 0:
            return
        del self.armed[place]
        self.strike_here(decision)

    def strike_here(self, decision: Decision) -> None:
        """The actor of this step dies or freezes here."""
        actor = self.actor
        assert actor is not None
        if decision.kind == "die-at":
            self.faults["death at a point"] += 1
            self.kill(actor)
            if isinstance(actor, Worker):
                self.later(10.0, Decision(0.0, "start", decision.app))
            raise Death
        if actor.can_stop_here() and greenlet.getcurrent() is not self._main:
            self.faults["freeze at a point"] += 1
            self.book.note(actor.name, f"freezes at {decision.what[0]}", "")
            self.book.strike(actor)
            actor.frozen_until = self.time.now + decision.what[2]
            actor.parked = greenlet.getcurrent()
            if isinstance(actor, Sender):
                self.standing.append(actor)
            self._main.switch()
            if not actor.alive:
                raise Death

    # -- actors ------------------------------------------------------------------------------

    def start_worker(self, label: str, version: int | None = None) -> Worker:
        """Start a worker of an app."""
        self._names += 1
        sender = self.sender(label)
        version = sender.version if version is None else version
        name = f"{label}{self._names}"
        options = WorkerOptions(
            name=name,
            queues=self.program.queues(sender.app),
            concurrency=self.course.slots,
            pool=self.course.pool,
            shutdown_timeout=10.0,
            shutdown_grace=3.0,
        )
        worker = Worker(self, name, self.sites[label], version, options)
        self.workers.append(worker)
        return worker

    def sender(self, label: str, version: int = 1) -> Sender:
        """The program that sends, of an app."""
        found = self.senders.get(label)
        if found is None or not found.alive or found.parked is not None:
            version = found.version if found is not None else version
            self._names += 1
            found = Sender(self, f"{label}-sender{self._names}", self.sites[label], version)
            self.senders[label] = found
            self._prepare(found)
        return found

    def _prepare(self, sender: Sender) -> None:
        """Make the queues and tables, once for each app, whatever the weather."""
        if sender.label in self._prepared:
            return
        self._prepared.add(sender.label)
        with self.fate.holding():
            if isinstance(sender.results, Provisioned):
                sender.results.create()
            for queue in self.program.queues(sender.app):
                sender.broker.declare(queue, sender.app.queue_options(queue))

    def kill(self, actor: Actor) -> None:
        """It is dead from now on: it reaches nothing any more."""
        self.book.note(actor.name, "dies", "")
        self.book.strike(actor)
        self.bury(actor)

    def bury(self, actor: Actor) -> None:
        """It has ended."""
        if isinstance(actor, Worker) and actor in self.workers:
            self.workers.remove(actor)
        self.end_actor(actor)

    def end_actor(self, actor: Actor) -> None:
        """Forget it."""
        actor.alive = False
        if isinstance(actor, Worker):
            actor.vanish()
        parked, actor.parked = actor.parked, None
        if parked is not None and parked is not greenlet.getcurrent():
            with contextlib.suppress(Death):
                parked.throw(Death)

    def is_out(self, actor: Actor, service: str) -> bool:
        """Whether the service is out for this actor."""
        return any(
            self.time.now < until and label == actor.label and what == service
            for until, label, what in self.outages
        )

    def carry_out(self, decision: Decision) -> None:
        """Do what was decided."""
        if decision.kind in harms.FAULTS:
            if not self.quiet:
                harms.FAULTS[decision.kind](self, decision)
            return
        known = self.senders.get(decision.app)
        waits = known is not None and known.alive and known.parked is not None
        if known is not None and waits and known.frozen_until - self.time.now < 2.0:
            self.later(0.1, decision)  # it waits for an answer
            return
        sender = self.sender(decision.app)
        self.act(sender, lambda: operations.OPERATIONS[decision.kind](self, sender, decision))

    def sent_to(self, label: str, queue: str) -> None:
        """A message came into a queue: the receives that wait there end."""
        for worker in self.workers:
            if worker.label == label:
                worker.woken(queue)

    def later(self, seconds: float, decision: Decision) -> None:
        """Carry out another decision after so many seconds."""
        at = self.now + seconds
        made = Decision(at, decision.kind, decision.app, decision.what)
        where = len(self.todo)
        while where and self.todo[where - 1].at < at:
            where -= 1
        self.todo.insert(where, made)

    def record_of(self, life: Life) -> RunRecord | None:
        """What the result store has about a task now."""
        found: RunRecord | None = self.sender(life.app).results.get(life.task_id)
        return found
