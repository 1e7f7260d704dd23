"""Signals to tasks that wait, and what else wakes them: a cancellation, the end of a child.

A process that wakes a task writes first and reads then, and so does the worker of a run that parks:

    signaller   its signal's row, then the row of the parked run: is it there, it sends the wake-up
    worker      the outcome of the run, then its row, then the signals, the ends of its children and
                its cancellation: is one there, the run's own wake-up is due at once

Rules
1. So one of both sees the other. A wake-up that both send makes one hop: the start row of that hop
   admits one message, and the other one ends as a superfluous copy.
2. A wake-up only starts the next hop. What the wait gives is decided there, by compare-and-set on
   the wait's own row: a signal, or the end of its time.
3. A signaller that dies between row and send, or that may not send, is replaced by housekeeping
   (`repair`) after `UNSENT_SECONDS`. One worker looks at a task at a time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from itertools import islice
from typing import Any, Final, Protocol

from aztask.errors import (
    AztaskError,
    BrokerError,
    BrokerUnavailable,
    CapabilityError,
    CodecError,
    ConfigurationError,
    EncodeError,
    ForeignId,
    NotFound,
    ResultDamaged,
    SignalRefused,
)
from aztask.message.codec import Codec
from aztask.message.encryption import Locked
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage
from aztask.message.signatures import STORED
from aztask.queues.base import Broker, Transactional, shared_transaction
from aztask.queues.local.payload import envelope_of, payload_of
from aztask.settlement import DeadLetter
from aztask.steps.stepoptions import NAME_CHARACTERS, NAMES
from aztask.steps.waits import (
    CHILD_SECONDS,
    KEPT_SECONDS,
    LATE_SECONDS,
    MOST_SIGNALS,
    SIGNAL_BYTES,
    ParkedRun,
    TaskWaits,
    WaitStore,
    waits_of,
)
from aztask.stores.records.base import ResultStore, RunKey, RunRecord, State
from aztask.stores.records.damage import Damaged
from aztask.stores.rows import Row
from aztask.support.failpoint import hit

logger = logging.getLogger(__name__)

PAGE: Final = 200
TOGETHER: Final = 100
"""Tasks that get a signal in one transaction: other writers of the file wait for it."""
_MARK: Final = STORED.encode()
NOT_HERE: Final = "task %s is not woken here: %s"


class Places(Protocol):
    """The connections of an app: `aztask.stores.connections.Connections`."""

    def broker(self) -> Broker:
        """Opened when it is first needed."""
        ...

    def results(self) -> ResultStore | None:
        """The app's result store; None if there is none."""
        ...


