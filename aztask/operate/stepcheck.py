"""Calls open tasks with their recorded steps and the code that is here: ``aztask steps --check``.

Rules
1. A task is called in a child process, up to the first step or wait that is not recorded. No
   function of a step runs; nothing is recorded, sent or settled.
2. The lines between steps run. So the child has no network: Python's sockets refuse but for a
   pair within the process, and where Linux allows it, the process has a network of its own
   without a way out. Files are not guarded.
3. A task that does not come to its next step in time ends the child. The next task gets a new one.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any, Final, NoReturn

import msgpack

from aztask.app import App
from aztask.app.loading import load_app
from aztask.context import Context, TaskLease, set_current_context
from aztask.errors import (
    AztaskError,
    BrokerUnavailable,
    CodecError,
    ConfigurationError,
    ForeignId,
    did_you_mean,
)
from aztask.message.codec import Codec
from aztask.message.encryption import Locked
from aztask.message.message import HISTORY, TaskMessage
from aztask.operate.action import results_of
from aztask.session import MemoryState, Session
from aztask.steps.engine import RunSteps
from aztask.steps.history import IN_ORDER, Branch, OpenStep, RunHistory
from aztask.steps.home import LONGEST_WAIT, StepHome
from aztask.steps.keepers import Place
from aztask.steps.records import (
    DONE,
    FAILED,
    ORDER,
    PATCH,
    StepRecord,
    history_of,
    read_record,
)
from aztask.steps.suspension import OrderChanged, Suspension
from aztask.steps.waits import Signal
from aztask.stores.records.base import ResultStore, RunRecord
from aztask.support.display import one_line, safe_str
from aztask.support.parts import Part
from aztask.worker.pool.fetching import Fetching

FITS: Final = "fits"
CHANGED: Final = "changed"
FAILS: Final = "fails"
LATE: Final = "late"
UNCHECKED: Final = "not checked"

IMPORT_SECONDS: Final = 60.0
PATIENCE: Final = 30.0
"""Seconds for each task to come to its next step."""
PAGE: Final = 500
AT_ONCE: Final = 256
"""Tasks that are looked up at once."""
WATCHDOG: Final = Part("check of steps")
MOST_STEPS: Final = 1_000_000
TEXT_CHARACTERS: Final = 500
_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000


@dataclass(frozen=True, slots=True)
class CheckedTask:
    """What the code that is here makes of an open task.

    * `end`: `FITS`, `CHANGED` (it asks for other steps), `FAILS`, `LATE` or `UNCHECKED`.
    * `text`: the step that it comes to, or the reason.
    """

    task_id: str
    task: str
    end: str
    text: str

    @property
    def bad(self) -> bool:
        """True if the code does not go on where the task is."""
        return self.end not in (FITS, UNCHECKED)


@dataclass(frozen=True, slots=True)
class OpenTask:
    """A task that has recorded steps and has not ended.

    * `call`: for the child; see `_packed`. Without one, `end` and `text` are those of its check.
    """

    task_id: str
    task: str
    call: bytes = b""
    end: str = UNCHECKED
    text: str = ""


def _records(
    results: ResultStore, task_ids: Iterator[str]
) -> Iterator[tuple[str, RunRecord | ForeignId | None]]:
    """The latest runs of these tasks, some hundred at a time."""
    while some := list(islice(task_ids, AT_ONCE)):
        yield from zip(some, results.get_many(some), strict=True)


def open_tasks(app: App, limit: int) -> list[OpenTask]:
    """The tasks that have recorded steps and have not ended, at most so many.

    Reads all histories, and the messages of queues whose tasks do not wait. Raises
    ConfigurationError without a result store, BrokerUnavailable.
    """
    results, store, messages = results_of(app), StepHome(app).store(), _Messages(app)
    found: list[OpenTask] = []
    rows = store.old(store.now() + 3600.0)
    ids = (task_id for task_id, _ in groupby(rows, key=lambda row: row.place.partition))
    for task_id, record in _records(results, ids):
        try:
            if isinstance(record, ForeignId):
                raise record
            if record is not None and record.damage:
                found.append(OpenTask(task_id, "", text=f"its row is damaged: {record.damage}"))
            elif record is not None and not record.state.final:
                found.append(_open_task(app, record, messages.of(record)))
        except AztaskError as error:  # of this task alone: its steps, its message, its queue
            if isinstance(error, BrokerUnavailable) and not isinstance(error, Locked):
                raise
            found.append(OpenTask(task_id, "", text=str(error)))
        if len(found) >= limit:
            break
    return found


def _open_task(app: App, record: RunRecord, message: TaskMessage | None) -> OpenTask:
    task_id, name = record.key.task_id, record.task
    if message is None:
        return OpenTask(task_id, name, text="no message of it is to be seen: it runs, or waits")
    if message.node is not None:
        return OpenTask(task_id, name, text="it belongs to a workflow")
    task = app.tasks.get(name)
    if task is None:
        hint = did_you_mean(name, tuple(app.tasks))
        return OpenTask(task_id, name, end=CHANGED, text=f"the app has no such task.{hint}")
    args, kwargs = Fetching(app, 0).arguments(task, message)
    plain, known = Codec(), StepHome(app).store().read(task_id, history_of(message))
    body, kind, encoding = plain.encode_arguments(args, kwargs)
    saved = None
    if message.saved:
        saved = plain.encode_value(app.codec.decode_value(message.saved))
    records = [_plain(app, plain, each).pack() for _, each in known]
    return OpenTask(task_id, name, _packed(message, (body, kind, encoding), saved, records))


def _plain(app: App, plain: Codec, record: StepRecord) -> StepRecord:
    """The record with its value in it: the child reaches no store."""
    if record.state not in (DONE, FAILED) or not record.value or record.kind not in IN_ORDER:
        return record
    return replace(record, value=plain.encode_value(app.codec.decode_value(record.value)))


def _packed(
    message: TaskMessage,
    body: tuple[bytes, str, str],
    saved: bytes | None,
    records: Sequence[bytes],
) -> bytes:
    """What the child needs; `_unpacked` reads it."""
    place = (message.id, message.task, message.queue, *body)
    counts = (message.resubmit_count, message.snooze_count, message.hop, message.generation)
    more = (message.session, saved, history_of(message))
    packed: bytes = msgpack.packb([place, counts, more, records])
    return packed


def _unpacked(data: bytes) -> tuple[TaskMessage, list[StepRecord]]:
    place, counts, (session, saved, history), records = msgpack.unpackb(data)
    task_id, name, queue, body, kind, encoding = place
    message = TaskMessage(
        task_id,
        name,
        queue,
        body,
        kind,
        encoding,
        resubmit_count=counts[0],
        snooze_count=counts[1],
        hop=counts[2],
        generation=counts[3],
        session=session,
        saved=saved,
        extra={HISTORY: history},
    )
    return message, [read_record(each) for each in records]


class _Messages:
    """Finds the messages of open tasks: with their waits, else in their queues."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._queues: dict[str, dict[str, TaskMessage]] = {}

    def of(self, record: RunRecord) -> TaskMessage | None:
        """The message of the task's next run; None if it is not to be seen."""
        signals = self._app.sends.signals
        parked = signals.store.parked(record.key.task_id) if signals.store is not None else None
        if parked is not None and record.outcome is not None and record.outcome.parked:
            return signals.message(parked)
        queue = record.queue
        if queue not in self._queues:
            self._queues[queue] = dict(self._peeked(queue))
        return self._queues[queue].get(record.key.task_id)

    def _peeked(self, queue: str) -> Iterator[tuple[str, TaskMessage]]:
        broker, codec = self._app.broker, self._app.codec
        found = broker.peek(queue, limit=PAGE)
        while found:
            for each in found:
                try:
                    message = codec.from_envelope(each.envelope, queue, any_age=True)
                except CodecError:
                    continue
                yield message.id, message
            if not broker.capabilities.paged_peek:
                break
            found = broker.peek(queue, after=found[-1].position, limit=PAGE)


