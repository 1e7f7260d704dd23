"""Queues: how many messages each holds, the messages themselves; create, purge and delete them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from aztask.address.shards import ShardLayout
from aztask.app import App
from aztask.errors import (
    AztaskError,
    BrokerError,
    BrokerUnavailable,
    CodecError,
    QueueDisabled,
    QueueNotFound,
    did_you_mean,
)
from aztask.message.message import TaskMessage
from aztask.operate.action import Action, Progress, Subject
from aztask.operate.resharding import addresses_of, layouts
from aztask.queues.base import Capabilities, MessageState, Peeked, QueueStats, Sharded
from aztask.stores.records.base import Provisioned
from aztask.support.display import plural, visible

__all__ = [
    "MOST_READ",
    "Arguments",
    "CreateQueues",
    "DeleteQueue",
    "LearnedLease",
    "LeftOut",
    "Messages",
    "OldestWaiting",
    "PurgeQueue",
    "QueueCounts",
    "QueueStats",
    "WaitingMessage",
    "all_queues",
    "arguments_of",
    "arguments_of_waiting",
    "create",
    "delete",
    "existing",
    "hidden",
    "oldest_waiting",
    "peek",
    "purge",
    "queues",
    "waiting",
]

PAGE: Final = 500
MOST_READ: Final = 100_000
"""Messages of one queue that are read at most: some seconds of reading."""
MOST_TIMERS: Final = 10_000
OLDEST_AMONG: Final = 100
"""Messages among which the oldest waiting one is looked for."""


@dataclass(slots=True)
class LeftOut:
    """What a reading of many queues left out.

    * `foreign`: queues of other programs, whose names aztask cannot use.
    * `refused`: queues that refuse, such as disabled ones, and why.
    * `several`: of several addresses, one may not answer; its queues refuse, the others do not.
    """

    foreign: Sequence[str] = ()
    refused: dict[str, str] = field(default_factory=dict)
    several: bool = False

    @contextmanager
    def reading(self, queue: str) -> Iterator[None]:
        """Read one queue of many: if this queue alone refuses, go on without it.

        A queue that was deleted in the meantime is skipped silently. If the service does not
        answer, BrokerUnavailable is raised as usual.
        """
        try:
            yield
        except QueueNotFound:
            return
        except BrokerError as error:
            unavailable = isinstance(error, BrokerUnavailable)
            if unavailable and not self.several and not isinstance(error, QueueDisabled):
                raise
            self.refused[queue] = str(error)


def all_queues(app: App, left_out: LeftOut) -> list[str]:
    """All queues that aztask can use; the names of the others go to `left_out`."""
    found = app.broker.listing()
    left_out.foreign = found.foreign
    return list(found.queues)


def existing(app: App, queue: str) -> QueueStats:
    """The counts of a queue that a command reads or empties.

    Raises QueueNotFound with the most similar name, and no advice to create it.
    """
    try:
        return app.broker.stats(queue)
    except QueueNotFound:
        known: Sequence[str] = ()
        with suppress(AztaskError):  # some may read their queue, but not list all
            known = app.broker.listing().queues
        hint = did_you_mean(queue, known)
        raise QueueNotFound(f"there is no queue {queue!r}.{hint} See: aztask queues") from None


# -- counts ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LearnedLease:
    """What workers have learned about a queue's lease.

    * `seconds`: the lease in use. `advice`: the advice, None without one.
    * `lost`: leases that were lost ever. `failed`: settlements that came too late.
    """

    seconds: float
    advice: Any
    lost: int
    failed: int


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """All queues with their counts.

    * `leases`: by queue; empty without queues, and if the app shares no lease advice.
    * `leases_shared`: whether it does.
    * `shards`: of the queues that have some, the counts of each shard.
    * `homes`: of an app with several addresses, that of each shard, by its name.
    * `layouts`: by queue, the layout that the result store has of it, or why it cannot be read.
    * `timers`: by queue, how many tasks wait inside their code: each has a message in the queue,
      most often a scheduled one, that is no work yet. At most `MOST_TIMERS` are counted.
    """

    queues: Sequence[QueueStats]
    leases: Mapping[str, LearnedLease]
    leases_shared: bool
    left_out: LeftOut
    timers: Mapping[str, int] = field(default_factory=dict)
    shards: Mapping[str, Sequence[QueueStats]] = field(default_factory=dict)
    layouts: Mapping[str, ShardLayout | AztaskError] = field(default_factory=dict)
    homes: Mapping[str, str] = field(default_factory=dict)


def queues(app: App) -> QueueCounts:
    """Count the messages of all queues. Raises BrokerUnavailable."""
    addresses = addresses_of(app)
    left_out = LeftOut(several=addresses is not None)
    found, shards = [], {}
    for name in all_queues(app, left_out):
        with left_out.reading(name):
            if isinstance(app.broker, Sharded) and (addresses or len(app.broker.names(name)) > 1):
                shards[name] = app.broker.shard_stats(name)
                found.append(QueueStats.sum(name, shards[name]))
            else:
                found.append(app.broker.stats(name))
    leases = {}
    if app.leases.enabled:
        learned = app.leases.read()
        for each in found:
            entry = learned.entry(each.queue)
            seen = entry.observed
            leases[each.queue] = LearnedLease(
                app.lease_now(each.queue), entry.advice, seen.lost_ever, seen.failed_ever
            )
    waits = app.sends.signals.store
    timers = Counter(waits.queues(MOST_TIMERS)) if waits is not None else {}
    known = layouts(app) if shards else {}
    parts = [each.queue for some in shards.values() for each in some] if addresses else []
    homes = {each: addresses.home_of(each) for each in parts if addresses}
    return QueueCounts(found, leases, app.leases.enabled, left_out, timers, shards, known, homes)


# -- messages --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WaitingMessage:
    """A message in a queue. message: None if it is not a task message; `problem` says why."""

    queue: str
    peeked: Peeked
    message: TaskMessage | None
    problem: str = ""

    @property
    def id(self) -> str:
        """The task id; without one the message id; without either ``@POSITION``."""
        known = self.message.id if self.message else self.peeked.envelope.message_id
        return known or f"@{self.peeked.position}"

    @property
    def due(self) -> float | None:
        """When it may start, UTC epoch seconds; None for now."""
        if self.peeked.due is not None:
            return self.peeked.due
        return self.message.eta if self.message else None


@dataclass(frozen=True, slots=True)
class Arguments:
    """A message's arguments as they may be shown, both None if they cannot be read.

    * `problem`: why they cannot be read, "" if they can.
    * `secret`: some are marked as secret, and masked; nothing else that holds them is shown.
    """

    args: tuple[Any, ...] | None
    kwargs: dict[str, Any] | None
    problem: str = ""
    secret: bool = False


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages of a queue, as far as its service shows them.

    * `held`: how many it holds in all.
    * `hidden`: what the service does not show, "" if it shows everything.
    """

    found: Sequence[WaitingMessage]
    held: int
    hidden: str