class TaskSignals:
    """Sends signals to the tasks of one app, and wakes them. Any thread may call.

    * `parks`: this process has parked a run since it last asked whether one waits.
    """

    def __init__(self, places: Places, codec: Codec) -> None:
        self._places = places
        self._codec = codec
        self._store: tuple[object, WaitStore | None] = (None, None)
        self._joint: tuple[object, Transactional | None] = (None, None)
        self.parks = False

    @property
    def waiting(self) -> bool:
        """True if a task waits, or a signal does: a query of each shard."""
        store = self.store
        self.parks = False
        return store is not None and store.any()

    @property
    def store(self) -> WaitStore | None:
        """The waiting tasks in the app's result store; None if that keeps none."""
        results = self._places.results()  # inline mode replaces it
        if self._store[0] is not results:
            self._store = results, waits_of(results, self._codec)
        return self._store[1]

    def _results(self) -> tuple[ResultStore, WaitStore]:
        results, store = self._places.results(), self.store
        if results is None or store is None:
            raise ConfigurationError(
                'signals need a result store; give the App results="local://" or "tables://..."'
            )
        return results, store

    # -- signals -----------------------------------------------------------------------------

    def signal(self, task_id: str, name: str, value: Any = None) -> None:
        """Store a signal, and wake its task if it waits for it; see `AsyncResult.signal`.

        Where queue and results share one file, all of it is one transaction. Crash window
        elsewhere: the signal is sent once its row is written; if the process dies between the row
        and the wake-up, housekeeping wakes the task.
        """
        for error in self.signal_all([task_id], name, value).values():
            raise error

    def signal_all(
        self, task_ids: Iterable[str], name: str, value: Any = None
    ) -> dict[str, AztaskError]:
        """Send one signal to each task; see `App.signal_all`.

        Crash window: as `signal`, for `TOGETHER` tasks at a time. If the process dies, the tasks
        before have the signal. If it stands still for longer than `KEPT_SECONDS` between the row
        and its look at the task, and the task starts in the meantime, the signal is lost.
        """
        results, store = self._results()
        check_name(name)
        data = self._codec.encode_value(value)
        if len(data) > SIGNAL_BYTES:
            raise EncodeError(
                f"signal {name!r} has {len(data)} bytes, and at most {SIGNAL_BYTES} are taken; "
                "store the value, and send a reference to it"
            )
        refused: dict[str, AztaskError] = {}
        left = iter(dict.fromkeys(task_ids))
        while some := list(islice(left, TOGETHER)):
            with self._together(results):
                refused.update(self._signal(results, store, some, name, data))
        return refused

    def _signal(
        self, results: ResultStore, store: WaitStore, tasks: Sequence[str], name: str, data: bytes
    ) -> dict[str, AztaskError]:
        refused: dict[str, AztaskError] = {}
        awake, gone = list[ParkedRun](), list[Row]()
        sent = store.add_all(tasks, name, data)
        hit("signalled", len(sent))
        for task_id, signal in zip(tasks, sent, strict=True):
            if signal is None:
                continue
            parked, before = store.beside(task_id, signal)
            try:
                self._admit(results, task_id, name, parked, before)
            except (NotFound, SignalRefused, ForeignId, ConfigurationError) as error:
                refused[task_id] = error
                gone.append(signal.row)
            else:
                if parked is not None and parked.waits_for(name):
                    awake.append(parked)
        if gone:
            store.remove(gone)
        for run in self.send(awake):
            logger.info(
                "signal %s to task %s is stored; its workers wake the task within %g s",
                name, run.id, 5.0,
            )  # fmt: skip
        return refused

    def _admit(
        self,
        results: ResultStore,
        task_id: str,
        name: str,
        parked: ParkedRun | None,
        before: int,
    ) -> None:
        """Raise NotFound, SignalRefused, ForeignId or ConfigurationError unless the task takes it.

        Its run is read only if none waits: a run that waits has lost its row when its task ends.
        """
        if parked is None:
            refuse(task_id, results.get(task_id))
        elif not self._codec.signs and _signed(parked):
            raise ConfigurationError(
                f"task {task_id} was sent with a signing key, and its workers take no signal "
                "without one: give this app the same signing_keys"
            )
        if before >= MOST_SIGNALS:
            raise SignalRefused(
                f"{before} signals {name!r} wait for task {task_id} already, as many as one task "
                "may have; let it take them first"
            )

    def wake(self, task_id: str) -> bool:
        """Wake a task, so that it finds out why; False if it does not wait.

        What this process may not send, housekeeping sends.
        """
        results, store = self._places.results(), self.store
        if store is None:
            return False
        with self._together(results):
            parked = store.parked(task_id)
            for run in self.send([] if parked is None else [parked]):
                _soon(store, run)
        return parked is not None

    def _together(self, results: object) -> AbstractContextManager[None]:
        """One transaction where queue and results share one file; else each request is its own."""
        if self._joint[0] is not results:
            joint = None
            if isinstance(results, Transactional):
                # Without a queue it is no error yet: workers have one.
                with suppress(BrokerError, ConfigurationError):
                    joint = shared_transaction(self._places.broker(), results)
            self._joint = results, joint
        joint = self._joint[1]
        return nullcontext() if joint is None else joint.transaction()

    def send(self, runs: Sequence[ParkedRun]) -> list[ParkedRun]:
        """Send the wake-ups of runs, and cancel their timers; returns those that stay.

        Those are what this process cannot send.
        """
        try:
            return self._send(runs)
        except BrokerUnavailable as error:
            for run in runs:
                logger.info(NOT_HERE, run.id, error)
            return list(runs)

    def _send(self, runs: Sequence[ParkedRun]) -> list[ParkedRun]:
        """As `send`. Raises BrokerUnavailable, which is no fault of these runs."""
        left = list[ParkedRun]()
        queues: dict[str, list[tuple[ParkedRun, Envelope]]] = {}
        for run in runs:
            if (envelope := self._wake_up(run)) is None:
                left.append(run)
            else:
                queues.setdefault(run.queue, []).append((run, envelope))
        for queue, pairs in queues.items():
            sent = [run for run, _ in pairs]
            try:
                broker = self._places.broker()
                broker.send(queue, [envelope for _, envelope in pairs])
            except BrokerUnavailable:
                raise
            except (BrokerError, ConfigurationError) as error:
                for run in sent:
                    logger.info(NOT_HERE, run.id, error)
                left += sent
            else:
                hit("woken", len(sent))
                self._cancel_timers(broker, queue, sent)
        return left

    def _cancel_timers(self, broker: Broker, queue: str, runs: Sequence[ParkedRun]) -> None:
        """Cancel the timers of runs that are awake, where that needs no search.

        One that stays is harmless: it comes at its time, as a superfluous copy.
        """
        can = broker.capabilities
        try:
            if can.timer_numbers:
                for run in runs:
                    if run.timer:
                        broker.cancel_timer(queue, run.timer)
            elif can.cancel_scheduled:
                broker.cancel_scheduled(queue, [self._codec.keyed_id(run.timer_id) for run in runs])
        except (BrokerError, CapabilityError) as error:
            logger.debug("timers of %d tasks, which are awake, stay: %s", len(runs), error)

    def _wake_up(self, parked: ParkedRun) -> Envelope | None:
        """What wakes a run, ready to be sent; None if it is refused.

        Without keys the row has it as it is. With keys it is signed there for its place alone.
        """
        if self._codec.signs:
            message = self.message(parked)
            return None if message is None else self._codec.to_envelope(message.woken())
        envelope = envelope_of(parked.payload)
        if STORED in envelope.content_type:
            return None
        found = (envelope.headers.get(name) for name in ("id", "aztask-generation", "aztask-hop"))
        if tuple(found) != (parked.id, parked.generation, parked.hop):
            what = envelope.problem or "its message is that of another run"
            logger.error("task %s is not woken, it waits for its time: %s", parked.id, what)
            return None
        return envelope

    def message(self, parked: ParkedRun) -> TaskMessage | None:
        """The message of the hop that wakes a run, verified; None if it is refused."""
        if not self._codec.signs and _signed(parked):
            return None
        try:
            envelope = envelope_of(parked.payload)
            stored = place_of(parked.id, parked.generation, parked.hop)
            message = self._codec.from_envelope(envelope, parked.queue, any_age=True, stored=stored)
            if message.key != (parked.id, parked.generation, parked.hop):
                raise Damaged(f"its message is that of task {message.id}")
        except Locked as error:
            logger.info(NOT_HERE, parked.id, error)
            return None
        except (CodecError, Damaged) as error:
            logger.error("task %s is not woken, it waits for its time: %s", parked.id, error)
            return None
        return message

    # -- workers -----------------------------------------------------------------------------

    def set_timer(self, run: ParkedRun, timer: Envelope, *, repeated: bool) -> int:
        """Send the timer of a run that is about to park; returns the number that cancels it.

        * `timer`: the message of its next hop, delayed.
        * `repeated`: the run has ended in an earlier delivery, whose timer may be sent.

        Crash window: if the worker dies before the number is in the row, the redelivery sends the
        timer again, and the first one comes as a superfluous copy. Raises BrokerError.
        """
        known = self._results()[1].parked(run.id) if repeated else None
        if known is not None and known.timer and _same_hop(known, run):
            return known.timer
        number = self._places.broker().send_timer(run.queue, timer)
        hit("timed")
        return number

    def park(self, run: ParkedRun, message: TaskMessage) -> bool:
        """Write the row of a run that waits. True if it is to wake at once.

        * `run`: without its message. `message`: of its next hop.

        Its outcome is recorded. Crash window: if the worker dies before the row is written, the
        redelivery repeats the settlement, and this with it. A signal, the end of a child or a
        cancellation that came before the row did not find it: so they are looked for afterwards.
        """
        results, store = self._results()
        stored = place_of(run.id, run.generation, run.hop)
        envelope = self._codec.to_envelope(message.woken(), stored=stored)
        now = store.now()
        due = (min(run.due, now) if run.children else run.due) + LATE_SECONDS
        store.park(replace(run, payload=payload_of(envelope)), due)
        self.parks = True
        hit("parked")
        record = _record(results, run.id)
        return (record is not None and record.state.final) or self._is_wanted(results, store, run)

    def has_gone_on(self, key: RunKey) -> bool:
        """True if this run is not the newest of its task: something woke it already."""
        record = self._results()[0].get(key.task_id)
        return record is None or record.key != key

    def ended(self, task_id: str, *, dead: bool) -> None:
        """Remove the rows of a task that has ended. dead: a replay may still take its signals."""
        store = self.store
        if store is None:
            return
        found = store.read(task_id)
        rows = list(found.dropped)
        if not dead:
            rows += [each.row for each in found.signals]
        if found.parked is not None and found.parked.row is not None:
            rows.append(found.parked.row)
        if rows:
            store.remove(rows)

    def child_ended(self, task_id: str, child: str) -> None:
        """Wake a task if it waits for the end of this child, whose outcome is recorded.

        Raises BrokerUnavailable: it is tried again. What this process may not send, housekeeping
        sends.
        """
        store = self.store
        parked = store.parked(task_id) if store is not None else None
        if store is None or parked is None or child not in parked.children:
            return
        for run in self._send([parked]):
            _soon(store, run)

    def now(self) -> float:
        """The time of the result store, UTC epoch seconds."""
        return self._results()[1].now()

    def _is_wanted(self, results: ResultStore, store: WaitStore, run: ParkedRun) -> bool:
        if any(store.oldest(run.id, name, ())[0] is not None for name in run.signals):
            return True
        records = (_record(results, child) for child in run.children)
        return any(record is not None and record.state.final for record in records)

    # -- housekeeping ------------------------------------------------------------------------

    def repair(self) -> int:
        """Wake the tasks whose signallers have died, or may not send; returns how many rows it saw.

        Each task is looked at by the worker that first moves the time of its next look. So rows
        that cannot be repaired come last the next time, and do not stop the others. Crash window:
        if the process dies after that, the task is looked at again after `LATE_SECONDS`. Raises
        BrokerUnavailable: the rows keep their times.
        """
        store = self.store
        if store is None:
            return 0
        results, _ = self._results()
        rows = store.due(PAGE)
        tasks, unknown = dict[str, Row](), list[Row]()
        for row in rows:
            if (task_id := store.task_of(row)) is None:
                unknown.append(row)
            else:
                tasks.setdefault(task_id, row)
        self._put_aside(store, unknown)
        for task_id, first in tasks.items():
            claimed = store.look_again(first, store.now() + LATE_SECONDS)
            if claimed is None:
                continue  # another worker looks at this task
            try:
                with self._together(results):
                    self._repair(results, store, task_id)
            except ForeignId:
                store.remove([claimed])
            except (AztaskError, ValueError) as error:
                if isinstance(error, BrokerUnavailable) and not isinstance(error, Locked):
                    store.look_again(claimed, first.values["due"])
                    raise
                logger.warning("task %s is woken later: %s", task_id, error)
        return len(rows)

    def _put_aside(self, store: WaitStore, rows: Sequence[Row]) -> None:
        """Rows of which nothing tells their task: drop them, or leave them to a newer release."""
        newer = [row for row in rows if store.is_newer(row)]
        for row in newer:
            store.look_again(row, store.now() + LATE_SECONDS)
        if newer:
            logger.warning(
                "%d rows of waiting tasks are of a newer aztask, and left to its workers",
                len(newer),
            )
        if damaged := [row for row in rows if row not in newer]:
            logger.error(
                "%d signals or waiting tasks are damaged or not signed, and dropped; the timers of "
                "such tasks wake them", len(damaged),
            )  # fmt: skip
            store.remove(damaged)

    def _repair(self, results: ResultStore, store: WaitStore, task_id: str) -> None:
        record, found = results.get(task_id), store.read(task_id)
        if record is not None and record.state is State.UNREADABLE:
            raise ResultDamaged(f"its row is damaged ({record.damage})")
        newest = max((signal.at for signal in found.signals), default=-math.inf)
        if record is None and store.now() < newest + KEPT_SECONDS:
            # Its signaller may stand still, and find it started when it goes on.
            self._keep(store, found, newest + KEPT_SECONDS)
            return
        if record is None or (record.state.final and not _parks(record)):
            dead = record is not None and _is_dead(record)
            self.ended(task_id, dead=dead)
            if dead:
                self._keep(store, found, store.now() + KEPT_SECONDS)
            return
        self._put_aside(store, [*found.newer, *found.dropped])
        run, now = found.parked, store.now()
        waits = run is not None and _parked_at(record, run)
        sent = False
        if (
            run is not None
            and waits
            and (
                now >= run.due + LATE_SECONDS
                or self._is_wanted(results, store, run)
                or record.state.final  # it was cancelled
            )
        ):
            sent = not self._send([run])
        if run is not None and run.row is not None:
            again = _next_look(run, now, sent=sent) if waits else now + KEPT_SECONDS
            store.look_again(run.row, again)
        self._keep(store, found, now + LATE_SECONDS if sent else now + KEPT_SECONDS)

    def _keep(self, store: WaitStore, found: TaskWaits, due: float) -> None:
        """Signals that no wait has taken: look at them later."""
        soon = store.now() + LATE_SECONDS  # this look has moved one of them to there
        for signal in found.signals:
            if signal.row.values["due"] <= soon:
                store.look_again(signal.row, due)


