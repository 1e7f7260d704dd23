"""What happened in a world, and the assertions that hold at every moment of it.

The actors' brokers and result stores tell it what they did (`watched`), the tasks that they ran.
So each assertion compares two parts of the system that do not know of each other. `ending` has the
assertions about the end.

Rules
1. An assertion that does not hold is a `Violation` with a name. The world stops after the step.
2. A delivery is *struck* if a fault hit the worker that held it, or the services that it needed.
   Only struck deliveries may lead to further starts.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from aztask.message.codec import Codec
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage, plain_name
from aztask.queues.delivery import Delivery
from aztask.settlement import Abandon, Complete, DeadLetter, Defer, Release, Resubmit, Settlement
from aztask.stores.events.event import Event
from aztask.stores.records.base import (
    LOST,
    Cancelled,
    Finish,
    Outcome,
    Owned,
    Recorded,
    RunKey,
    RunRecord,
    Start,
    StartAnswer,
    State,
)
from aztask.worker.pipeline.redelivery import UNKNOWN_TASK
from aztask.workflows.repair import MEMBER_LOST

from .course import RETENTION
from .programs import BURST, MOST_TOKENS, PERMITS, SPACING, TOKEN_SPACING, WEIGHTS
from .releases import FORMER

if TYPE_CHECKING:
    from .actors import Actor, Worker
    from .stepped import SteppedRun
    from .world import World

Key: TypeAlias = tuple[str, int, int]
NO_RUN: Final[Key] = ("", 0, 0)
Seat: TypeAlias = tuple[str, str, Any, str]
"""Where a message is, and its id: (label of the site, queue, position, message id)."""
EARLY: Final = 0.25
"""Seconds by which a start may be earlier than its slot: those of `rates.SLACK` and the clocks."""

FINAL_EVENTS: Final = {
    "succeeded": State.SUCCEEDED,
    "failed": State.FAILED,
    "cancelled": State.CANCELLED,
    "expired": State.EXPIRED,
}
TRACE: Final = 20_000


class Violation(AssertionError):
    """An assertion that does not hold. name: which."""

    def __init__(self, name: str, text: str, task_id: str = "") -> None:
        super().__init__(f"{name}: {text}")
        self.name = name
        self.task_id = task_id


@dataclass(slots=True)
class Run:
    """One run: what its key stands for.

    * `copies`: its messages that wait or are held.
    * `again`: outcomes after which the same message comes again.
    * `claimed_at`: when its owner asked for it; `recorded_at`: when its outcome was known.
    * `kept_until`: its row may be deleted from then on, and a late copy of it runs again.
    """

    starts: int = 0
    bodies: int = 0
    strikes: int = 0
    again: int = 0
    copies: int = 0
    owner: str | None = None
    claimed_at: float = 0.0
    outcome: Outcome | None = None
    recorded_at: float = math.inf
    kept_until: float = math.inf


@dataclass(slots=True)
class Life:
    """One task, from its acceptance to its end.

    * `forgotten`: how often it ran again after its row was purged. `given_up`: an at-most-once run
      whose worker was gone before its end was recorded.
    * `order`: in its session, by acceptance; `place`: by the service's number, once it is received.
    """

    task_id: str
    app: str
    task: str
    session: str | None = None
    unique: str | None = None
    order: int = 0
    place: int | None = None
    generation: int = 0
    bodies: int = 0
    claimed: bool = False
    cancelled: bool = False
    cancelled_at: float = math.inf
    damaged: bool = False
    struck: bool = False
    forgotten: int = 0
    states: list[State] = field(default_factory=list)
    ended_at: float | None = None
    given_up: bool = False
    events: Counter[str] = field(default_factory=Counter)

    @property
    def kind(self) -> str:
        """The task's name without the app's."""
        return plain_name(self.task).partition(".")[2]


class Book:
    """Takes notes, and complains."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._time = world.time
        self.lives: dict[str, Life] = {}
        self.open: set[str] = set()
        self.runs: dict[Key, Run] = {}
        self.violations: list[Violation] = []
        self.counts: Counter[str] = Counter()
        self.trace: deque[tuple[float, str, str, str]] = deque(maxlen=TRACE)
        self.garbage = 0
        self.occurrences: dict[str, dict[str, float]] = {}
        self._latest: dict[Seat, Delivery] = {}
        self.until: dict[Delivery, float] = {}
        self._struck: set[Delivery] = set()
        self._unanswered: set[Delivery] = set()
        self._sessions: dict[tuple[str, str], list[Life]] = {}
        self._rates: dict[str, deque[float]] = {}
        self._weighed: dict[str, deque[tuple[float, int]]] = {}
        self._kept: deque[Life] = deque(maxlen=400)
        self._uniques: dict[tuple[str, str], Life] = {}
        self._ids: dict[str, str] = {}

    # -- tools -------------------------------------------------------------------------------

    def complain(self, name: str, text: str, task_id: str = "") -> None:
        """An assertion does not hold."""
        self.violations.append(Violation(name, text, task_id))

    def note(self, who: str, what: str, task_id: str) -> None:
        """Add a line to the trace."""
        self.trace.append((self._time.now, who, what, task_id))

    def run(self, key: Key) -> Run:
        """What is known about a run."""
        found = self.runs.get(key)
        if found is None:
            found = self.runs[key] = Run()
        return found

    def learn_ids(self, codec: Codec) -> None:
        """Remember which message id stands behind each keyed one that this codec makes."""
        keyed_id = codec.keyed_id

        def remembered(message_id: str) -> str:
            keyed = keyed_id(message_id)
            if keyed != message_id:
                self._ids[keyed] = message_id
            return keyed

        codec.keyed_id = remembered  # type: ignore[method-assign]

    def key_of(self, message_id: str) -> tuple[Key, bool]:
        """The key of the run that a message belongs to, and whether it is a pointer."""
        return key_of(self._ids.get(message_id, message_id))

    def strike(self, actor: Actor) -> None:
        """A fault hits everything that the actor holds."""
        for delivery in actor.held:
            if delivery in self._struck:
                self.counts["leases struck twice"] += 1
            else:
                self._hit(actor, delivery)
        for task_id in actor.unsaid:
            self.lives[task_id].struck = True

    def _hit(self, actor: Actor, delivery: Delivery) -> None:
        key = actor.held.key(delivery, NO_RUN)
        if delivery in self._struck:
            self.counts["leases struck twice"] += 1
            return
        self._struck.add(delivery)
        self.counts["held deliveries struck"] += 1
        if key is not NO_RUN:
            self.run(key).strikes += 1
            if (life := self.lives.get(key[0])) is not None:
                life.struck = True

    # -- messages ----------------------------------------------------------------------------

    def accepted(self, actor: Actor, queue: str, envelopes: Sequence[Envelope]) -> None:
        """The broker has accepted these."""
        self._world.sent_to(actor.label, queue)
        for envelope in envelopes:
            key, pointer = self.key_of(envelope.message_id)
            if key is NO_RUN:
                continue
            if pointer:
                self.note(actor.name, "pointer sent", key[0])
                continue
            task = str(envelope.headers.get("task", ""))
            if not task.startswith(f"{actor.label}."):
                self.complain("foreign", f"{actor.name} sent {task} of another app", key[0])
            self.run(key).copies += 1
            self.note(actor.name, f"sent {envelope.message_id}", key[0])
            self._born(actor, key, task, envelope)

    def _born(self, actor: Actor, key: Key, task: str, envelope: Envelope) -> None:
        task_id, generation, _ = key
        life = self.lives.get(task_id)
        if life is not None:
            if generation > life.generation:
                life.generation, life.ended_at, life.claimed = generation, None, False
                self.open.add(task_id)
            return
        session = envelope.session
        unique = envelope.headers.get("aztask-unique")
        life = self.lives[task_id] = Life(
            task_id, actor.label, task, session, str(unique) if unique else None
        )
        self.counts["tasks"] += 1
        self.open.add(task_id)
        if session is not None:
            line = self._sessions.setdefault((actor.label, session), [])
            life.order = len(line)
            line.append(life)
        if unique:
            self._taken(actor, life)
        at = envelope.headers.get("aztask-scheduled-at")
        if at is not None:
            name = str(envelope.headers.get("aztask-schedule"))
            self.occurrences.setdefault(f"{actor.label}: {name}", {})[task_id] = float(at)

    def _taken(self, actor: Actor, life: Life) -> None:
        """A unique task was accepted: the one before it under its key must have let it go."""
        place = (life.app, str(life.unique))
        before, self._uniques[place] = self._uniques.get(place), life
        if before is None or before.ended_at is not None or before.cancelled:
            return
        started = life.kind == "begun"
        if started and before.claimed:
            return
        if actor.site.remote:  # the answer of the one who recorded that may be on its way
            with self._world.fate.holding():
                record = actor.results.get(before.task_id)
            if record is not None and (record.state.final or (started and record.starts)):
                return
        self.complain(
            "unique-twice",
            f"{life.task_id} was accepted under the key of {before.task_id}, which has not ended",
            life.task_id,
        )

    def received(self, actor: Actor, delivery: Delivery, dead: bool, asked_at: float) -> None:
        """The broker has leased a message to this actor."""
        if dead:
            return
        now = self._time.now
        seat = seat_of(actor, delivery)
        before = self._latest.get(seat)
        key, pointer = self.key_of(delivery.envelope.message_id)
        if before is not None and now < self.until.get(before, 0.0) - 1e-6:
            self.complain(
                "one-holder",
                f"{delivery.envelope.message_id} was delivered while another lease of it lasts",
                key[0],
            )
        self._latest[seat] = delivery
        # The lease of a session may be older than the delivery, and a request to a service takes a
        # while, as does one to several shards, between which the actor may freeze: that it was
        # granted later than the worker believes is no fault.
        slow = actor.site.remote or bool(self._world.course.shards)
        alone = delivery.session is None and not slow
        until = (now if slow else asked_at) + delivery.lease_seconds
        self.until[delivery] = until if alone else delivery.deadline
        actor.held.add(delivery, key)
        self.counts["deliveries"] += 1
        self.note(actor.name, f"received {delivery.envelope.message_id}", key[0])
        if delivery.deadline > until + 1e-6:
            self.complain("deadline-is-true", f"{key[0]}: a lease ends later here", key[0])
        task = delivery.envelope.headers.get("task")
        if key is not NO_RUN and isinstance(task, str) and not pointer:
            self._born(actor, key, task, delivery.envelope)  # its sender may not know it yet
            if actor.version == FORMER and task != plain_name(task):
                self._world.flows.met(key[0], UNKNOWN_TASK)
            if actor.site.remote and self.lives[key[0]].place is None:
                self.lives[key[0]].place = int(str(delivery.position).strip("m-") or 0)
        if self._world.outages:
            self._hit(actor, delivery)

    def renewed(self, actor: Actor, delivery: Delivery, until: float, deadline: float) -> None:
        """A lease was renewed until then; deadline: as the receiver says.

        A request to a service takes a while: what was granted began before its answer came.
        """
        self.until[delivery] = max(deadline, delivery.deadline) if actor.site.remote else until
        self.counts["renewals"] += 1
        key = actor.held.key(delivery, NO_RUN)
        self.note(actor.name, f"renewed until {until:.2f}", key[0])
        if max(deadline, delivery.deadline) > until + 1e-6:
            self.complain(
                "deadline-is-true",
                f"{key[0]}: the lease ends at {until:.2f}, the worker believes {deadline:.2f}",
                key[0],
            )

    def given_back(self, actor: Actor, queue: str, deliveries: Sequence[Delivery]) -> None:
        """A session was released, with what is left of these deliveries."""
        for delivery in deliveries:
            if delivery in actor.held:
                key = actor.held.key(delivery, NO_RUN)
                self.note(actor.name, "gives the session back", key[0])
                self._hit(actor, delivery)
                actor.held.remove(delivery)
                self.until.pop(delivery, None)

    def settled(self, actor: Actor, delivery: Delivery, settlement: Settlement, dead: bool) -> None:
        """The broker has carried out a settlement."""
        if dead:
            return
        key, pointer = self.key_of(delivery.envelope.message_id)
        what = type(settlement).__name__
        self.note(actor.name, f"settled {delivery.envelope.message_id}: {what}", key[0])
        seat = seat_of(actor, delivery)
        returns = isinstance(settlement, Abandon | Release | Defer) and actor.site.remote
        # An adapter that finds nothing after an unanswered request takes it for carried out. If
        # another holder was faster, that is no fault as long as the end is recorded.
        returns |= delivery in self._unanswered and self.run(key).outcome is not None
        late = self.until.get(delivery, 0.0) < self._time.now and not actor.site.remote
        if not returns and (self._latest.get(seat) is not delivery or late):
            self.complain(
                "settled-by-its-holder",
                f"{actor.name} settled {key[0]} ({what}) although its lease had ended",
                key[0],
            )
        if isinstance(settlement, Release):
            self._hit(actor, delivery)
        actor.held.remove(delivery)
        self.until.pop(delivery, None)
        if key is NO_RUN or pointer:
            return
        if isinstance(settlement, Abandon | Release | Defer):
            self._world.sent_to(actor.label, delivery.queue)
            return
        run = self.run(key)
        run.copies -= 1
        self._world.flows.settled(key)
        clone = NO_RUN
        if isinstance(settlement, Resubmit) and settlement.envelope is not None:
            clone, _ = self.key_of(settlement.envelope.message_id)
            self.run(clone).copies += 1
            self.note(actor.name, f"cloned as {settlement.envelope.message_id}", key[0])
        self._left(actor, key, run, clone, settlement)

    def unanswered(self, delivery: Delivery) -> None:
        """A settlement was sent to a service, and no answer came: it may be carried out."""
        self._unanswered.add(delivery)

    def refused(self, actor: Actor, delivery: Delivery, settlement: Settlement) -> None:
        """A settlement was answered with Lost."""
        key, _ = self.key_of(delivery.envelope.message_id)
        self.note(actor.name, f"lost: {type(settlement).__name__}", key[0])
        seat = seat_of(actor, delivery)
        gone = not actor.site.has(delivery.queue, delivery.position)
        # An adapter whose requests all remained without an answer until the lease ended can only
        # say so. It must not report a settlement as lost that was answered while the lease lasted.
        ended = self._world.time.now >= delivery.deadline
        unknown = ended and delivery in self._unanswered
        if gone and not unknown and self._latest.get(seat) is delivery:
            self.complain(
                "settled-is-not-lost",
                f"{key[0]} is gone, and no other worker received it: {actor.name} has settled it",
                key[0],
            )

    def _left(self, actor: Actor, key: Key, run: Run, clone: Key, settlement: Settlement) -> None:
        """A message has left the queue: what must go on must go on elsewhere."""
        life = self.lives.get(key[0])
        if life is None:
            return
        if life.kind == "once":
            actor.unsaid.add(key[0])  # from now on it is lost with the worker
            return
        if clone is not NO_RUN and clone == key:
            return  # it was put off
        if run.outcome is None and run.copies <= 0 and not actor.site.remote:
            self.complain(
                "not-completed-unrecorded",
                f"{key} left the queue ({type(settlement).__name__}) without a recorded outcome "
                "and without another copy",
                key[0],
            )

    # -- runs --------------------------------------------------------------------------------

    def claimed(
        self,
        actor: Actor,
        starts: Sequence[Start],
        answers: Sequence[StartAnswer],
        asked_at: float,
    ) -> None:
        """The store has answered to starts that it was asked for at a time."""
        for start, answer in zip(starts, answers, strict=True):
            key = _key(start.key)
            run = self.run(key)
            self.note(actor.name, f"claim {key[1:]}: {type(answer).__name__}", key[0])
            if isinstance(answer, Recorded) and run.outcome is None and actor.site.remote:
                self.learned(key, answer.outcome)
            if not isinstance(answer, Owned | Cancelled):
                continue
            if not start.task.startswith(f"{actor.label}."):
                self.complain("foreign", f"{actor.name} owns {start.task}", key[0])
            # Answers may come late: after the record, or after a younger claim took the run over.
            if run.outcome is not None and run.recorded_at <= asked_at < run.kept_until:
                self.complain(
                    "recorded-is-not-run", f"{key} may run although its end is recorded", key[0]
                )
            if asked_at >= run.claimed_at:
                run.owner, run.claimed_at = start.owner, asked_at
            life = self.lives.get(key[0])
            if life is None:
                continue
            if isinstance(answer, Owned):
                # A store keeps a cancellation as long as results: the contract says so.
                kept = asked_at < life.cancelled_at + RETENTION[life.app]
                if life.cancelled_at < asked_at and kept:
                    self.complain("cancelled-does-not-start", f"{key} was cancelled before", key[0])
                life.claimed = True

    def disowned(self, actor: Actor, runs: Sequence[tuple[RunKey, str]]) -> None:
        """Runs were given back."""
        for key, owner in runs:
            run = self.run(_key(key))
            if run.owner == owner:
                run.owner = None

    def recorded(self, actor: Actor, finishes: Sequence[Finish], answers: Sequence[bool]) -> None:
        """The store has answered to outcomes."""
        for finish, answer in zip(finishes, answers, strict=True):
            key, outcome = _key(finish.key), finish.outcome
            told = f"record {outcome.state.value}{'' if answer else ' refused'}"
            self.note(actor.name, told, key[0])
            if not answer:
                continue
            run = self.run(key)
            if run.owner is not None and run.owner != finish.owner:
                self.complain(
                    "recorded-by-its-owner", f"{actor.name} recorded {key}, another owns it", key[0]
                )
            # Who replays may die before the dead letter is removed. Once the row of that replay is
            # purged, another one of the same dead letter runs again.
            kept = self._time.now < run.kept_until
            if run.outcome is not None and not kept and key[0] in self.lives:
                self.lives[key[0]].forgotten += 1
            elif run.outcome is not None and run.outcome != outcome:
                self.complain("one-outcome", f"{key} has two recorded outcomes", key[0])
            if outcome.state is State.SUCCEEDED and not run.bodies:
                self.complain("outcome-of-a-run", f"{key} succeeded and never ran", key[0])
            self._end(key, run, outcome)
            if key[0] in self.lives and outcome.state.final:
                actor.unsaid.add(key[0])

    def buried(self, actor: Actor, runs: Sequence[RunRecord], answers: Sequence[bool]) -> None:
        """The store has taken the ends of runs that no worker could record."""
        for record, answer in zip(runs, answers, strict=True):
            if not answer or record.outcome is None:
                continue
            key = _key(record.key)
            run = self.run(key)
            if not record.task.startswith(f"{actor.label}."):
                self.complain("foreign", f"{actor.name} has ended {record.task}", key[0])
            self.note(actor.name, f"buried: {record.outcome.error_type}", key[0])
            if key[0] in self.lives:
                self.lives[key[0]].struck = True  # its event is one of a dead letter alone
                self.lives[key[0]].given_up |= record.outcome.error_type == LOST
            if run.outcome is not None and run.outcome != record.outcome:
                self.complain("one-outcome", f"{key} has two recorded outcomes", key[0])
            lost = record.outcome.error_type == MEMBER_LOST and not actor.site.remote
            if lost and self._is_alive(key):
                self.complain("member-is-lost", f"{key} is declared lost, and waits", key[0])
            self._end(key, run, record.outcome)

    def learned(self, key: Key, outcome: Outcome) -> None:
        """A store has this outcome: who recorded it died before the answer came."""
        self._end(key, self.run(key), outcome)
        if (life := self.lives.get(key[0])) is not None:
            life.struck = True

    def _is_alive(self, key: Key) -> bool:
        return any(
            run.copies > 0 for (task_id, _, _), run in self.runs.items() if task_id == key[0]
        )

    def _end(self, key: Key, run: Run, outcome: Outcome) -> None:
        self.counts["runs ended"] += 1
        if outcome.parked or outcome.renewed:
            self._world.flows.rests(key)
        if outcome.again:
            run.again += 1
            return
        run.outcome, run.recorded_at = outcome, self._time.now
        life = self.lives.get(key[0])
        if life is not None:
            run.kept_until = min(run.kept_until, self._time.now + RETENTION[life.app])
        if life is None or not outcome.state.final:
            return
        life.states.append(outcome.state)
        if life.kind == "flow":
            self._world.flows.ended(key, outcome)
        if key[1] >= life.generation:
            life.ended_at = self._time.now
            self.open.discard(key[0])
            self._kept.append(life)

    def begun(self, worker: Worker, run: SteppedRun) -> None:
        """A pool process has begun a run."""
        message = run.message
        key: Key = message.key
        found = self.run(key)
        found.starts += 1
        self.counts["starts"] += 1
        self.note(worker.name, f"start {key[1:]}", key[0])
        kept = self._time.now < found.kept_until
        if kept and found.starts > 1 + found.strikes + found.again:
            self.complain(
                "starts-bounded",
                f"{key} has started {found.starts} times: {found.strikes} of its deliveries were "
                f"struck, {found.again} runs ended so that it comes again",
                key[0],
            )
        kind = message.task.partition(".")[2]
        if kind == "rated":
            self._rate(worker, key)
        elif kind == "permitted":
            self._permits(worker, key)
        elif kind in WEIGHTS:
            self._tokens(worker, key, min(WEIGHTS[kind]))

    def _rate(self, worker: Worker, key: Key) -> None:
        now = self._time.now
        starts = self._rates.setdefault(worker.label, deque(maxlen=60))
        starts.append(now)
        for back in (BURST + 1, BURST + 5, BURST + 20):
            if len(starts) > back and now - starts[-1 - back] < (back - BURST) * SPACING - EARLY:
                self.complain(
                    "rate",
                    f"{back + 1} starts within {now - starts[-1 - back]:.2f} s, one each "
                    f"{SPACING:g} s is allowed, {BURST} at once",
                    key[0],
                )

    def _tokens(self, worker: Worker, key: Key, weight: int) -> None:
        """A run of a limit with a cost: it uses no less than this, whatever is corrected later."""
        now = self._time.now
        starts = self._weighed.setdefault(worker.label, deque(maxlen=60))
        starts.append((now, weight))
        for count in (3, 6, 20):
            window = list(starts)[-count:]
            used, seconds = sum(weight for _, weight in window), now - window[0][0]
            if seconds < (used - MOST_TOKENS) * TOKEN_SPACING - EARLY:
                self.complain(
                    "rate",
                    f"{used} were used within {seconds:.2f} s, one each {TOKEN_SPACING:g} s is "
                    f"allowed, {MOST_TOKENS} at once",
                    key[0],
                )

    def _permits(self, worker: Worker, key: Key) -> None:
        now = self._time.now
        running = [
            run.message.id
            for each in self._world.workers
            if each.label == worker.label and each.alive and each.frozen_until <= now
            for run in each.running()
            if run.message.task.endswith(".permitted") and now < run.lease.deadline
        ]
        if len(running) > PERMITS:
            self.complain("permits", f"{len(running)} run at once: {running}", key[0])

    def ran(self, actor: Actor, message: TaskMessage) -> int:
        """A task's function is called now; returns how often it was called before."""
        key: Key = message.key
        run, life, now = self.run(key), self.lives.get(message.id), self._time.now
        self.counts["task runs"] += 1
        self.note(actor.name, f"ran {key[1:]}", key[0])
        run.bodies += 1
        # A worker that stood still may run what another one has recorded as lost with it.
        lost = run.outcome is not None and run.outcome.error_type == LOST
        if run.outcome is not None and not lost and now < run.kept_until:
            self.complain("recorded-is-not-run", f"{key} ran after its end was recorded", key[0])
        if life is None:
            return 0
        # What a flow reads before its first line takes time here, in which no guard ends it.
        if life.kind not in ("once", "flow"):
            held = actor.held.of(key)
            if not any(now <= self.until.get(delivery, 0.0) for delivery in held):
                text = f"{key} ran after its lease had ended"
                self.complain("runs-under-its-lease", text, key[0])
        if life.session is not None:
            self._in_order(life)
        life.bodies += 1
        return life.bodies - 1

    def _in_order(self, life: Life) -> None:
        line = self._sessions[life.app, str(life.session)]
        for before in line[max(0, life.order - 20) : life.order]:
            # Requests of several senders overlap: only the service knows their order.
            place, mine = before.place, life.place
            if mine is not None and (place is None or place > mine):
                continue
            if before.ended_at is None:
                self.complain(
                    "session-order",
                    f"{life.task_id} ran before {before.task_id}, which was accepted earlier",
                    life.task_id,
                )

    def cancelled(self, task_id: str, running: bool) -> None:
        """A cancellation was accepted."""
        self.note("", "cancelled", task_id)
        if (life := self.lives.get(task_id)) is not None:
            life.cancelled = True
            life.cancelled_at = min(life.cancelled_at, self._time.now)

    # -- housekeeping and events -------------------------------------------------------------

    def purged(self, actor: Actor) -> None:
        """An actor has deleted rows: of others, and of its own before their time, none."""
        now = self._time.now
        young = [life for life in self._kept if now - life.ended_at < RETENTION[life.app] - 1.0]  # type: ignore[operator]
        for life in (*young[:4], *young[-2:]):
            if self._world.record_of(life) is None and not life.damaged:
                self.complain(
                    "rows-are-kept",
                    f"{actor.name} deleted the row of {life.task_id}, which ended "
                    f"{now - (life.ended_at or 0.0):.0f} s ago",
                    life.task_id,
                )

    def event(self, actor: Actor, event: Event) -> None:
        """An actor has written an event."""
        state = FINAL_EVENTS.get(event.event)
        if state is None:
            return
        self.note(actor.name, f"event {event.event}", event.task_id)
        life = self.lives.get(event.task_id)
        if life is None:
            return
        life.events[event.event] += 1
        actor.unsaid.discard(event.task_id)
        # What is removed before it runs can only be told, if it cannot be recorded any more.
        if state not in life.states and life.kind != "once":
            self.complain(
                "events-agree",
                f"the event says that {event.task_id} has {event.event}, its record does not",
                event.task_id,
            )


def seat_of(actor: Actor, delivery: Delivery) -> Seat:
    """What one holder at a time may have.

    On a Storage queue a clone takes its original's place in one request. It may be received before
    the one who sent it has its answer: the id distinguishes the two.
    """
    at = actor.label, delivery.queue, delivery.position
    return (*at, delivery.envelope.message_id)


def key_of(message_id: str) -> tuple[Key, bool]:
    """The key of the run that a message belongs to, and whether it is a pointer."""
    name, pointer = message_id, False
    while True:
        head, _, tail = name.rpartition(":")
        if tail.startswith("pointer-"):
            name, pointer = head, True
        elif tail.startswith("put-"):
            name = head
        else:
            break
    parts = name.rsplit(":", 2)
    if len(parts) != 3 or not (parts[1].isdigit() and parts[2].isdigit()):
        return NO_RUN, pointer
    return (parts[0], int(parts[1]), int(parts[2])), pointer


def _key(key: RunKey) -> Key:
    return (key.task_id, key.generation, key.hop)


__all__ = ["Book", "Complete", "DeadLetter", "Life", "Run", "Violation", "key_of"]
