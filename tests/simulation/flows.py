"""Flows: tasks with recorded steps, waits, signals, calls and continuations, and what they promise.

A flow carries out its plan, one letter after the other:

    s  a step                             r  a step with a retry policy, which fails at first
    e  a step whose error is recorded     f  the run fails, once
    z  it sleeps                          l  it sleeps long
    w  it waits for the signal "go"       a  for "go" or "stop"
    c  it calls another task              t  it starts one, and waits for that or for "stop"
    n  it continues with the rest of the plan, in a new history
    o  a step, a sleep, and a step; the second version of the code has these two the other way round
    p  a step that the second version has replaced, with `context.patched`
    x  it is dead-lettered, unless it was replayed
    m  it emits some parts

Rules
1. A *place* is a task, how often it had continued, and the number of a letter of its plan.
2. Each call of a step's function gives another value, so whose value was recorded is seen.
3. What the world knows of signals is what the sender was told: one is *accepted* when its request
   has returned.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from aztask.context import Context
from aztask.errors import (
    AztaskError,
    LeaseLost,
    Reject,
    Retry,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
    WaitTimeout,
)
from aztask.retry import RetryPolicy
from aztask.steps.suspension import STEP_ORDER, OrderChanged, Parked, StepsUnavailable
from aztask.stores.records.base import Outcome, State
from aztask.worker.pipeline.redelivery import UNKNOWN_TASK

from . import streams
from .course import FLOW_TIMEOUT, MEETS, RETENTION, Decision
from .releases import FORMER, GRACE, HANDED_OVER

if TYPE_CHECKING:
    from aztask.app import App
    from aztask.message.message import TaskMessage

    from .actors import Actor, Sender, Worker
    from .book import Key
    from .world import World

Place: TypeAlias = tuple[str, int, int]

NAP: Final = 12.0
LONG: Final = 900.0
CLOCKS: Final = 2.0
"""Seconds by which a timer may be early, besides what a worker's clock is ahead that sends it again
after another one: then the run parks once more, for the rest."""

PURGES: Final = 4000.0
"""Seconds by which a purge may be early, by the clock of the worker whose purge it is."""

WAITS: Final = "wazlct"
SIGNALLED: Final = "wat"
PARTS: Final = 3
NOT_YET: Final = "not before a replay"

ONE, OTHER, PATCHED, OLD, NEW = range(100, 600, 100)
"""Added to the number of a letter: the places of its two steps, of its patch, and its steps."""

STEP_RETRY: Final = RetryPolicy(max_retries=3, delay=3.0, max_delay=20.0)


class Signal(NamedTuple):
    """A signal that was accepted. at: the world's time of that."""

    task_id: str
    name: str
    at: float


