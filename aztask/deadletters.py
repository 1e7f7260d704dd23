"""Dead letters: look at them, send them again, delete them.

Rules
1. Looking never takes: `list`, `find`, `count` and `groups` peek.
2. Acting takes each dead letter under a lease, which is renewed until it is settled or released.
   What is not selected is leased meanwhile too (services hand out dead letters in order only) and
   released at the end; that does not count as a delivery where the service can.
3. Only what was there at the beginning is acted on: a replayed message that fails again at once
   is not replayed for ever.
4. A dead letter is completed only after what replaces it was accepted.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Self

from aztask.app import App
from aztask.brokers.base import Peeked, Position, Receiver, Transactional
from aztask.clock import SYSTEM_CLOCK, Clock
from aztask.delivery import Delivery, Lost, Settled
from aztask.envelope import Envelope
from aztask.errors import AztaskError, CodecError, ConfigurationError,
from aztask.headers import SIGNATURE
from aztask.lease import Lease
from aztask.leasekeeper import LeaseKeeper
from aztask.message import TaskMessage
from aztask.results.base import RunKey, RunRecord, State
from aztask.settlement import Complete, Release

PAGE = 100
BATCH = 100
LEASE_SECONDS = 60.0
LOCAL_WAIT = 0.05
REMOTE_WAIT = 5.0


@dataclass(frozen=True, slots=True)
class Selection:
    """Which dead letters: those that meet every condition given.

    ids: task ids; message ids and ``@POSITION`` name those that have no task id. task: the task's
    name. reason: the dead-letter reason. everything: needed where no condition is given, so that
    an empty selection cannot mean all. Raises ConfigurationError.
    """

    ids: frozenset[str] = frozenset()
    task: str | None = None
    reason: str | None = None
    everything: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", frozenset(self.ids))
        narrowed = bool(self.ids) or self.task is not None or self.reason is not None
        if self.everything == narrowed:
            raise ConfigurationError(
                "select dead letters by id, task or reason, or else all of them"
                if not narrowed
                else "everything and a condition exclude each other; leave one out"
            )

    def matches(self, letter: DeadLetterView) -> bool:
        """Whether `letter` meets every condition."""
        return (
            (not self.ids or not self.ids.isdisjoint(letter.names))
            and (self.task is None or letter.task == self.task)
            and (self.reason is None or letter.reason == self.reason)
        )


@dataclass(frozen=True, slots=True)
class DeadLetterView:
    """One dead letter as far as it can be read.

    at: when it was enqueued, UTC epoch seconds. message: None where the envelope is not a task
    message; `problem` then says why.
    """

    queue: str
    position: Position
    envelope: Envelope
    reason: str
    description: str
    at: float
    delivery_count: int
    message: TaskMessage | None
    problem: str = ""

    @property
    def id(self) -> str:
        """The task id; else the message id; else ``@POSITION``."""
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that a selection may call it."""
        names = (self.message.id if self.message else "", self.envelope.message_id)
        return (*(name for name in names if name), f"@{self.position}")

    @property
    def task(self) -> str | None:
        """The task's name, None where it cannot be read."""
        return self.message.task if self.message else None

    @property
    def resubmit_count(self) -> int | None:
        """How often it failed before, None where that cannot be read."""
        return self.message.resubmit_count if self.message else None


@dataclass(frozen=True, slots=True)
class Group:
    """Dead letters of one task and one reason."""

    task: str | None
    reason: str
    count: int
    first_at: float
    last_at: float


@dataclass(slots=True)
class Report:
    """What a replay or a purge did. lost: leases that ended first; those are still dead letters.

    ids: of the dead letters acted on.
    """

    done: int = 0
    lost: int = 0
    ids: list[str] = field(default_factory=list)