def _next_look(run: ParkedRun, now: float, *, sent: bool) -> float:
    """When housekeeping looks at a run again: the later, the longer it waits already."""
    if now >= run.due:
        return now + (max(LATE_SECONDS, now - run.due) if sent else LATE_SECONDS)
    if run.children:
        pause = min(max(LATE_SECONDS, now - run.since), CHILD_SECONDS)
        return min(now + pause, run.due + LATE_SECONDS)
    return run.due + LATE_SECONDS


def _soon(store: WaitStore, parked: ParkedRun) -> None:
    """Let housekeeping wake a run that this process cannot wake."""
    if parked.row is not None:
        store.look_again(parked.row, store.now())


def _same_hop(one: ParkedRun, other: ParkedRun) -> bool:
    return (one.generation, one.hop) == (other.generation, other.hop)


def place_of(task_id: str, generation: int, hop: int) -> str:
    """Where the message that wakes a task is stored, as its signature says."""
    return f"wait of task {task_id}, generation {generation}, hop {hop}"


def check_name(name: object) -> None:
    """Raise SignalRefused for what no wait could ask for."""
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARACTERS or NAMES in name:
        raise SignalRefused(
            f"a signal's name is one line of 1 to {NAME_CHARACTERS} characters, not {name!r}"
        )