class Flows:
    """What the flows of a world did, and the assertions about it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._calls: dict[Place, int] = {}
        self._known: dict[Place, Any] = {}
        self._keys: dict[Place, str | None] = {}
        self._places: dict[str | None, Place] = {}
        self._epochs: dict[str, int] = {}
        self._arrived: dict[Place, float] = {}
        self._parked: dict[Place, set[Key]] = {}
        self._parks: set[Key] = set()
        self._waiting: dict[Key, Place] = {}
        self._children: dict[tuple[str, ...], str] = {}
        self._sent = 0
        self._tries: Counter[str] = Counter()
        self._signals: dict[str, Signal] = {}
        self._taken: dict[str, Place] = {}
        self._left: dict[str, Key] = {}
        self._dead_at: dict[str, float] = {}
        self.to_meet: dict[str, list[str]] = {}
        self._first_met: dict[tuple[str, str], float] = {}
        self.resting: set[Key] = set()

    def _complain(self, name: str, text: str, place: Place) -> None:
        task_id, epoch, number = place
        where = f"{task_id}, letter {number} after {epoch} continuations"
        self._world.book.complain(name, f"{where}: {text}", task_id)

    # -- runs and steps ----------------------------------------------------------------------

    def begun(self, context: Context, epoch: int) -> None:
        """A run of a flow has begun."""
        task_id = context.task_id
        self._world.book.counts["runs of replayed flows"] += context.message.generation > 0
        if epoch < self._epochs.get(task_id, 0):
            self._complain("continues-once", "it has continued before", (task_id, epoch, -1))
        self._epochs[task_id] = epoch

    def begun_before(self, message: TaskMessage) -> None:
        """A worker of the release before has called its function for a flow."""
        self._world.book.counts["flows at the release before"] += 1
        left = self._left.get(message.id)
        if left is not None and message.key > left:
            self._complain(
                "goes-on-where-it-is-known",
                f"run {message.key[1:]} begins at the first line, and {left[1:]} has waited",
                (message.id, 0, -1),
            )

    def met(self, task_id: str, why: str) -> None:
        """A worker has met what it cannot run, and another one can."""
        self._world.book.counts[f"put off: {why}"] += 1
        self._first_met.setdefault((task_id, why), self._world.time.now)

    def ended(self, key: Key, outcome: Outcome) -> None:
        """The end of a flow is recorded."""
        task_id, generation, _ = key
        why, place = outcome.error_type, (task_id, self._epochs.get(task_id, 0), -1)
        if outcome.state in (State.SUCCEEDED, State.CANCELLED):
            return
        self._dead_at[task_id] = self._world.time.now
        if outcome.state is State.FAILED and why in (STEP_ORDER, UNKNOWN_TASK):
            met = self._first_met.get((task_id, why))
            waited = 0.0 if met is None else self._world.time.now - met
            # An unknown name is timed by the clocks of the workers that meet it.
            exact = why == STEP_ORDER or not self._world.course.clocks_apart
            self._world.book.counts[f"given up: {why}"] += 1
            if met is None or (exact and waited < GRACE - CLOCKS):
                self._complain("waits-for-the-grace", f"{why} after {waited:.1f} s", place)
        elif generation or NOT_YET not in outcome.error:
            self._complain("flow-ends-well", f"{outcome.state}, {why}: {outcome.error}", place)

    def called(self, context: Context, place: Place) -> int:
        """A step's function is called; returns how often it was before."""
        self._world.book.counts["steps"] += 1
        if place in self._known:
            self._complain("step-once", "a recorded step runs again", place)
        key = context.step_key
        if self._keys.setdefault(place, key) != key:
            self._complain("step-key", "its key is another one in this run", place)
        if self._places.setdefault(key, place) != place:
            self._complain("step-key", f"it has the key of {self._places[key]}", place)
        before = self._calls.get(place, 0)
        self._calls[place] = before + 1
        return before

    def passed(self, place: Place, value: Any) -> None:
        """A run has come past a place, with this value: so does every later run."""
        if self._known.setdefault(place, value) != value:
            self._complain("step-agrees", f"{value!r}, and {self._known[place]!r} before", place)

    def once(self, place: Place) -> bool:
        """Whether no run has been here."""
        new = place not in self._calls
        self._calls[place] = 1
        return new

    def child(self, task_id: str, place: tuple[str, ...]) -> None:
        """A task runs that a flow has called."""
        if self._children.setdefault(place, task_id) != task_id:
            self._world.book.complain(
                "started-once",
                f"{place} has started {self._children[place]} and {task_id}",
                place[0],
            )

    # -- waits and signals -------------------------------------------------------------------

    def arrived(self, place: Place, letter: str) -> None:
        """A run has come to a wait."""
        if place in self._arrived:
            return
        self._arrived[place] = self._world.time.now
        if letter in SIGNALLED and (names := self.to_meet.get(place[0])):
            self._world.book.counts["signals as a wait ends"] += 1
            app = self._world.book.lives[place[0]].app
            self._world.later(FLOW_TIMEOUT, Decision(0.0, "signal", app, (place[0], names.pop())))

    def parked(self, context: Context, place: Place, seconds: float) -> None:
        """A run ends here, because it waits for so many seconds."""
        self._world.book.counts["parked runs"] += 1
        key: Key = context.message.key
        if seconds >= CLOCKS + self._world.course.clocks_apart:
            self._waiting[key] = place

    def rests(self, key: Key) -> None:
        """It is recorded that a run waits, or continues with other arguments.

        Where the store is away as the run ends, it is put off instead, and does so in its next hop.
        """
        self._parks.add(key)
        self._left[key[0]] = max(key, self._left.get(key[0], key))
        place = self._waiting.get(key)
        if place is None:
            return
        hops = self._parked.setdefault(place, set())
        hops.add(key)
        # A signal may wake it whose value it has just taken in an earlier wait.
        if len(hops) > 1 + self._tries[key[0]] + key[1]:
            self._complain("resumes-once", f"{sorted(hops)} have parked in one wait", place)

    def sent(self, task_id: str, name: str) -> str:
        """The value of a signal that is about to be sent."""
        self._sent += 1
        self._tries[task_id] += 1
        return f"{name}-{self._sent}"

    def accepted(self, value: str, task_id: str, name: str) -> None:
        """It was accepted."""
        self._world.book.counts["signals"] += 1
        self._signals[value] = Signal(task_id, name, self._world.time.now)

    def took(self, place: Place, value: str) -> None:
        """A wait gave the value of a signal."""
        if self._taken.setdefault(value, place) != place:
            self._complain("signal-once", f"{value} was taken by {self._taken[value]}", place)

    def late(self, place: Place, names: tuple[str, ...]) -> None:
        """A wait has timed out: then no signal was there before its time."""
        due = self._arrived[place] + FLOW_TIMEOUT
        if place in self._known or self._is_forgotten(place):
            return
        for value, signal in self._signals.items():
            mine = signal.task_id == place[0] and signal.name in names and value not in self._taken
            if mine and signal.at < due:
                self._complain("signal-is-not-lost", f"{value} was there in time", place)

    def _is_forgotten(self, place: Place) -> bool:
        """Whether the flow was a dead letter for longer than its result, and its signals, are kept.

        Its steps are kept as long as the dead letter.
        """
        dead_at = self._dead_at.get(place[0], math.inf)
        kept = RETENTION[self._world.book.lives[place[0]].app] - PURGES
        return self._arrived[place] > dead_at + kept

    def settled(self, key: Key) -> None:
        """A message has left the queue: a run that has parked rests from now on."""
        if key in self._parks:
            self.resting.add(key)

    def check_resting(self, workers: Sequence[Worker]) -> None:
        """No worker that moves has anything of a run that rests."""
        if not self.resting:
            return
        now = self._world.time.now
        for worker in workers:
            if worker.frozen_until > now or worker.parked is not None:
                continue
            held = [each.message.key for each in worker.running()]
            for key in self.resting.intersection(held):
                self._complain(
                    "parked-holds-nothing",
                    f"{worker.name} still has a slot for it",
                    (key[0], 0, -1),
                )