class DeadLetters:
    """The dead letters of one queue."""

    def __init__(
        self,
        app: App,
        queue: str,
        *,
        clock: Clock = SYSTEM_CLOCK,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """clock, sleep: injected by tests."""
        self._app = app
        self.queue = queue
        self._clock = clock
        self._sleep = sleep

    def list(self, limit: int = PAGE, after: Position | None = None) -> list[DeadLetterView]:
        """Up to `limit` dead letters in order of position, those after `after`.

        Raises QueueNotFound, BrokerUnavailable.
        """
        peeked = self._app.broker.peek(self.queue, dead_letter=True, after=after, limit=limit)
        return [self._view_peeked(each) for each in peeked]

    def find(self, selection: Selection) -> Iterator[DeadLetterView]:
        """Every dead letter that is selected, page by page.

        Where the service shows only its first messages (a Storage queue: 32), those.
        """
        return (letter for letter in self._all() if selection.matches(letter))

    def count(self, selection: Selection) -> int:
        """How many are selected."""
        return sum(1 for _ in self.find(selection))

    def groups(self) -> Sequence[Group]:
        """All dead letters by task and reason, the largest group first."""
        counts: Counter[tuple[str | None, str]] = Counter()
        times: dict[tuple[str | None, str], tuple[float, float]] = {}
        for letter in self._all():
            key = (letter.task, letter.reason)
            counts[key] += 1
            first, last = times.get(key, (letter.at, letter.at))
            times[key] = (min(first, letter.at), max(last, letter.at))
        return [Group(*key, count, *times[key]) for key, count in counts.most_common()]

    def replay(
        self,
        selection: Selection,
        *,
        rate: float | None = None,
        progress: Callable[[Report], None] = lambda report: None,
    ) -> Report:
        """Send what is selected again, as new generations, then complete the dead letters.

        rate: at most so many a second. progress: called after each batch. What cannot be decoded
        is sent again as it is, byte for byte, under a fresh message id.

        Crash window: if the process dies after the send and before the dead letter is completed,
        the message is on its way and the dead letter is still there. Replaying it again makes the
        same message id, which duplicate detection drops, or the worker, which finds the run in the
        result store. Only where that run has ended meanwhile is it run again, as a further
        generation: the store cannot tell it from a run that somebody else asked for. With broker
        and results in one local file send and completion are one transaction, without a window.

        Raises BrokerUnavailable, SendUnconfirmed (it is a dead letter still: replay it again),
        and ConfigurationError when signed messages would be sent without a signing key.
        """
        if rate is not None and not 0 < rate < float("inf"):
            raise ConfigurationError(f"rate takes messages a second above 0, not {rate!r}")
        with _Sweep(self._app, self.queue, self._clock) as sweep:
            pace = _Pace(rate, self._clock, self._sleep)
            size = 1 if sweep.joint else BATCH
            for batch in self._selected(sweep, selection, pace.limit(size)):
                sweep.replay([(letter, self._again(letter)) for letter, _ in batch], batch)
                progress(sweep.report)
                pace.wait(len(batch))
        return sweep.report

    def purge(
        self,
        selection: Selection,
        *,
        progress: Callable[[Report], None] = lambda report: None,
    ) -> Report:
        """Delete what is selected, for good. Raises BrokerUnavailable, QueueNotFound.

        If the process dies meanwhile, some are deleted and the rest are not.
        """
        if selection.everything:
            return Report(done=self._app.broker.purge(self.queue, dead_letter=True))
        with _Sweep(self._app, self.queue, self._clock) as sweep:
            for batch in self._selected(sweep, selection, BATCH):
                sweep.complete(batch)
                progress(sweep.report)
        return sweep.report

    # -- inside ------------------------------------------------------------------------------

    def _all(self) -> Iterator[DeadLetterView]:
        page = self.list()
        while page:
            yield from page
            if not self._app.broker.capabilities.paged_peek:
                return
            page = self.list(after=page[-1].position)

    def _selected(
        self, sweep: _Sweep, selection: Selection, size: int
    ) -> Iterator[Sequence[tuple[DeadLetterView, Lease]]]:
        """Batches of what is selected, under leases, until all that was there has been seen."""
        wanted: set[Position] | None = None
        left = 0
        if self._app.broker.capabilities.paged_peek:
            wanted = {letter.position for letter in self.find(selection)}
            left = len(wanted)
        else:
            left = self._app.broker.stats(self.queue).dead or 0
        while left > 0 and (leases := sweep.take(size)):
            batch = []
            for lease in leases:
                letter = self._view(lease.delivery)
                known = wanted is None or letter.position in wanted
                if wanted is None:
                    left -= 1
                if known and selection.matches(letter):
                    batch.append((letter, lease))
                    left -= wanted is not None
            if batch:
                yield batch

    def _again(self, letter: DeadLetterView) -> tuple[Envelope, TaskMessage | None]:
        """What to send in the place of a dead letter, and the message in it."""
        message = letter.message
        if message is None:
            fresh = uuid.uuid5(
                uuid.NAMESPACE_OID,
                f"aztask-replay {self.queue} {letter.position} {letter.envelope.message_id}",
            )
            return replace(
                letter.envelope, message_id=str(fresh), delay=0.0, expires_at=None
            ), None
        if SIGNATURE in letter.envelope.headers and not self._app.settings.signing_keys:
            raise ConfigurationError(
                "the dead letters are signed and no signing key is configured; name the app with "
                "-A, so that the replay is signed as well"
            )
        message = replace(message, generation=self._known_generation(message)).replayed()
        return self._app.codec.to_envelope(message), message

    def _known_generation(self, message: TaskMessage) -> int:
        """The generation to come after: the message's own, or a newer one that has ended.

        A newer one that has not ended is taken for an earlier replay of this dead letter that
        crashed before the completion: the same id is made again. With one transaction for both
        there is no such crash, and a newer one is always somebody else's.
        """
        results = self._app.results
        known = results.get(message.id) if results is not None else None
        if known is None or known.key.generation <= message.generation:
            return message.generation
        if known.state.final or _joint(self._app) is not None:
            return known.key.generation
        return known.key.generation - 1

    def _view_peeked(self, peeked: Peeked) -> DeadLetterView:
        return self._read(
            peeked.envelope,
            peeked.position,
            peeked.dead_letter_reason,
            peeked.dead_letter_description,
            peeked.enqueued_at,
            peeked.delivery_count,
        )

    def _view(self, delivery: Delivery) -> DeadLetterView:
        return self._read(
            delivery.envelope,
            delivery.position,
            delivery.dead_letter_reason,
            delivery.dead_letter_description,
            delivery.enqueued_at,
            delivery.delivery_count,
        )

    def _read(
        self,
        envelope: Envelope,
        position: Position,
        reason: str | None,
        description: str | None,
        at: float,
        delivery_count: int,
    ) -> DeadLetterView:
        message, problem = None, ""
        try:
            message = self._app.codec.from_envelope(envelope, self.queue)
        except CodecError as error:
            problem = str(error)
        return DeadLetterView(
            self.queue,
            position,
            envelope,
            reason or "",
            description or "",
            at,
            delivery_count,
            message,
            problem,
        )


class _Pace:
    """Keeps to a rate; without one it does nothing."""

    def __init__(
        self, rate: float | None, clock: Clock, sleep: Callable[[float], None]
    ) -> None:
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._next_at = clock.monotonic()

    def limit(self, size: int) -> int:
        """The batch size that keeps the steps short, about a second at most."""
        return size if self._rate is None else max(1, min(size, int(self._rate)))

    def wait(self, sent: int) -> None:
        """`sent` messages went out: wait until the next may."""
        if self._rate is not None:
            now = self._clock.monotonic()
            self._next_at = max(self._next_at, now) + sent / self._rate
            self._sleep(max(0.0, self._next_at - now))


class _Sweep:
    """Takes dead letters under renewed leases; those that are not settled are released at exit."""

    def __init__(self, app: App, queue: str, clock: Clock) -> None:
        self._app = app
        self._queue = queue
        self._clock = clock
        self._wait = REMOTE_WAIT if app.broker.capabilities.remote else LOCAL_WAIT
        self._keeper = LeaseKeeper(app.broker, clock=clock)
        self._receiver: Receiver | None = None
        self._held: dict[Lease, None] = {}
        self.joint = _joint(app)
        self.report = Report()

    def __enter__(self) -> Self:
        self._receiver = self._app.broker.receiver(
            self._queue, lease=LEASE_SECONDS, dead_letter=True
        )
        self._keeper.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Release what is held; an error of the block is never hidden by one in here."""
        try:
            leases = list(self._held)
            self._settle([lease for lease in leases if self._begin(lease)], Release())
        except AztaskError:
            if not any(error):
                raise
        finally:
            self._keeper.stop()
            self._open_receiver().close()

    def take(self, limit: int) -> Sequence[Lease]:
        """Up to `limit` further dead letters; none when there are no more."""
        deliveries = self._open_receiver().receive(limit, self._wait)
        leases = [
            Lease(each, each.lease_seconds, each.deadline - each.lease_seconds)
            for each in deliveries
        ]
        self._held.update(dict.fromkeys(leases))
        self._keeper.hold(self._open_receiver(), leases)
        return leases

    def replay(
        self,
        again: Iterable[tuple[DeadLetterView, tuple[Envelope, TaskMessage | None]]],
        batch: Sequence[tuple[DeadLetterView, Lease]],
    ) -> None:
        """Send, note the new runs, complete. See `DeadLetters.replay` for the crash window."""
        sent = [new for _, new in again]
        ours = [
            (new, letter, lease)
            for new, (letter, lease) in zip(sent, batch, strict=True)
            if self._begin(lease)
        ]
        if not ours:
            return
        leases = [lease for _, _, lease in ours]
        try:
            with self._transaction():
                self._app.broker.send(self._queue, [envelope for (envelope, _), _, _ in ours])
                self._expect(message for (_, message), _, _ in ours if message is not None)
                settled = self._settle(leases, Complete())
                if self.joint is not None and not settled:
                    raise _Undo
        except _Undo:
            pass
        except BaseException:
            for lease in leases:
                self._keeper.settlement_failed(lease)
            raise
        self._book(settled, [(letter, lease) for _, letter, lease in ours])

    def complete(self, batch: Sequence[tuple[DeadLetterView, Lease]]) -> None:
        """Remove these."""
        ours = [(letter, lease) for letter, lease in batch if self._begin(lease)]
        self._book(self._settle([lease for _, lease in ours], Complete()), ours)

    def _begin(self, lease: Lease) -> bool:
        """Whether it may be settled now; a lapsed lease is counted as lost."""
        try:
            self._keeper.begin(lease)
        except AztaskError:
            self._held.pop(lease, None)
            return False
        return True

    def _settle(self, leases: Sequence[Lease], how: Complete | Release) -> set[Lease]:
        """Settle leases that `_begin` allowed; which of them are settled for sure."""
        if not leases:
            return set()
        answers = self._open_receiver().settle([(lease.delivery, how) for lease in leases])
        settled = set()
        for lease, answer in zip(leases, answers, strict=True):
            if isinstance(answer, Settled):
                settled.add(lease)
            elif isinstance(answer, Lost):
                self._keeper.lapse(lease, answer.reason)
            else:
                self._keeper.settlement_failed(lease)
            self._held.pop(lease, None)
        return settled

    def _book(
        self, settled: set[Lease], batch: Sequence[tuple[DeadLetterView, Lease]]
    ) -> None:
        self._keeper.settled(settled)
        for letter, lease in batch:
            if lease in settled:
                self.report.done += 1
                self.report.ids.append(letter.id)
            else:
                self.report.lost += 1

    def _expect(self, messages: Iterable[TaskMessage]) -> None:
        if self._app.results is not None:
            self._app.results.expect(
                RunRecord(RunKey(*message.key), message.task, message.queue, State.PENDING)
                for message in messages
            )

    def _transaction(self) -> AbstractContextManager[None]:
        return self.joint.transaction() if self.joint is not None else nullcontext()

    def _open_receiver(self) -> Receiver:
        if self._receiver is None:
            raise RuntimeError("a sweep is a context manager")
        return self._receiver


class _Undo(Exception):
    """The lease was lost inside the joint transaction: nothing shall have been sent."""


def _joint(app: App) -> Transactional | None:
    """The broker, where it and the result store can share a transaction."""
    broker, results = app.broker, app.results
    if (
        isinstance(broker, Transactional)
        and isinstance(results, Transactional)
        and broker.transaction_key == results.transaction_key
    ):
        return broker
    return None