# -- the parent ------------------------------------------------------------------------------


def check(spec: str, tasks: Sequence[OpenTask]) -> Iterator[CheckedTask]:
    """Call these tasks in child processes, one after the other.

    * `spec`: the app, as ``module:app``.

    Raises ConfigurationError if a child cannot import it.
    """
    left = [each for each in tasks if each.call]
    yield from (
        CheckedTask(each.task_id, each.task, each.end, each.text) for each in tasks if not each.call
    )
    while left:
        answers = _child(spec, left)
        if (ready := next(answers, None)) is None:
            raise ConfigurationError(
                f"{spec} cannot be imported: it took longer than {IMPORT_SECONDS:g} s, or ended its"
                " process"
            )
        if ready[0]:
            raise ConfigurationError(f"{spec} cannot be imported: {ready[0]}")
        for end, text in answers:
            task = left.pop(0)
            yield CheckedTask(task.task_id, task.task, end, text)
        if left:
            task = left.pop(0)
            why = f"it came to no step within {PATIENCE:g} s, or ended its process"
            yield CheckedTask(task.task_id, task.task, LATE, why)


def _child(spec: str, tasks: Sequence[OpenTask]) -> Iterator[list[str]]:
    """The answers of one child: of its import, then one for each task that it comes to."""
    command = [sys.executable, "-m", "aztask.operate.stepcheck", spec]
    with subprocess.Popen(  # noqa: S603  # our own command, without a shell
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None and process.stdout is not None  # noqa: S101  # as asked
        try:
            process.stdin.write(msgpack.packb([each.call for each in tasks]))
            process.stdin.close()
            patience = IMPORT_SECONDS
            while line := _line(process, process.stdout, patience):
                yield json.loads(line)
                patience = PATIENCE
        except BrokenPipeError:
            return
        finally:
            process.kill()


def _line(process: subprocess.Popen[bytes], answers: Any, patience: float) -> bytes:
    """The next line; nothing if the child does not answer within so many seconds."""
    alarm = WATCHDOG.alarm(patience, process.kill)
    try:
        line: bytes = answers.readline()
        return line
    finally:
        alarm.cancel()


# -- the child -------------------------------------------------------------------------------


class _Reached(Suspension):
    """The task has come to a step that is not recorded: it fits so far."""

    def __init__(self, what: str) -> None:
        super().__init__(f"it goes on with {what}")


class _Recorded:
    """The recorded steps, for a run that records none: a `StepKeeper`."""

    remote = False
    parks = True

    def __init__(self, records: list[StepRecord]) -> None:
        self._records = records
        self._codec = Codec()

    def now(self) -> float:
        """The time of this machine."""
        return time.time()

    def read(self) -> list[StepRecord]:
        """As they were when the check began."""
        return self._records

    def write(self, record: StepRecord) -> StepRecord:
        """End the run: what it would record comes next."""
        if record.kind in (ORDER, PATCH):
            return record
        raise _Reached(record.label)

    def renew(self, args: tuple[Any, ...], kwargs: dict[str, Any], taken: Collection[str]) -> None:
        """End the run: a new history would begin."""
        raise _Reached("other arguments")

    def forget_former(self) -> None:
        """No history is removed by a check."""

    def drop(self, place: Place) -> None:
        """No step is removed by a check."""

    def encode(self, value: Any) -> bytes:
        """As a worker without keys."""
        return self._codec.encode_value(value)

    def kept(self, data: bytes) -> bytes:
        """They stay where they are."""
        return data

    def decode(self, data: bytes) -> Any:
        """The value as a later run would get it."""
        return self._codec.decode_value(data)


class _Nothing:
    """No signal comes, and no child ends: an `Outside`."""

    def signals(self, names: Collection[str], taken: Collection[str]) -> list[Signal]:
        """No signal is there, so that the task waits."""
        return []

    def take(self, signal: Signal) -> None:
        """There is none to take."""

    def forget(self, taken: Collection[str]) -> None:
        """There is none to forget."""

    def child(self, task_id: str) -> RunRecord | None:
        """The child counts as one that has not ended."""


class _Replay(RunHistory):
    """A history whose unrecorded steps end the run."""

    def begin(self, branch: Branch, name: str, key: str | None) -> StepRecord | OpenStep:
        """The recorded step. Raises _Reached for another one, OrderChanged."""
        found = super().begin(branch, name, key)
        if isinstance(found, OpenStep):
            raise _Reached(f"step {found.record.label}")
        return found

    def unasked(self) -> list[str]:
        """The recorded steps for which the run has not asked."""
        known = self._load().values()
        return [
            each.label for each in known if each.kind in IN_ORDER and each.place not in self._asked
        ]


class _ReplayHome:
    """Gives the history of one task."""

    def __init__(self, history: _Replay) -> None:
        self._history = history

    def history(self, message: TaskMessage) -> RunHistory:
        """The history that was recorded, for every message."""
        return self._history


def replayed(app: App, message: TaskMessage, records: list[StepRecord]) -> tuple[str, str]:
    """Call a task with its recorded steps; returns the end and the text of a `CheckedTask`."""
    task = app.tasks.get(message.task)
    if task is None:
        return CHANGED, "the app has no such task"
    history = _Replay(_Recorded(records), _Nothing(), message, MOST_STEPS, LONGEST_WAIT * 1000)
    lease, plain = TaskLease.for_testing(86400.0), Codec()
    session = None
    if message.session is not None:
        session = Session(message.session, MemoryState())
    context = Context(
        message,
        delivery_count=1,
        lease=lease,
        saved=plain.decode_value(message.saved) if message.saved else None,
        save=lambda _: None,
        session=session,
        steps=RunSteps(_ReplayHome(history), message, lease),
    )
    set_current_context(context)
    try:
        args, kwargs = task.conversion.read(*plain.decode_arguments(message))
        task.check_arguments(args, kwargs)
        with context.steps:
            _drain(task.call(context, args, kwargs))
    except OrderChanged as changed:
        return CHANGED, str(changed)
    except Suspension as suspension:
        return FITS, str(suspension)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # the user's code
        return FAILS, f"{type(error).__name__}: {safe_str(error, TEXT_CHARACTERS)}"
    finally:
        set_current_context(None)
    if unasked := history.unasked():
        return CHANGED, f"it returns without step {unasked[0]}, which is recorded"
    return FITS, "it returns"


def _drain(value: Any) -> None:
    """Run what a function has returned to its end: a coroutine or a generator."""
    if inspect.isgenerator(value):
        for _ in value:
            pass
    elif inspect.isasyncgen(value):

        async def drained() -> None:
            async for _ in value:
                pass

        asyncio.run(drained())
    elif inspect.iscoroutine(value):
        asyncio.run(value)


def _refuse(*_: object, **__: object) -> NoReturn:
    raise OSError("aztask steps --check has no network; make this call in a step")


class _Network(threading.local):
    """Refuses what Python's sockets are asked, but for a pair of sockets of this process.

    Where a system has no such pairs, as Windows, a pair is a connection over the loopback. An event
    loop makes one, so no coroutine would run without it.
    """

    pairing = False

    def end(self) -> None:
        for owner, names in (
            (socket.socket, ("connect", "connect_ex", "sendto", "sendmsg")),
            (socket, ("getaddrinfo",)),
        ):
            for name in names:
                if hasattr(owner, name):
                    setattr(owner, name, self._refusing(getattr(owner, name)))
        pair = socket.socketpair

        def socketpair(*args: Any, **kwargs: Any) -> tuple[socket.socket, socket.socket]:
            self.pairing = True
            try:
                return pair(*args, **kwargs)
            finally:
                self.pairing = False

        socket.socketpair = socketpair

    def _refusing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs) if self.pairing else _refuse()

        return asked


def _end_network() -> None:
    """Leave this process without a network, before it has a thread (rule 2)."""
    _Network().end()
    if sys.platform == "win32":  # its event loop connects without `socket.connect`
        for name in ("connect", "sendto"):
            setattr(asyncio.IocpProactor, name, _refuse)
    if platform.system() == "Linux":
        ctypes.CDLL(None).unshare(_CLONE_NEWUSER | _CLONE_NEWNET)


def main() -> None:
    """The child: reads calls, and writes a line for its import and for each call."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tasks print is no answer

    def answer(*texts: str) -> None:
        answers.write(json.dumps([one_line(text, TEXT_CHARACTERS) for text in texts]) + "\n")
        answers.flush()

    calls = msgpack.unpackb(sys.stdin.buffer.read())
    _end_network()
    try:
        app = load_app(sys.argv[1])
    except Exception as error:  # noqa: BLE001  # the user's module
        answer(str(error) or type(error).__name__)
        return
    answer("")
    for call in calls:
        answer(*replayed(app, *_unpacked(call)))
    answers.close()
    os._exit(0)  # threads of the user's module may wait without end


if __name__ == "__main__":
    main()