def register(app: App, actor: Actor, retry: RetryPolicy) -> None:
    """Register the flow of an app, and the task that it calls."""
    book, flows = actor.world.book, actor.world.flows

    def child(context: Context, *place: str) -> str:
        book.ran(actor, context.message)
        flows.child(context.task_id, place)
        return "-".join(place)

    kid = app.task_with_context(name=f"{actor.label}.kid", retry=retry)(child)

    def flow(context: Context, plan: str, epoch: int = 0) -> str:
        book.ran(actor, context.message)
        flows.begun(context, epoch)
        try:
            for number, letter in enumerate(plan):
                place = (context.task_id, epoch, number)
                _Letter(context, flows, place, actor.version).do(letter, kid)
                if letter == "n":
                    context.continue_with(plan[number + 1 :], epoch + 1)
        except OrderChanged:
            flows.met(context.task_id, STEP_ORDER)
            raise
        except StepsUnavailable:
            book.counts["flows whose store is away"] += 1
            raise
        return plan

    def former_flow(context: Context, plan: str, epoch: int = 0) -> str:
        flows.begun_before(context.message)
        raise Retry(HANDED_OVER)

    body = former_flow if actor.version == FORMER else flow
    app.task_with_context(name=f"{actor.label}.flow", retry=retry)(body)


