"""The stepped shell of a worker: no thread, no process, no sleep.

Everything that a real worker does on threads and in processes is a *step* here, which something
else decides to take: `Machine.steps` lists those that are possible now, and `Machine.next_at` says
when time alone makes another one possible. The core, the pipeline, the lease keeper, the pool, the
chores, the broker and the stores are the real ones.

Rules
1. A step runs to its end. Nothing moves the clock but `Machine.pass_time`, and a task's own sleep.
2. A task's function is called at the end of its run, after so many seconds as its script says; an
   interrupt or a death before that means that it is not called.
3. All of it is in the order of the steps: one seed for the choices and for `aztask.support.chance`
   is one course of events.
"""

from __future__ import annotations

import inspect
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple, Protocol, TypeVar

from aztask.app import App
from aztask.context import TaskLease, set_current_context
from aztask.errors import LeaseLost
from aztask.message.message import MESSAGE_FIELDS, TaskMessage, build
from aztask.queues.base import ANY_SESSION, Broker, Receiver, SessionHolder
from aztask.queues.delivery import Delivery
from aztask.queues.lease.keeper import LeaseKeeper, LeaseReports
from aztask.steps.suspension import Suspension
from aztask.support.clock import Clock
from aztask.support.parts import Part
from aztask.worker.intake.queueintake import is_refused, pause_after
from aztask.worker.lane import Batches, InlineLane, Lane, Work
from aztask.worker.mailbox import HasDescriptor, Mailbox
from aztask.worker.options import WorkerOptions
from aztask.worker.pipeline.work import WorkItem
from aztask.worker.pool import attempt
from aztask.worker.pool.link import Link, PoolPlan
from aztask.worker.pool.packets import Answers
from aztask.worker.pool.runner import INTERRUPTS, TIMED
from aztask.worker.ports import IntakeReports, QueueSource
from aztask.worker.supervisor import Supervisor
from aztask.worker.upkeep.scheduling import Scheduling

Item = TypeVar("Item")

START: float = 1_700_000_000.0
KILLED: int = -9


class Time:
    """The time of all clocks, which stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def clock(self, ahead: Callable[[], float] = float) -> Clock:
        """A clock whose wall is so many seconds ahead of the services'."""
        return Clock(
            monotonic=lambda: self.now,
            wall=lambda: START + self.now + ahead(),
            sleep=self.move,
        )

    def move(self, seconds: float) -> None:
        """Let so many seconds pass."""
        self.now += max(0.0, seconds)


# -- the loop's mailbox --------------------------------------------------------------------------


class SteppedMailbox:
    """Never waits: it notes until when the loop would have waited."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._calls: deque[Callable[[], None]] = deque()
        self._watched: dict[Any, Callable[[], None]] = {}
        self._woken = False
        self.until = -math.inf

    @property
    def due(self) -> bool:
        """Whether the loop's wait ends now; a process with answers ends it, too."""
        return bool(self._calls) or self._woken

    def post(self, call: Callable[[], None]) -> None:
        """Keep the call for the next turn."""
        self._calls.append(call)

    def wake(self) -> None:
        """The next turn is due."""
        self._woken = True

    def watch(self, end: HasDescriptor, readable: Callable[[], None]) -> None:
        """Ask this process for answers from now on."""
        self._watched[end] = readable

    def unwatch(self, end: HasDescriptor) -> None:
        """Ask it no longer."""
        del self._watched[end]

    def wait(self, seconds: float, part: Part) -> None:
        """Handle what is here; `until` is when the wait for more ends."""
        self.until = self._clock.monotonic() + seconds
        self._woken = False
        for end, readable in list(self._watched.items()):
            if end.pending:
                readable()
        self.run()

    def run(self) -> None:
        """Run the posted calls, those that they post included."""
        while self._calls:
            self._calls.popleft()()

    def close(self) -> None:
        """Forget what is left."""
        self._calls.clear()
        self._watched.clear()


