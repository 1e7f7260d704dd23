"""Signals to tasks that wait, and what else wakes them: a cancellation, the end of a child.

A process that wakes a task writes first and reads then, and so does the worker of a run that parks:

    signaller   its signal's row, then the row of the parked run: is it there, it sends the wake-up
    worker      the outcome of the run, then its row, then the signals: is one there, the run's own
                wake-up is due at once

Rules
1. So one of both sees the other. A wake-up that both send makes one hop: the start row of that hop
   admits one message, and the other one ends as a superfluous copy.
2. A wake-up only starts the next hop. What the wait gives is decided there, by compare-and-set on
   the wait's own row: a signal, or the end of its time.
3. A signaller that dies between row and send, or that may not send, is replaced by housekeeping
   (`repair`) after `UNSENT_SECONDS`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from aztask.errors import (
    AztaskError,
    BrokerError,
    CapabilityError,
    CodecError,
    ConfigurationError,
    EncodeError,
    ForeignId,
    NotFound,
    SignalRefused,
)
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.queues.base import Broker
from aztask.queues.local.payload import envelope_of, payload_of
from aztask.settlement import DeadLetter
from aztask.steps.engine import NAME_CHARACTERS
from aztask.steps.waits import (
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
from aztask.support import clock
from aztask.support.failpoint import hit
from aztask.support.forks import fork_safe_lock

logger = logging.getLogger(__name__)

PAGE: Final = 200
SWEEPS: Final = 20
"""Looking for timers in a service takes at most so small a part of the time."""
SIGNED: Final = "aztask-stored="
"""In the content type of a message that was stored with a signature."""


class Places(Protocol):
    """The connections of an app: `aztask.stores.connections.Connections`."""

    def broker(self) -> Broker:
        """Opened when it is first needed."""
        ...

    def results(self) -> ResultStore | None:
        """The app's result store; None if there is none."""
        ...


class _Timers:
    """Cancels the timers of runs that were woken by something else.

    A timer that stays is harmless: it comes at its time, as a superfluous copy. A service finds it
    by reading all that is scheduled. So several are cancelled together, where they come quickly.
    """

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._ids: dict[str, list[str]] = {}
        self._next = 0.0

    def cancel(self, broker: Broker, queue: str, message_id: str) -> None:
        """Cancel this timer and those that are left, now or with a later one."""
        if not broker.capabilities.cancel_scheduled:
            return
        with self._lock:
            self._ids.setdefault(queue, []).append(message_id)
            started = clock.monotonic()
            if broker.capabilities.remote and started < self._next:
                return
            self._next = math.inf
            due, self._ids = self._ids, {}
        try:
            for name, ids in due.items():
                broker.cancel_scheduled(name, ids)
        except (BrokerError, CapabilityError) as error:
            logger.debug("timers of tasks that are awake stay: %s", error)
        finally:
            ended = clock.monotonic()
            self._next = ended + SWEEPS * (ended - started)