def refuse(task_id: str, record: RunRecord | None) -> None:
    """Raise NotFound or SignalRefused unless the task may take a signal."""
    if record is None:
        raise NotFound(
            f"the result store does not know task {task_id}; check the id. A task that has not "
            "started is known if it was sent with a task_id"
        )
    if record.state is State.UNREADABLE:
        raise SignalRefused(f"the row of task {task_id} is damaged ({record.damage})")
    if record.state.final:
        more = "; replay it first: aztask dlq replay" if _is_dead(record) else ""
        raise SignalRefused(f"task {task_id} has ended ({record.state}) and takes no signal{more}")


def _is_dead(record: RunRecord) -> bool:
    return record.outcome is not None and isinstance(record.outcome.settlement, DeadLetter)


def _parked_at(record: RunRecord, run: ParkedRun) -> bool:
    """True if the newest run of the task is the one before this wake-up, and waits."""
    key = record.key
    return (key.generation, key.hop + 1) == (run.generation, run.hop) and _parks(record)


def _parks(record: RunRecord) -> bool:
    """True if its last run has parked; the state may say that the task was cancelled since."""
    return record.outcome is not None and record.outcome.parked


def _signed(run: ParkedRun) -> bool:
    return _MARK in run.payload and STORED in envelope_of(run.payload).content_type


def _record(results: ResultStore, task_id: str) -> RunRecord | None:
    try:
        return results.get(task_id)
    except ForeignId:
        return None