class SteppedLane(Batches[Item]):
    """A lane with threads, whose batches are steps."""

    waiting = False

    def __init__(self, name: str, work: Work[Item], mailbox: Mailbox) -> None:
        super().__init__(Part(name, listed=False), work)
        self._mailbox = mailbox
        self._busy = 0

    def __len__(self) -> int:
        return len(self._items) + self._busy

    @property
    def due(self) -> bool:
        """Whether a batch can be taken."""
        return bool(self._items)

    def submit(self, items: Any) -> None:
        """Queue these items for a later step."""
        self._items.extend(items)

    def turn(self) -> None:
        """The steps do the work."""

    def step(self) -> None:
        """Work on one batch; the loop's next turn takes it back."""
        batch = self.take()
        self._busy += len(batch)
        self.do(batch)
        self._mailbox.post(lambda: self._returned(batch))

    def stop(self) -> None:
        """Finish what is queued."""
        while self._items:
            self.step()

    def _returned(self, batch: Sequence[Item]) -> None:
        self._busy -= len(batch)
        self._work.done(batch)


# -- receiving -----------------------------------------------------------------------------------


class Polls(Protocol):
    """Says when an empty queue is looked at again."""

    def next_poll(self, queue: str, usual: float) -> float:
        """The time of the next look, on the clock of the deadlines. usual: seconds until then."""
        ...


class SteppedIntake:
    """Receives from a queue, one receive with each step."""

    session = None

    def __init__(
        self,
        broker: Broker,
        source: QueueSource,
        intakes: IntakeReports,
        clock: Clock,
        polls: Polls,
        *,
        shares: bool,
    ) -> None:
        self.queue = source.queue
        self.live = False
        self._polls = polls
        self._broker = broker
        self._source = source
        self._intakes = intakes
        self._clock = clock
        self._shares = shares
        self._part = Part(f"intake {source.queue}", listed=False)
        self._receiver: Receiver | None = None
        self._room = self._failures = 0
        self._empty = self._working = self._worked = False
        self.at = -math.inf

    @property
    def idle(self) -> bool:
        """Whether the last receive found nothing."""
        return self._empty

    @property
    def due(self) -> bool:
        """Whether it may receive now."""
        return self._working and self._room > 0 and self._clock.monotonic() >= self.at

    @property
    def next_at(self) -> float:
        """When it may receive, if there is room."""
        return self.at if self._working and self._room > 0 else math.inf

    @property
    def receiver(self) -> Receiver:
        """The receiver through which the deliveries are renewed and settled."""
        if self._receiver is None:
            self._receiver = self._broker.receiver(
                self.queue,
                lease=self._intakes.lease(self.queue),
                poll_ceiling=self._source.poll_ceiling,
            )
        return self._receiver

    def start(self) -> None:
        """Receive from now on."""
        self._working = True

    def allow(self, room: int) -> None:
        """Set how many more deliveries there is room for."""
        self._room = room

    def grant(self, change: int) -> None:
        """Change by `change` how many more deliveries there is room for."""
        self._room += change

    def wake(self) -> None:
        """A message came: a receive that waits for one ends."""
        if not self._failures:
            self.at = -math.inf

    def step(self) -> None:
        """Receive once."""
        asked_at, found = self._clock.wall(), list[Delivery]()
        limit = min(self._room, self._broker.capabilities.receive_limit)
        try:
            found = self.receiver.receive(limit, 0.0)
        except Exception as error:  # noqa: BLE001  # as the real intake
            if is_refused(error, self._worked):
                self._intakes.refused(error)
                self._working = False
                return
            self._failures += 1
            pause = pause_after(self._part, self.queue, error, self._failures)
            self.at = self._clock.monotonic() + pause
            return
        self._worked, self._failures = True, 0
        self._room -= len(found)
        fell_quiet, self.live = self.live and not found, bool(found)
        self._empty = not found
        if found:
            self._intakes.take(self, found, asked_at)
        else:
            self.at = self._polls.next_poll(self.queue, self._source.wait)
        if fell_quiet and self._shares:
            self._intakes.fell_quiet()

    def stop(self) -> None:
        """Receive no more."""
        self._working = False

    def join(self, timeout: float) -> None:
        """Nothing runs beside the steps."""

    def close(self) -> None:
        """Close the receiver, if it was opened."""
        if self._receiver is not None:
            self._receiver.close()