class TaskSignals:
    """Sends signals to the tasks of one app, and wakes them. Any thread may call.

    * `parks`: this process has parked a run since it last asked whether one waits.
    """

    def __init__(self, places: Places, codec: Codec) -> None:
        self._places = places
        self._codec = codec
        self._store: tuple[object, WaitStore | None] = (None, None)
        self._timers = _Timers()
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

        Crash window: if the process dies between the row and the wake-up, housekeeping wakes the
        task. The signal is sent once its row is written.
        """
        results, store = self._results()
        check_name(name)
        data = self._codec.encode_value(value)
        if len(data) > SIGNAL_BYTES:
            raise EncodeError(
                f"signal {name!r} has {len(data)} bytes, and at most {SIGNAL_BYTES} are taken; "
                "store the value, and send a reference to it"
            )
        refuse(task_id, results.get(task_id))
        sent = store.add(task_id, name, data)
        hit("signalled")
        found = store.read(task_id)
        before = sum(each.name == name and each.key < sent.key for each in found.signals)
        if before >= MOST_SIGNALS:
            store.remove([sent.row])
            raise SignalRefused(
                f"{before} signals {name!r} wait for task {task_id} already, as many as one task "
                "may have; let it take them first"
            )
        parked = found.parked
        if parked is None:
            return
        if not self._codec.signs and _signed(parked):
            store.remove([sent.row])
            raise ConfigurationError(
                f"task {task_id} was sent with a signing key, and its workers take no signal "
                "without one: give this app the same signing_keys"
            )
        if parked.waits_for(name) and not self.send(parked):
            logger.info(
                "signal %s to task %s is stored; its workers wake the task within %g s",
                name, task_id, 5.0,
            )  # fmt: skip

    def wake(self, task_id: str) -> bool:
        """Wake a task, so that it finds out why; False if it does not wait.

        What this process may not send, housekeeping sends.
        """
        store = self.store
        parked = store.read(task_id).parked if store is not None else None
        if store is None or parked is None:
            return False
        if not self.send(parked) and parked.row is not None:
            store.look_again(parked.row, store.now())
        return True

    def send(self, parked: ParkedRun) -> bool:
        """Send the wake-up of a run, and cancel its timer; False if this process cannot.

        The timer need not be cancelled: one that comes later is a superfluous copy.
        """
        try:
            message = self._message(parked)
            if message is None:
                return False
            broker = self._places.broker()
            broker.send(parked.queue, [self._codec.to_envelope(message.woken())])
        except (BrokerError, ConfigurationError) as error:
            logger.info("task %s is not woken here: %s", parked.id, error)
            return False
        hit("woken")
        self._timers.cancel(broker, parked.queue, self._codec.message_id(message))
        return True

    def _message(self, parked: ParkedRun) -> TaskMessage | None:
        """The message of the hop that wakes a run, verified; None if it is refused."""
        if not self._codec.signs and _signed(parked):
            return None
        try:
            envelope = envelope_of(parked.payload)
            stored = place_of(parked.id, parked.generation, parked.hop)
            message = self._codec.from_envelope(envelope, parked.queue, any_age=True, stored=stored)
            if message.key != (parked.id, parked.generation, parked.hop):
                raise Damaged(f"its message is that of task {message.id}")
        except (CodecError, Damaged) as error:
            logger.error("task %s is not woken, it waits for its time: %s", parked.id, error)
            return None
        return message

    # -- workers -----------------------------------------------------------------------------

    def park(self, run: ParkedRun, message: TaskMessage) -> bool:
        """Write the row of a run that waits. True if it is to wake at once.

        * `run`: without its message. `message`: of its next hop.

        Its outcome is recorded. Crash window: if the worker dies before the row is written, the
        redelivery repeats the settlement, and this with it.
        """
        results, store = self._results()
        stored = place_of(run.id, run.generation, run.hop)
        envelope = self._codec.to_envelope(replace(message, delivery_base=0), stored=stored)
        now = store.now()
        due = (min(run.due, now) if run.children else run.due) + LATE_SECONDS
        store.park(replace(run, payload=payload_of(envelope)), due)
        self.parks = True
        hit("parked")
        if not run.children and not any(run.waits_for(name) for name in _names(run)):
            return False
        return self._is_wanted(results, run, store.read(run.id))

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
        rows = list(found.dropped) if dead else [each.row for each in found.signals]
        if found.parked is not None and found.parked.row is not None:
            rows.append(found.parked.row)
        if rows:
            store.remove(rows)

    def child_ended(self, task_id: str, child: str) -> None:
        """Wake a task if it waits for the end of this child, whose outcome is recorded."""
        store = self.store
        parked = store.read(task_id).parked if store is not None else None
        if parked is not None and child in parked.children:
            self.send(parked)

    def now(self) -> float:
        """The time of the result store, UTC epoch seconds."""
        return self._results()[1].now()

    def _is_wanted(self, results: ResultStore, run: ParkedRun, found: TaskWaits) -> bool:
        if any(run.waits_for(signal.name) for signal in found.signals):
            return True
        records = (_record(results, child) for child in run.children)
        return any(record is not None and record.state.final for record in records)

    # -- housekeeping ------------------------------------------------------------------------

    def repair(self) -> int:
        """Wake the tasks whose signallers have died, or may not send; returns how many rows it saw.

        A task that fails is looked at again later, and does not stop the others.
        """
        store = self.store
        if store is None:
            return 0
        results, _ = self._results()
        rows = store.due(PAGE)
        for task_id in dict.fromkeys(map(store.task_of, rows)):
            mine = [row for row in rows if store.task_of(row) == task_id]
            try:
                if task_id is None:
                    logger.error("%d signals are damaged or not signed, and dropped", len(mine))
                    store.remove(mine)
                else:
                    self._repair(results, store, task_id)
            except ForeignId:
                store.remove(mine)
            except (AztaskError, ValueError) as error:
                logger.warning("task %s is woken later: %s", task_id, error)
        return len(rows)

    def _repair(self, results: ResultStore, store: WaitStore, task_id: str) -> None:
        record, found = results.get(task_id), store.read(task_id)
        if record is None or (record.state.final and not _parks(record)):
            dead = record is not None and _is_dead(record)
            self.ended(task_id, dead=dead)
            if dead:
                self._keep(store, found)
            return
        run, now = found.parked, store.now()
        waits = run is not None and _parked_at(record, run)
        sent = False
        if (
            run is not None
            and waits
            and (
                now >= run.due + LATE_SECONDS
                or self._is_wanted(results, run, found)
                or record.state.final  # it was cancelled
            )
        ):
            sent = self.send(run)
        if run is not None and run.row is not None:
            late = max(LATE_SECONDS, now - run.due) if sent or run.children else LATE_SECONDS
            again = now + late if run.children or now >= run.due else run.due + LATE_SECONDS
            store.look_again(run.row, again if waits else now + KEPT_SECONDS)
        self._keep(store, found, now + LATE_SECONDS if sent else now + KEPT_SECONDS)

    def _keep(self, store: WaitStore, found: TaskWaits, due: float | None = None) -> None:
        """Signals that no wait has taken: look at them later."""
        for signal in found.signals:
            if signal.row.values["due"] <= store.now():
                store.look_again(signal.row, due or store.now() + KEPT_SECONDS)


def place_of(task_id: str, generation: int, hop: int) -> str:
    """Where the message that wakes a task is stored, as its signature says."""
    return f"wait of task {task_id}, generation {generation}, hop {hop}"


def check_name(name: object) -> None:
    """Raise SignalRefused for what no wait could ask for."""
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARACTERS:
        raise SignalRefused(
            f"a signal's name is a text of 1 to {NAME_CHARACTERS} characters, not {name!r}"
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
    return SIGNED in envelope_of(run.payload).content_type


def _names(run: ParkedRun) -> Sequence[str]:
    return [name for wait in run.waits for name in wait.names]


def _record(results: ResultStore, task_id: str) -> RunRecord | None:
    try:
        return results.get(task_id)
    except ForeignId:
        return None
