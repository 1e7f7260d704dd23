"""Moving an app to another broker: what is there, and the action that moves it.

    check -> journal taken -> payloads copied -> rows get the new owner -> old queues paused
          -> queue by queue: messages -> what is left is counted -> journal given back

Rules
1. Nothing is changed before everything was counted, and nothing if something is there that cannot
   be moved (`aztask.operate.move.kinds`).
2. The command can be run again at any time, and by any process: it goes on where the one before
   stopped, and takes what came since. It has ended when `Moved.left` is empty.
3. Workers of the old address are stopped before. A worker that is started there afterwards finds
   its queues paused. Senders are not stopped: what they send there waits, and is moved when the
   command runs again.

What may run twice: what had started and not ended when its worker was stopped, as after any stop.
A message that was sent twice, because the command died, has one start row: it runs once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from aztask.address.shards import ShardLayout
from aztask.app import App
from aztask.errors import ConfigurationError, QueueNotFound
from aztask.message.headers import SIGNATURES
from aztask.operate.action import Action, Progress, results_of
from aztask.operate.jobs import OPEN, jobs
from aztask.operate.ledger import ledger_of
from aztask.operate.move import rows as rowmoves
from aztask.operate.move.journal import MoveJournal
from aztask.operate.move.kinds import Counted, rows
from aztask.operate.move.messages import POINTER, QueueMove, QueueMoved
from aztask.operate.queues import LeftOut, all_queues
from aztask.operate.resharding import layouts, refuse_several
from aztask.queues.base import Inspectable, MessageState, QueueOptions, QueueStats
from aztask.support.display import plural, visible

HIDDEN_SECONDS: Final = 7 * 86400.0
"""The longest time for which a Storage queue hides a message."""
JOBS_READ: Final = 200
PEEKED: Final = 200


@dataclass(frozen=True, slots=True)
class OldQueue:
    """A queue of the old broker. sessions: whether it has sessions. missing: at the new one."""

    stats: QueueStats
    sessions: bool
    missing: bool


@dataclass(frozen=True, slots=True)
class MovePlan:
    """What is at the old address. problems: why nothing can be moved now; () if it can."""

    queues: Sequence[OldQueue]
    messages: Sequence[Counted]
    rows: Sequence[Counted]
    notes: Sequence[str]
    problems: Sequence[str]
    left_out: LeftOut

    @property
    def count(self) -> int:
        """The messages and dead letters of all queues."""
        return sum(each.stats.living + (each.stats.dead or 0) for each in self.queues)


@dataclass(frozen=True, slots=True)
class Moved:
    """What a move did.

    * `queues`: by queue. `rows`: how many rows got the new owner. `payloads`: were copied.
    * `left`: messages that are still at the old address, by queue. `until`: for how long some of
      them may be hidden, UTC epoch seconds; None if the service shows all.
    """

    queues: Sequence[QueueMoved]
    rows: int
    payloads: int
    left: dict[str, int]
    until: float | None

    @property
    def reasons(self) -> Counter[str]:
        """Why messages stay, as far as that is known."""
        return sum((each.left for each in self.queues), Counter[str]())


def plan(old: App, new: App) -> MovePlan:
    """Look at what is at the old address. old, new: the app at both.

    Raises ConfigurationError without a result store or owners, BrokerUnavailable.
    """
    results_of(old)
    for each in (old, new):
        refuse_several(each, "aztask move")
    if not old.owner.known or not new.owner.known:
        raise ConfigurationError("a broker without a name has no owner: set AZTASK_OWNER")
    if old.broker is new.broker or _same_place(old, new):
        raise ConfigurationError("both addresses are the same broker: there is nothing to move")
    left_out = LeftOut()
    found: list[OldQueue] = []
    for name in all_queues(old, left_out):
        with left_out.reading(name):
            stats = old.broker.stats(name)
            if stats.living or stats.dead or name in old.queue_names():
                found.append(OldQueue(stats, has_sessions(old, name), not _exists(new, name)))
    return MovePlan(
        found,
        _messages(old, found),
        list(rows(old)),
        _notes(old, new, found),
        _problems(old, new, found, left_out),
        left_out,
    )


def _same_place(old: App, new: App) -> bool:
    """Whether the addresses name one broker; with an owner of its own, the owners say nothing."""
    return old.settings.owner is None and old.owner.broker == new.owner.broker


def has_sessions(app: App, queue: str) -> bool:
    """As the service says, and if it does not, as the code declares."""
    if isinstance(app.broker, Inspectable):
        known = app.broker.inspector().facts(queue).sessions
        if known is not None:
            return known
    return app.has_sessions(queue)


def _exists(app: App, queue: str) -> bool:
    try:
        app.broker.stats(queue)
    except QueueNotFound:
        return False
    return True


def _messages(old: App, queues: Sequence[OldQueue]) -> list[Counted]:
    can = old.broker.capabilities
    stats = [each.stats for each in queues]
    again = "received, sent, and then removed"
    if not can.paged_peek:
        hidden = "moved when their delay has passed, at most seven days after they were hidden last"
        return [
            Counted("messages", f"{again}; delayed ones are {hidden}", _sum(stats, "living")),
            Counted("dead letters", "sent with their reasons, dead-lettered there", _dead(stats)),
        ]
    sessions = [each.stats for each in queues if each.sessions]
    plain = [each.stats for each in queues if not each.sessions]
    return [
        Counted("waiting messages", again, _sum(plain, "active")),
        Counted(
            "messages of sessions", "the same, each session in order", _sum(sessions, "active")
        ),
        Counted(
            "scheduled messages", "sent for the same time, and cancelled", _sum(stats, "scheduled")
        ),
        Counted(
            "deferred messages", "sent for the time of their pointers", _sum(stats, "deferred")
        ),
        Counted(
            "leased messages", "when their leases have ended: run it again", _sum(stats, "leased")
        ),
        Counted("dead letters", "sent with their reasons, dead-lettered there", _dead(stats)),
    ]


def _sum(stats: Sequence[QueueStats], name: str) -> int | None:
    counts = [getattr(each, name) for each in stats]
    return None if None in counts else sum(counts)


def _dead(stats: Sequence[QueueStats]) -> int | None:
    return _sum(stats, "dead")


def _notes(old: App, new: App, queues: Sequence[OldQueue]) -> list[str]:
    notes = []
    if any(each.sessions for each in queues):
        notes.append(
            "what is stored with a session moves with its messages; of a session without messages "
            "it stays"
        )
    if new.owner != old.owner and (alive := _alive(new)):
        notes.append(
            f"workers of the new address are alive ({alive}): a schedule that they have made "
            "already stays as it is there"
        )
    if new.owner == old.owner:
        notes.append(
            "the owner is a name of its own and stays, so that workers of both addresses look "
            "alike: check that those of the old address are stopped"
        )
    if rowmoves.stores_of(old, new) is not None:
        notes.append("payloads are copied; the old ones stay until you remove them")
    return notes


def _alive(app: App) -> int:
    now = time.time()
    return sum(each.state_at(now) == "alive" for each in results_of(app).workers())


def _problems(old: App, new: App, queues: Sequence[OldQueue], left_out: LeftOut) -> list[str]:
    problems = [f"queue {visible(name)}: {why}" for name, why in left_out.refused.items()]
    if new.owner != old.owner and (alive := _alive(old)):
        problems.append(f"workers of the old address are alive ({alive}): stop them first")
    if any(each.state == OPEN for each in jobs(old, limit=JOBS_READ).jobs):
        problems.append(
            "a job is open, and it names dead letters by their positions: let it end, or cancel it "
            "(aztask jobs list)"
        )
    problems += [
        f"queue {visible(queue)} is being moved to other shards: wait for the end of that (aztask "
        f"queues reshard {visible(queue)})"
        for queue, layout in layouts(old).items()
        if isinstance(layout, ShardLayout) and layout.former is not None and layout.starts_at
    ]
    can = new.broker.capabilities
    if not old.codec.signs and any(_signed(old, each.stats) for each in queues):
        problems.append(
            "the messages are signed, and no signing key is configured here: name the app with -A, "
            "so that what is moved is signed anew"
        )
    for each in queues:
        name = visible(each.stats.queue)
        if each.sessions and not can.sessions and each.stats.living:
            problems.append(f"queue {name} has sessions, and {can.name} has none")
        if each.stats.deferred and (count := _uncalled(old, each.stats.queue)):
            problems.append(
                f"queue {name} has {plural(count, 'deferred message')} that no task waits for: a "
                "program of yours knows the position, which changes; receive them first, with "
                "app.receive(queue, deferred=POSITION)"
            )
    return problems


def _signed(app: App, stats: QueueStats) -> bool:
    """Whether one of the first messages or dead letters of a queue is signed."""
    found = app.broker.peek(stats.queue, limit=app.broker.capabilities.peek_limit)
    if stats.dead:
        found = [*found, *app.broker.peek(stats.queue, dead_letter=True, limit=1)]
    return any(SIGNATURES & each.envelope.headers.keys() for each in found)


def _uncalled(app: App, queue: str) -> int:
    """How many deferred messages have no pointer, in the queue or among its dead letters."""
    deferred: set[int] = set()
    called: set[int] = set()
    for dead in (False, True):
        page = app.broker.peek(queue, limit=PEEKED, dead_letter=dead)
        while page:
            for each in page:
                pointer = each.envelope.headers.get(POINTER)
                if isinstance(pointer, int):
                    called.add(pointer)
                if each.state is MessageState.DEFERRED and not dead:
                    deferred.add(int(each.position))
            last = page[-1].position
            page = app.broker.peek(queue, after=last, limit=PEEKED, dead_letter=dead)
    return len(deferred - called)


def move(old: App, new: App) -> MoveApp:
    """Count what is at the old address, for a move. Raises ConfigurationError if it cannot move."""
    found = plan(old, new)
    if found.problems:
        raise ConfigurationError("nothing was moved: " + "; ".join(found.problems))
    return MoveApp(new, found.count, old, found)


@dataclass(slots=True)
class MoveApp(Action[Moved]):
    """Moves an app to another broker. `app` is the app there: its events and audit have it."""

    name: ClassVar[str] = "move"

    old: App
    plan: MovePlan

    @property
    def exact(self) -> bool:
        """False: it moves what comes in the meantime, too."""
        return False

    def __str__(self) -> str:
        where = f"{self.old.owner.of_broker} to {self.app.owner.of_broker}"
        if self.old.owner == self.app.owner:
            where = f"{self.old.owner.of_broker}, which keeps its name, to another address"
        return f"move {plural(self.count, 'message')} and all rows of {where}"

    def _act(self, progress: Progress) -> Moved:
        old, new = self.old, self.app
        ledger = ledger_of(results_of(new))
        if ledger is None:
            raise ConfigurationError(
                "this result store keeps no journal; use local:// or tables://"
            )
        journal = MoveJournal(ledger, old.owner)
        journal.begin()
        try:
            moved = self._move(journal, progress)
        except BaseException:
            journal.end(done=False)
            raise
        # What is only hidden or leased there was not sent: see rule 3 of the journal.
        journal.end(done=not any(each.unsure for each in moved.queues))
        return moved

    def _move(self, journal: MoveJournal, progress: Progress) -> Moved:
        old, new = self.old, self.app
        payloads = rowmoves.copy_payloads(old, new, journal)
        adopted = rowmoves.move_rows(old, new)
        names = [each.stats.queue for each in self.plan.queues]
        if old.owner != new.owner:
            rowmoves.release(new, new.owner)
            rowmoves.hold(old, old.owner, names, str(new.owner.of_broker))
        found = []
        for each in self.plan.queues:
            if each.missing:
                new.broker.declare(each.stats.queue, _options(old, new, each))
            found.append(
                QueueMove(old, new, each.stats.queue, journal, sessions=each.sessions).run()
            )
            self.done += found[-1].total
            progress(self.done)
        left = {}
        for name in names:
            stats = old.broker.stats(name)
            if waiting := stats.living + (stats.dead or 0):
                left[name] = waiting
        hidden = bool(left) and not old.broker.capabilities.paged_peek
        return Moved(
            found, adopted, payloads, left, time.time() + HIDDEN_SECONDS if hidden else None
        )


def _options(old: App, new: App, queue: OldQueue) -> QueueOptions:
    """The settings of a queue that is made at the new address: those of the old one."""
    name, can = queue.stats.queue, new.broker.capabilities
    same = old.broker.capabilities.name == can.name
    options = old.queue_options(name) if same else QueueOptions()
    given: dict[str, object] = {"sessions": queue.sessions or None}
    if same and isinstance(old.broker, Inspectable):
        known = old.broker.inspector().facts(name)
        given |= {"lease": known.lease_seconds, "duplicate_window": known.duplicate_window}
    return options.with_explicit(**{key: value for key, value in given.items() if value})