class SteppedSessions:
    """Receives from the sessions of a queue, each held by a slot."""

    def __init__(
        self,
        broker: Broker,
        source: QueueSource,
        intakes: IntakeReports,
        clock: Clock,
        polls: Polls,
        *,
        most: int,
    ) -> None:
        self.queue = source.queue
        self._polls = polls
        self.intakes = intakes
        self.clock = clock
        self._broker = broker
        self._source = source
        self._most = most
        self._part = Part(f"intake {source.queue}", listed=False)
        self._room = self._failures = 0
        self._quiet = self._working = False
        self._at = -math.inf
        self.slots: list[SteppedSlot] = []

    @property
    def idle(self) -> bool:
        """Whether no session is held and none was found."""
        return self._quiet and not self.slots

    @property
    def working(self) -> int:
        """How many sessions are served now."""
        return sum([not slot.waits for slot in self.slots]) if self.slots else 0

    @property
    def due(self) -> bool:
        """Whether it may look for a session, or go on with one."""
        return self.next_at <= self.clock.monotonic()

    @property
    def next_at(self) -> float:
        """When `step` has something to do."""
        at = min([slot.next_at for slot in self.slots]) if self.slots else math.inf
        return min(at, self._at) if self._may_look() else at

    def _may_look(self) -> bool:
        return self._working and self._room > 0 and self.working < self._most

    def start(self) -> None:
        """Look for sessions from now on."""
        self._working = True

    def allow(self, room: int) -> None:
        """Set how many more deliveries there is room for; below 0, sessions are given up."""
        self._room = room

    def set_most(self, most: int) -> None:
        """Serve up to this many sessions."""
        self._most = most

    def wake(self) -> None:
        """A message came: the wait for a session with messages ends."""
        if not self._failures:
            self._at = -math.inf

    def step(self) -> None:
        """Go on with a session whose delivery has ended, or look for another one."""
        now = self.clock.monotonic()
        for slot in self.slots:
            if slot.next_at <= now:
                try:
                    if slot.let_go or not self._working or self._room < 0 or not slot.receive():
                        self.slots.remove(slot)
                        slot.close()
                except Exception as error:  # noqa: BLE001  # as the thread of a real slot
                    self.slots = [each for each in self.slots if each is not slot]
                    self._failures += 1
                    self._at = now + pause_after(self._part, self.queue, error, self._failures)
                return
        lease = self.intakes.lease(self.queue)
        try:
            receiver = self._broker.receiver(self.queue, lease=lease, session=ANY_SESSION)
            slot = SteppedSlot(self, receiver)
            found = slot.receive()
        except Exception as error:  # noqa: BLE001  # as the real intake
            self._failures += 1
            self._at = now + pause_after(self._part, self.queue, error, self._failures)
            return
        self._failures = 0
        self._quiet = not found
        if found:
            self._room -= 1
            self.slots.append(slot)
        else:
            receiver.close()
            self._at = self._polls.next_poll(self.queue, self._source.wait)

    def stop(self) -> None:
        """Look for no more sessions; those that are held end with their deliveries."""
        self._working = False

    def join(self, timeout: float) -> None:
        """Nothing runs beside the steps."""

    def close(self) -> None:
        """Give all sessions back."""
        for slot in self.slots:
            slot.close()
        self.slots.clear()


class SteppedSlot:
    """Holds one session: one delivery after the other, each when the previous one has ended."""

    def __init__(self, sessions: SteppedSessions, receiver: Receiver) -> None:
        self.queue = sessions.queue
        self.receiver = receiver
        self.waits = self.let_go = False
        self.next_at = math.inf
        self._sessions = sessions

    @property
    def session(self) -> SteppedSlot:
        """What holds the session of a delivery: this slot."""
        return self

    def receive(self) -> bool:
        """Receive the session's next delivery; whether there was one."""
        asked_at = self._sessions.clock.wall()
        found = self.receiver.receive(1, 0.0)
        self.next_at = math.inf
        if found:
            self._sessions.intakes.take(self, found, asked_at)
        return bool(found)

    def held(self) -> None:
        """The delivery waits for its retry, under its lease."""
        self.waits = True

    def ended(self, item: WorkItem) -> None:
        """The delivery has ended: go on, or give the session back."""
        self.waits = self.let_go = not item.settled
        self.next_at = self._sessions.clock.monotonic()
        if item.left_to_lapse:
            self.next_at = item.delivery.deadline

    def close(self) -> None:
        """Give the session back."""
        if self.let_go and isinstance(self.receiver, SessionHolder):
            self.receiver.let_go()
        self.receiver.close()