def peek(app: App, queue: str, limit: int) -> Messages:
    """Up to `limit` messages of the queue. Raises QueueNotFound, BrokerUnavailable."""
    held = existing(app, queue).living
    found = list(waiting(app, queue, limit=limit))
    return Messages(found, held, hidden(app.broker.capabilities))


def waiting(app: App, queue: str, *, limit: int = MOST_READ) -> Iterator[WaitingMessage]:
    """Up to `limit` messages of the queue, as far as its service shows them: see `hidden`.

    Raises QueueNotFound and the other errors of `Broker.peek`.
    """
    paged = app.broker.capabilities.paged_peek
    page = app.broker.peek(queue, limit=min(limit, PAGE))
    left = limit
    while page:
        for peeked in page[:left]:
            yield _read(app, queue, peeked)
        left -= len(page)
        if not paged or left <= 0:
            return
        page = app.broker.peek(queue, after=page[-1].position, limit=min(left, PAGE))


@dataclass(frozen=True, slots=True)
class OldestWaiting:
    """How long the oldest message waits that could be received now.

    * `seconds`: None if no message waits, or if the service does not show it.
    * `why`: what limits the answer, "" if nothing does.
    """

    seconds: float | None
    why: str = ""


def oldest_waiting(app: App, queue: str) -> OldestWaiting:
    """The age of the oldest waiting message. Raises QueueNotFound, BrokerUnavailable.

    A message that was delayed counts from the time at which it was due.
    """
    paged = app.broker.capabilities.paged_peek
    page = app.broker.peek(queue, limit=OLDEST_AMONG)
    now = time.time()
    since = [
        max(each.enqueued_at, each.due or 0.0)
        for each in page
        if each.state is MessageState.ACTIVE
        or (each.state is MessageState.SCHEDULED and each.due is not None and each.due <= now)
    ]
    why = "" if paged else hidden(app.broker.capabilities)
    if not since:
        full = paged and len(page) >= OLDEST_AMONG
        return OldestWaiting(
            None, f"its first {OLDEST_AMONG} messages do not wait" if full else why
        )
    return OldestWaiting(max(0.0, now - min(since)), why)


def hidden(capabilities: Capabilities) -> str:
    """What `waiting` does not show, as a sentence without its end; "" if it shows everything."""
    if not capabilities.paged_peek:
        return (
            "this service shows only the first 32 messages that could be received now: no "
            "scheduled and no leased ones"
        )
    if not capabilities.peeks_leases:
        return "this service shows leased messages as active"
    return ""