class _Letter:
    """One letter of a plan."""

    def __init__(self, context: Context, flows: Flows, place: Place, version: int) -> None:
        self._context = context
        self._flows = flows
        self._place = place
        self._version = version

    def do(self, letter: str, kid: Any) -> None:
        """Carry it out, and note what it gave."""
        try:
            if letter in WAITS:
                self._flows.arrived(self._place, letter)
                value = self._wait(letter, kid)
            else:
                value = self._act(letter)
        except Parked as parked:
            # Who waits for a task looks for its end from time to time.
            alone = letter not in "ct"
            self._flows.parked(self._context, self._place, parked.delay if alone else 0.0)
            raise
        self._flows.passed(self._place, value)

    def _act(self, letter: str) -> Any:
        match letter:
            case "s":
                return self._context.step("s", self._step)
            case "r":
                return self._context.step("r", self._fails, retry=STEP_RETRY)
            case "e":
                return self._recorded_error()
            case "o":
                self._two_steps()
            case "p":
                self._patched()
            case "m":
                for part in range(PARTS):
                    self._context.emit([*self._place[1:], part])
            case "f":
                if self._flows.once(self._place):
                    raise ValueError("not yet")
            case "x":
                if not self._context.message.generation:
                    raise Reject(NOT_YET)
        return None

    def _step(self) -> int:
        return self._flows.called(self._context, self._place)

    def _named(self, name: str, more: int) -> None:
        """A step with a place of its own, which is the same in each version."""
        task_id, epoch, number = self._place
        place = (task_id, epoch, number + more)
        value = self._context.step(name, self._flows.called, self._context, place)
        self._flows.passed(place, value)

    def _two_steps(self) -> None:
        steps = [("one", ONE), ("other", OTHER)]
        first, second = steps if self._version == 1 else reversed(steps)
        self._named(*first)
        self._context.sleep(NAP)
        self._named(*second)

    def _patched(self) -> None:
        if self._version == 1:
            self._named("old", OLD)
            return
        task_id, epoch, number = self._place
        new = self._context.patched("new")
        self._flows.passed((task_id, epoch, number + PATCHED), new)
        self._named(*(("new", NEW) if new else ("old", OLD)))

    def _fails(self) -> int:
        before = self._flows.called(self._context, self._place)
        if not before:
            raise ValueError("the step fails")
        return before

    def _recorded_error(self) -> str:
        def fails() -> None:
            raise ValueError(str(self._flows.called(self._context, self._place)))

        try:
            self._context.step("e", fails, record_errors=True)
        except LeaseLost:
            raise
        except Exception as error:  # noqa: BLE001  # of whatever type it is when it is read back
            return str(error)
        return ""

    def _wait(self, letter: str, kid: Any) -> Any:
        context, place = self._context, tuple(map(str, self._place))
        names = ("go",) if letter == "w" else ("go", "stop") if letter == "a" else ("stop",)
        try:
            match letter:
                case "z" | "l":
                    return context.sleep(NAP if letter == "z" else LONG)
                case "c":
                    return context.call(kid, *place)
                case "w":
                    found, value = "go", context.wait_for("go", timeout=FLOW_TIMEOUT)
                case "a":
                    found, value = context.wait_any("go", "stop", timeout=FLOW_TIMEOUT)
                case _:
                    started = context.start(kid, *place)
                    found, value = context.wait_any("stop", started, timeout=FLOW_TIMEOUT)
        except WaitTimeout:
            self._flows.late(self._place, names)
            return "too late"
        except (TaskFailed, TaskCancelled, TaskExpired) as error:
            return type(error).__name__
        if isinstance(found, str):
            self._flows.took(self._place, value)
        return value


def start(world: World, sender: Sender, decision: Decision) -> None:
    """Start a flow; signals to it follow after so many seconds each."""
    plan, signals = decision.what
    task_id = sender.app.tasks[f"{sender.label}.flow"].delay(plan).id
    if "m" in plan:
        streams.listen(world, decision.app, task_id, 2)
    for seconds, name in signals:
        if seconds == MEETS:
            world.flows.to_meet.setdefault(task_id, []).append(name)
            continue
        world.later(seconds, Decision(0.0, "signal", decision.app, (task_id, name)))


def signal(world: World, sender: Sender, decision: Decision) -> None:
    """Send a signal to a flow, which may have ended."""
    task_id, name = decision.what
    value = world.flows.sent(task_id, name)
    try:
        sender.app.sends.result(task_id).signal(name, value)
    except AztaskError as error:
        world.book.note(sender.name, f"signal {name}: {type(error).__name__}", task_id)
        return
    world.book.note(sender.name, f"signal {value}", task_id)
    world.flows.accepted(value, task_id, name)