# -- the pool ------------------------------------------------------------------------------------


@dataclass
class Play:
    """What a run does. seconds: that it takes. dies: the process ends with this status instead.

    deaf: it does not notice interrupts.
    """

    seconds: float = 0.0
    dies: int | None = None
    deaf: bool = False


Script = Callable[[TaskMessage], Play]


def at_once(message: TaskMessage) -> Play:
    """The script of tasks that take no time."""
    return Play()


@dataclass(eq=False)
class SteppedRun:
    """A delivery in a slot."""

    packet: list[Any]
    message: TaskMessage
    lease: TaskLease
    play: Play
    started: float
    interrupted: str = ""
    told: bool = False


class SteppedProcess:
    """A pool process: it reads deliveries, runs them as its script says, and answers."""

    def __init__(self, machine: Machine, plan: PoolPlan, pid: int) -> None:
        self.pid = pid
        self.status: int | None = None
        self.failed = ""
        self.hung_up = False
        self._seen = False
        self._machine = machine
        self._clock = machine.clock
        self._slots = plan.slots
        self._inbox: deque[list[Any]] = deque()
        self._answers: deque[list[Any]] = deque()
        self._runs: dict[int, SteppedRun] = {}
        self._retired = 0
        self._ready = False
        self._next_at: float | None = None
        """What `next_at` has found, until something changes."""
        self._changed()
        self._replies = Answers()
        outbox = SteppedOutbox(self._answers, machine)
        self._ask = outbox.send
        self._attempts = machine.reader(outbox, self._replies)

    @property
    def outbox(self) -> Any:
        """What the mailbox asks for answers: this process."""
        return self

    @property
    def pending(self) -> bool:
        """Whether the worker has something to read."""
        return bool(self._answers) or (self.hung_up and not self._seen)

    def _changed(self) -> None:
        self._next_at = None
        self._machine.stirring[self.pid] = self

    # -- what the worker does ----------------------------------------------------------------

    def send(self, packet: list[Any]) -> bool:
        """Put a delivery into the inbox."""
        if self.hung_up:
            return False
        self._changed()
        self._inbox.append(packet)
        return True

    def tell(self, packet: list[Any]) -> bool:
        """Take a control packet, at once."""
        kind, number, *rest = packet
        run = self._runs.get(number)
        if self.hung_up:
            return True
        self._changed()
        if kind == "ping":
            self._answers.append(["alive"])
        elif kind == "answer":
            self._replies.answer(number, *rest)
        elif kind == "renewed" and run is not None:
            run.lease.renewed(rest[0])
        elif kind == "renewed":
            self._renew_unread(number, rest[0])
        elif kind == "interrupt" and run is not None:
            run.interrupted = rest[0]
        return True

    def _renew_unread(self, number: int, deadline: float) -> None:
        for packet in self._inbox:
            if packet and packet[0] == number:
                packet[3] = deadline

    def answers(self) -> list[list[Any]]:
        """What it has answered since the last call."""
        packets = list(self._answers)
        self._answers.clear()
        self._seen = self.hung_up
        return packets

    def unread(self) -> list[int]:
        """Take back what it has not read."""
        numbers = [packet[0] for packet in self._inbox if packet]
        self._inbox = deque(packet for packet in self._inbox if not packet)
        self._changed()
        return numbers

    def runs(self) -> list[SteppedRun]:
        """What its slots run."""
        return list(self._runs.values())

    def running(self) -> dict[int, float]:
        """What its slots run, and since when."""
        return {number: run.started for number, run in self._runs.items()}

    @property
    def idle(self) -> bool:
        """Whether its slots run nothing."""
        return not self._runs

    def memory(self) -> int:
        """It uses none of its own."""
        return 0

    def kill(self) -> None:
        """It is dead at once."""
        self.die(KILLED)

    def wait(self, seconds: float | None = None) -> None:
        """It needs no time to die."""

    def close(self) -> None:
        """It has nothing open."""

    # -- its steps ---------------------------------------------------------------------------

    @property
    def next_at(self) -> float:
        """When `step` has something to do; minus infinity for now."""
        if self._next_at is None:
            self._next_at = self._find_next()
        return self._next_at

    def _find_next(self) -> float:
        if self.hung_up:
            return math.inf
        if not self._ready or (self._inbox and (self._has_room() or not self._inbox[0])):
            return -math.inf
        return min([self._ends_at(run) for run in self._runs.values()], default=math.inf)

    def _ends_at(self, run: SteppedRun) -> float:
        if run.interrupted and not run.play.deaf:
            return -math.inf
        ends = run.started + run.play.seconds
        return ends if run.told else min(ends, run.lease.deadline)

    def step(self) -> None:
        """Get ready, begin a run, or end one."""
        try:
            self._step()
        finally:
            self._changed()

    def _step(self) -> None:
        if not self._ready:
            self._ready = True
            self._answers.append(["ready"])
            return
        several, ended = self._machine.several(), False
        for number, run in list(self._runs.items()):
            now = self._clock.monotonic()  # the worker may have stood still in the run before
            if not self.hung_up and self._ends_at(run) <= now:
                self._end(number, run, now)
                ended = True
                if not several:
                    return
        if ended:
            return
        while self._inbox and not self.hung_up and (self._has_room() or not self._inbox[0]):
            packet = self._inbox.popleft()
            if packet:
                self._begin(packet, self._clock.monotonic())
            else:
                self._retired += 1
                if self._retired >= self._slots and not self._runs:
                    self.die(0)
            if not several:
                return

    def _has_room(self) -> bool:
        return len(self._runs) < self._slots - self._retired

    def _begin(self, packet: list[Any], now: float) -> None:
        number, fields, _, deadline, *_ = packet
        if len(packet) == TIMED:
            opens, closes = packet.pop()
            if now > closes:
                self._answers.append(["late", number])
                return
            now = max(now, opens)
        message = build(TaskMessage, dict(zip(MESSAGE_FIELDS, fields, strict=True)))
        lease = TaskLease(
            deadline, ask=lambda more: self._ask(["extend", number, more]), clock=self._clock
        )
        play = self._machine.script(message)
        run = self._runs[number] = SteppedRun(packet, message, lease, play, now)
        self._machine.begun(run)

    def _end(self, number: int, run: SteppedRun, now: float) -> None:
        if now >= run.lease.deadline and not run.told and not run.interrupted:
            run.told, run.interrupted = True, "lease"  # as the guard of a process does
            self._answers.append(["overdue", number, False])
            return
        if run.play.dies is not None and not run.interrupted:
            self.die(run.play.dies)
            return
        answer = self._answer(number, run)
        if self.hung_up:  # it died in the middle of the task's function
            return
        del self._runs[number]
        answer[1:1] = (number, run.started, now - run.started)
        self._answers.append(answer)
        if self._retired >= self._slots and not self._runs:
            self.die(0)

    def _answer(self, number: int, run: SteppedRun) -> list[Any]:
        """Call the task's function, unless it was interrupted; as `SlotRunner` does."""
        attempts, message = self._attempts, run.message
        if run.interrupted and not run.play.deaf:
            error = INTERRUPTS.get(run.interrupted, LeaseLost)
            return attempts.error(error(), message)
        _, _, delivery_count, _, enqueued_at, *more = run.packet
        given = [value for value in more if value is not None]
        delivery = attempt.OpenRun(
            number, message, delivery_count, enqueued_at, run.lease, run.started, given
        )
        try:
            call = attempts.open(delivery)
            set_current_context(call.context)
            try:
                with attempts.hooks(call.context):
                    value = call.begin()
                    if inspect.isawaitable(value):
                        raise TypeError("a stepped process runs plain functions")
            finally:
                set_current_context(None)
            return attempts.value(value, call)
        except (Exception, Suspension) as error:  # noqa: BLE001  # task code may raise anything
            return attempts.error(error, message)

    def die(self, status: int) -> None:
        """End now; what it runs ends with it."""
        if self.hung_up:
            return
        self.status, self.hung_up = status, True
        self._changed()
        self._runs.clear()
        self._machine.dead.append(self)