def arguments_of(app: App, message: TaskMessage | None, problem: str) -> Arguments:
    """The arguments of a message. problem: why it could not be read, if it could not."""
    if message is None:
        return Arguments(None, None, problem)
    task = app.tasks.get(message.task)
    try:
        args, kwargs = app.codec.decode_arguments(message)
    except CodecError as error:
        secret = task is not None and task.conversion.secret
        return Arguments(None, None, str(error), secret=secret)
    # A step of a workflow may get the value of the one before it as its first argument.
    given = (0,) if message.workflow is None else (0, 1)
    masked = None if task is None else task.conversion.masked(args, kwargs, given=given)
    return Arguments(args, kwargs) if masked is None else Arguments(*masked, secret=True)


def arguments_of_waiting(app: App, each: WaitingMessage) -> Arguments:
    """As `arguments_of`. A pointer to a deferred message has no arguments, and no problem."""
    if each.message is not None and each.message.pointer is not None:
        return Arguments(None, None)
    return arguments_of(app, each.message, each.problem)


def _read(app: App, queue: str, peeked: Peeked) -> WaitingMessage:
    try:
        message = app.codec.from_envelope(peeked.envelope, queue, any_age=True)
    except CodecError as error:
        return WaitingMessage(queue, peeked, None, str(error))
    return WaitingMessage(queue, peeked, message)


# -- actions ---------------------------------------------------------------------------------


def create(app: App, names: Sequence[str], options: Mapping[str, Any]) -> CreateQueues:
    """Create the queues that are missing, and those of their priorities.

    options: settings of the queues instead of the app's; on an existing queue, those that the
    service cannot change stay as they are.
    """
    wanted = tuple(dict.fromkeys(each for name in names for each in app.priority_queues(name)))
    return CreateQueues(app, len(wanted), wanted, dict(options))


@dataclass(slots=True)
class CreateQueues(Action[None]):
    """Creates queues, and the table and container of the results.

    * `made`: what exists then; True if it was missing.
    """

    name: ClassVar[str] = "queue-create"

    queues: tuple[str, ...]
    options: Mapping[str, Any]
    made: dict[str, bool] = field(default_factory=dict, init=False)

    def __str__(self) -> str:
        return f"create {plural(len(self.queues), 'queue')}: {visible(', '.join(self.queues))}"

    def _act(self, progress: Progress) -> None:
        for name in self.queues:
            settings = self.app.queue_options(name).with_explicit(**self.options)
            missing = not self._exists(name)
            self.app.broker.declare(name, settings)
            self.made[f"queue {visible(name)}"] = missing
            self.done += 1
            progress(self.done)
        if isinstance(self.app.results, Provisioned):
            self.made |= self.app.results.create()

    def _exists(self, queue: str) -> bool:
        broker = self.app.broker
        try:
            if isinstance(broker, Sharded):
                found = {each.queue for each in broker.shard_stats(queue)}
                return found.issuperset(broker.needed(queue))
            broker.stats(queue)
        except QueueNotFound:
            return False
        return True


def delete(app: App, queue: str) -> DeleteQueue:
    """Delete a queue with its messages and dead letters. Raises QueueNotFound."""
    stats = existing(app, queue)
    return DeleteQueue(app, stats.living + (stats.dead or 0), queue)


@dataclass(slots=True)
class DeleteQueue(Action[None]):
    """Deletes a queue. count: of its messages and dead letters."""

    name: ClassVar[str] = "queue-delete"

    queue: str

    @property
    def exact(self) -> bool:
        """False: the service empties the queue."""
        return False

    def __str__(self) -> str:
        return f"delete queue {visible(self.queue)} with {plural(self.count, 'message')}"

    def subject(self) -> Subject:
        """The queue that it acts on."""
        return Subject(queue=self.queue)

    def _act(self, progress: Progress) -> None:
        self.app.broker.delete(self.queue)
        self.done = self.count


def purge(app: App, queue: str) -> PurgeQueue:
    """Delete all messages of a queue, scheduled ones included. Raises QueueNotFound."""
    return PurgeQueue(app, existing(app, queue).living, queue)


@dataclass(slots=True)
class PurgeQueue(Action[int]):
    """Empties a queue; `act` returns how many messages are left: leased or new ones."""

    name: ClassVar[str] = "queue-purge"

    queue: str

    @property
    def exact(self) -> bool:
        """False: the service empties the queue."""
        return False

    def __str__(self) -> str:
        every = self.app.broker.capabilities.purges_leased
        leased = "leased ones included" if every else "except leased"
        return f"delete {plural(self.count, 'message')} in queue {visible(self.queue)}, {leased}"

    def subject(self) -> Subject:
        """The queue that it acts on."""
        return Subject(queue=self.queue)

    def _act(self, progress: Progress) -> int:
        self.done = self.app.broker.purge(self.queue)
        return self.app.broker.stats(self.queue).living