class SteppedOutbox:
    """Where the tasks of a process send their requests."""

    def __init__(self, answers: deque[list[Any]], machine: Machine) -> None:
        self._answers = answers
        self._machine = machine

    def send(self, packet: list[Any]) -> None:
        """Send it to the worker, which answers at once where the task waits for that."""
        self._answers.append(packet)
        if packet[0] in ("save", "state", "set-state", "extend"):
            self._machine.serve_requests()


# -- all of it -----------------------------------------------------------------------------------


class SteppedScheduling(Scheduling):
    """Makes occurrences, one turn with each step."""

    def __init__(self, app: App, name: str, clock: Clock) -> None:
        super().__init__(app, name)
        self._clock = clock
        self.next_at = math.inf

    def start(self) -> None:
        """Make occurrences from now on."""
        self.next_at = min(self.next_at, self._clock.monotonic())

    def turn(self) -> None:
        """Do what is due."""
        self.next_at = self._clock.monotonic() + self.step()

    def stop(self) -> None:
        """Make no more."""
        self.next_at = math.inf


class Step(NamedTuple):
    """Something that can be done now: its kind, and of what, the same in every course."""

    kind: str
    of: str | int
    take: Callable[[], object]


@dataclass
class Machine:
    """The machine of one worker: it makes the parts, as `Shell`, and takes their steps.

    ahead: by how much its wall clock is ahead of the services'.
    poll: seconds between two receives from an empty queue, at least.
    trace: what was noted, each with its time.
    stirring: the processes that can take a step now or at some time, or have answered; by number.
        A pool has up to 128, most of them idle, and `steps` is asked before each step of a world.
    """

    time: Time
    app: App
    script: Script = at_once
    ahead: Callable[[], float] = float
    poll: float = 0.0
    trace: list[tuple[float, str, str]] = field(default_factory=list)
    dead: list[SteppedProcess] = field(default_factory=list)
    stirring: dict[int, SteppedProcess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = self.time.clock(self.ahead)
        self.box = SteppedMailbox(self.clock)
        self.lanes: dict[str, SteppedLane[Any]] = {}
        self.intakes: list[SteppedIntake | SteppedSessions] = []
        self.processes: list[SteppedProcess] = []
        self.schedulings: list[SteppedScheduling] = []
        self.keepers: list[LeaseKeeper] = []
        self.supervisor: Supervisor | None = None
        self._pids = count(1)

    def note(self, what: str, which: str) -> None:
        """Add a line to the trace."""
        self.trace.append((round(self.time.now, 6), what, which))

    def begun(self, run: SteppedRun) -> None:
        """A run has begun in a slot."""
        self.note("start", run.message.id)

    def next_poll(self, queue: str, usual: float) -> float:
        """After the usual pause."""
        return self.clock.monotonic() + usual

    def several(self) -> bool:
        """Whether a step of a process begins, or ends, all that it can."""
        return False

    def turn(self) -> None:
        """One turn of the worker's loop."""
        assert self.supervisor is not None
        self.supervisor.turn()

    # -- what a worker asks of its shell -----------------------------------------------------

    def mailbox(self) -> Mailbox:
        """The loop's mailbox, which never waits."""
        return self.box

    def keeper(self, broker: Broker, renew_at: float, reports: LeaseReports) -> LeaseKeeper:
        """The real keeper, without a thread."""
        made = LeaseKeeper(
            broker, clock=self.clock, renew_at=renew_at, reports=reports, threads=False
        )
        self.keepers.append(made)
        return made

    def lane(
        self, name: str, work: Work[Item], mailbox: Mailbox, *, threads: int, essential: str
    ) -> Lane[Item]:
        """An inline lane as in a real worker, else one whose batches are steps."""
        if not threads:
            return InlineLane(Part(name, listed=False), work)
        made = SteppedLane(name, work, mailbox)
        self.lanes[name] = made
        return made

    def intake(
        self, broker: Broker, source: QueueSource, intakes: IntakeReports, *, shares: bool
    ) -> SteppedIntake:
        """An intake whose receives are steps."""
        source = replace(source, wait=max(source.wait, self.poll))
        made = SteppedIntake(broker, source, intakes, self.clock, self, shares=shares)
        self.intakes.append(made)
        return made

    def sessions(
        self,
        broker: Broker,
        source: QueueSource,
        intakes: IntakeReports,
        *,
        most: int,
        share: float,
    ) -> SteppedSessions:
        """An intake of sessions whose receives are steps."""
        source = replace(source, wait=max(source.wait, self.poll))
        made = SteppedSessions(broker, source, intakes, self.clock, self, most=most)
        self.intakes.append(made)
        return made

    def starter(self, mailbox: Mailbox, *, foreground: bool = False) -> Machine:
        """It starts the processes itself."""
        return self

    def scheduling(self, app: App, name: str) -> SteppedScheduling:
        """Schedules whose turns are steps."""
        made = SteppedScheduling(app, name, self.clock)
        self.schedulings.append(made)
        return made

    def reader(self, outbox: SteppedOutbox, answers: Answers) -> attempt.RunReader:
        """What reads the calls in a process."""
        return attempt.RunReader(self.app, outbox, answers, os.getpid())

    # -- what a pool asks of its starter -----------------------------------------------------

    def start(self, plan: PoolPlan) -> Link:
        """Start a process, which gets ready in a step of its own."""
        made = SteppedProcess(self, plan, next(self._pids))
        self.processes.append(made)
        return made

    def ended(self) -> list[Link]:
        """The processes that have ended since the last call."""
        ended, self.dead = self.dead, []
        for process in ended:
            self.processes.remove(process)
        return list(ended)

    def check(self, now: float) -> None:
        """Nothing can get stuck."""

    def close(self) -> None:
        """The processes are dead already."""

    # -- steps -------------------------------------------------------------------------------

    def work(self, options: WorkerOptions) -> Supervisor:
        """Begin the worker: the real supervisor on this shell."""
        self.supervisor = Supervisor(self.app, "stepped:app", options, self)
        self.supervisor.core.begin()
        return self.supervisor

    def steps(self) -> list[Step]:
        """What can be done now, in an order that is the same in every course."""
        now, found = self.time.now, list[Step]()
        answered = bool(self.dead)
        for number, keeper in enumerate(self.keepers):
            if (at := keeper.due_at) is not None and at <= now:
                found.append(Step("renew", number, keeper.turn))
        for intake in self.intakes:
            if intake.next_at <= now:
                found.append(Step("receive", intake.queue, intake.step))
        for name, lane in self.lanes.items():
            if lane.due:
                found.append(Step("lane", name, lane.step))
        for process in self._stirring():
            if process.next_at <= now:
                found.append(Step("process", process.pid, process.step))
            answered = answered or process.pending
        for each in self.schedulings:
            if each.next_at <= now:
                found.append(Step("schedules", "", each.turn))
        if self.supervisor is not None and (now >= self.box.until or self.box.due or answered):
            found.append(Step("turn", "", self.turn))
        return found

    def _stirring(self) -> list[SteppedProcess]:
        """Those of `stirring`, in the order of their starts; the others are forgotten."""
        found = [self.stirring[pid] for pid in sorted(self.stirring)]
        for process in found:
            if process.next_at == math.inf and not process.pending:
                del self.stirring[process.pid]
        return found

    @property
    def next_at(self) -> float:
        """When time alone makes another step possible; infinite if it never does."""
        times = [self.box.until]
        times += [at for keeper in self.keepers if (at := keeper.due_at) is not None]
        times += [intake.next_at for intake in self.intakes]
        times += [process.next_at for process in self.stirring.values()]
        times += [each.next_at for each in self.schedulings]
        return min(times)

    def serve_requests(self) -> None:
        """The worker answers the request of a running task, which waits for it."""
        assert self.supervisor is not None
        self.supervisor.core.turn()
        if (lane := self.lanes.get("requests")) is not None:
            while lane.due:
                lane.step()
        now = self.clock.monotonic()
        for keeper in self.keepers:  # a task that extends its lease waits for the renewal
            if (at := keeper.due_at) is not None and at <= now:
                keeper.turn()
        self.supervisor.core.turn()
