"""Keys of unique tasks: freed at their start or end; taken for the members of workflows.

Rules
1. A worker none of whose tasks is unique does nothing here, not even a look at a message.
2. A key is freed after the outcome is recorded and before the message is settled. A worker that
   dies in between leaves the message: its redelivery finds the outcome, and frees the key again.
3. The tasks of workflows take their keys here, too: see `WorkflowKeys`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from aztask.app import App
from aztask.errors import CodecError
from aztask.message.payload import stored_in
from aztask.queues.delivery import Position
from aztask.settlement import Complete, DeadLetter
from aztask.stores.payloads.holders import result_owner
from aztask.stores.payloads.store import PayloadKind
from aztask.stores.records.base import Outcome, RunRecord, State
from aztask.stores.records.uniques import uniques_of
from aztask.support import chance
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.failpoint import hit
from aztask.task import Task
from aztask.uniqueness.engine import Blocked, UniqueEngine
from aztask.uniqueness.rules import QUIET, STARTED, UniqueRules, key_of
from aztask.worker.pipeline.settling import UNDONE, text_of
from aztask.worker.pipeline.work import PutOff, Stage, WorkItem, message_of
from aztask.workflows.inputs import first_argument


class UniqueKeys:
    """The keys of one worker's tasks. Any thread may call."""

    def __init__(self, app: App, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = unique_engine(app)
        self._members = None if self._engine is None else WorkflowKeys(app, self._engine, clock)

    def prepare(self, items: Sequence[WorkItem]) -> None:
        """Take the keys of unique tasks of workflows. Raises BrokerUnavailable: call it again."""
        if self._members is not None:
            self._members.prepare(items)

    def started(self, items: Sequence[WorkItem]) -> None:
        """Free the keys of tasks that are about to start. Raises BrokerUnavailable."""
        if self._engine is not None:
            for item in items:
                if item.stage is not Stage.READY:
                    continue
                if item.unique and item.task is not None and item.task.unique is not None:
                    if item.task.unique.until == STARTED:
                        self._engine.free(item.unique, message_of(item))
                elif message_of(item).extra:
                    self._engine.started(message_of(item))

    def ended(self, items: Sequence[WorkItem]) -> None:
        """Free the keys of tasks that have ended for good, before they are settled.

        Raises BrokerUnavailable: nothing is settled, and it is tried again.
        """
        if self._engine is not None:
            for item in items:
                if not _has_ended(item):
                    continue
                if item.unique:
                    if item.task is not None and item.task.unique and item.task.unique.until:
                        self._engine.free(item.unique, message_of(item))
                elif message_of(item).extra:
                    self._engine.ended(message_of(item))


def _has_ended(item: WorkItem) -> bool:
    decided = item.decided
    if decided is None or item.opened is None:
        return False
    outcome = decided.outcome
    ended = outcome is not None and outcome.state.final
    return ended or isinstance(decided.settlement, DeadLetter)


def unique_engine(app: App) -> UniqueEngine | None:
    """The engine of an app that has unique tasks and a store for them; else None."""
    results = app.results
    store = uniques_of(results)
    if results is None or store is None or not any(task.unique for task in app.tasks.values()):
        return None
    return UniqueEngine(results, store, app.codec, lambda: app.broker, app.tasks)


# -- workflowkeys ----------------------------------------------------------------------------
#
# Unique tasks in workflows: a worker takes the key of a member when it is about to start it.
#
# Rules
# 1. The first argument of a member may be the value of another task, so its sender cannot make the
#    key. The worker makes it before it owns the start row. This holds for the first tasks of a
#    workflow, for those that follow, and for those that housekeeping sends.
# 2. If another task holds the key, `on_conflict` decides. Every answer ends the member with a
#    recorded outcome, so its bit is set:
#
# * "return": the member waits in its queue until that task has ended, and adopts its outcome. *
# "drop": the member is cancelled. * "raise": the member fails. Its dead letter can be replayed,
# which resumes the workflow. * "replace": a task that waits is cancelled, and the member runs. If
# it runs already, the member fails.
# 3. A member that waits carries the name of that task in a header (`ADOPTS`), so that it finds the
#    outcome when the key is free or has another holder. After the life of that holder, or if
#    nothing is known of that task any longer, the member takes the key itself.
# 4. A retry of a member runs in any case: its first run has passed this.
# 5. A debounced task has no quiet time in a workflow, since no later call replaces its arguments.
#
# Crash windows. The key is held by compare on (task id, generation). A worker that dies with the
# key leaves the message, whose redelivery finds that it holds the key. If the worker dies in
# "replace" between the key and the cancellation, both tasks run. If it dies between the copy of a
# large result and the record, the copy is left, which retention removes. A key that was not freed
# is free because its holder's end is recorded.


ADOPTS: Final = "aztask-adopts"
"""The header of a member that waits: its generation, until when it waits, and the task whose
outcome it adopts, with colons between. A replay is of another generation, and begins anew."""

NOT_UNIQUE: Final = "NotUnique"
UNIQUE_KEY: Final = "unique-key"
UNIQUE_FAILED: Final = "unique-failed"
FIRST_WAIT: Final = 1.0
LONGEST_WAIT: Final = 30.0
"""Seconds for which a member waits until it looks again, at first and at most."""

REMEMBERED: Final = 10_000


@dataclass(frozen=True, slots=True)
class _Adoption:
    """The task whose outcome a member adopts, and until when (UTC epoch seconds) it waits.

    `generation`: that of the member.
    """

    generation: int
    until: float
    task_id: str

    def __str__(self) -> str:
        return f"{self.generation}:{self.until!r}:{self.task_id}"

    @classmethod
    def read(cls, text: object) -> _Adoption | None:
        """The adoption in a header; None for anything else."""
        try:
            generation, until, task_id = str(text).split(":", 2)
            return cls(int(generation), float(until), task_id)
        except ValueError:
            return None


class WorkflowKeys:
    """Takes the keys of members, and decides conflicts. Any thread may call."""

    def __init__(self, app: App, engine: UniqueEngine, clock: Clock) -> None:
        self._app = app
        self._engine = engine
        self._clock = clock
        self._kept: OrderedDict[tuple[str, Position], _Adoption] = OrderedDict()

    def prepare(self, items: Sequence[WorkItem]) -> None:
        """Take keys, or note what happens instead of a run: `WorkItem.put_off` or `.instead`.

        Raises BrokerUnavailable; calling again is harmless.
        """
        for item in items:
            task = item.task
            if item.place is None or task is None or task.unique is None or not self._runs(item):
                continue
            if task.unique.until == QUIET:
                continue
            item.instead = None
            try:
                key = self._key(item, task, task.unique)
            except UNDONE:
                raise
            except Exception as error:  # noqa: BLE001  # the function for the key is the user's
                item.instead = self._failed(UNIQUE_KEY, UNIQUE_KEY, text_of(error))
                continue
            if message_of(item).hop:
                item.unique = key
            else:
                self._admit(item, task.unique, key)

    def _runs(self, item: WorkItem) -> bool:
        """Whether nothing else is known that keeps it from its run."""
        expires = message_of(item).expires
        return (
            item.stage is Stage.RECEIVED
            and item.waits is None
            and not item.settled
            and not item.dropped
            and item.refusal is None
            and (expires is None or self._clock.wall() < expires)
        )

    def _key(self, item: WorkItem, task: Task[..., Any], rules: UniqueRules) -> str:
        message = message_of(item)
        if self._app.payloads is not None:
            message = self._app.payloads.filled(message)
        args, kwargs = task.arguments(self._app.codec, message)
        if item.input is not None:
            args = (first_argument(self._app.codec, *item.input.packet()), *args)
        return key_of(self._app.codec, task, rules, args, kwargs)

    def _admit(self, item: WorkItem, rules: UniqueRules, key: str) -> None:
        """Take the key, or decide the conflict."""
        engine, message = self._engine, message_of(item)
        adoption = self._adoption(item)
        if adoption is not None:
            record = engine.results.get(adoption.task_id)
            if record is not None and record.state.final:
                item.instead = self._adopted(message.id, adoption.task_id, record)
                return
            if record is not None and engine.store.now() < adoption.until:
                self._wait(item, adoption)
                return
        answer = engine.admit(rules, key, message)
        if isinstance(answer, Blocked):
            engine.complete(answer)
            if rules.on_conflict == "replace":
                take = partial(engine.admit, rules, key, message)
                answer = engine.replace(answer, take)
        if not isinstance(answer, Blocked):
            item.unique = key
        elif rules.on_conflict == "return":
            self._follow(item, answer)
        else:
            item.instead = self._refused(rules, message.task, answer.claim.task_id)

    def _follow(self, item: WorkItem, blocked: Blocked) -> None:
        """Adopt the outcome of the holder if it has one; otherwise wait for it."""
        holder = blocked.claim.task_id
        record = self._engine.results.get(holder)
        if record is not None and record.state.final:
            item.instead = self._adopted(message_of(item).id, holder, record)
        else:
            generation = message_of(item).generation
            self._wait(item, _Adoption(generation, blocked.claim.ends_at, holder))

    # -- waiting -----------------------------------------------------------------------------

    def _adoption(self, item: WorkItem) -> _Adoption | None:
        message = message_of(item)
        kept = self._kept.pop((item.queue, item.delivery.position), None)
        found = kept or _Adoption.read(message.extra.get(ADOPTS))
        return found if found is not None and found.generation == message.generation else None

    def _wait(self, item: WorkItem, adoption: _Adoption) -> None:
        message = message_of(item)
        longest = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(message.times_put_off, 16))
        delay = longest * chance.uniform(0.5, 1.0)
        item.rewrite(extra={**message.extra, ADOPTS: str(adoption)})
        if item.in_order:  # the message itself does not change
            self._kept[item.queue, item.delivery.position] = adoption
            if len(self._kept) > REMEMBERED:
                self._kept.popitem(last=False)
        item.waits = PutOff(delay, f"task {adoption.task_id} holds its key")

    # -- outcomes ----------------------------------------------------------------------------

    def _adopted(self, member: str, task_id: str, record: RunRecord) -> Outcome:
        """The outcome of another task as that of the member; a damaged one is a failure."""
        outcome = record.outcome
        if record.state in (State.CANCELLED, State.EXPIRED):  # perhaps its message is still queued
            text = f"{record.state.value}, as is task {task_id}, which held its key"
            return Outcome(record.state, Complete(), error=text, at=self._clock.wall())
        if outcome is None or record.damage:
            text = record.damage or "nothing is known of its end"
            return self._failed(UNIQUE_FAILED, UNIQUE_FAILED, f"task {task_id}: {text}")
        if record.state is State.FAILED:
            text = f"task {task_id}, which held its key, failed: {outcome.error}"
            shown = (
                f"task {task_id}, which held its key, failed" if self._app.codec.encrypts else text
            )
            return self._failed(UNIQUE_FAILED, outcome.error_type, text, shown)
        try:
            value = self._own(member, outcome.value)
        except CodecError as error:  # it was removed, or it is damaged
            return self._failed(UNIQUE_FAILED, UNIQUE_FAILED, f"task {task_id}: {error}")
        return Outcome(State.SUCCEEDED, Complete(), value, at=self._clock.wall())

    def _own(self, member: str, value: bytes | None) -> bytes | None:
        """The same value; one that is stored apart is copied, because it ends with its task.

        Crash window: if the worker dies before the outcome is recorded, or if its batch is prepared
        again, a copy is left that no record names. Retention removes it by its age.
        """
        stored, payloads = stored_in(value), self._app.payloads
        if stored is None or payloads is None:
            return value
        copy = payloads.keep(PayloadKind.RESULT, payloads.load(stored), owner=result_owner(member))
        hit("copied")
        return self._app.codec.encode_value(copy)

    def _refused(self, rules: UniqueRules, task: str, holder: str) -> Outcome:
        if rules.on_conflict == "drop":
            text = f"dropped, since task {holder} holds its key"
            return Outcome(State.CANCELLED, Complete(), error=text, at=self._clock.wall())
        text = f"task {task} is unique, and task {holder} holds its key"
        return self._failed("not-unique", NOT_UNIQUE, text)

    def _failed(self, reason: str, error_type: str, text: str, shown: str = "") -> Outcome:
        """shown: what the dead letter says, if not the text."""
        dead = DeadLetter(reason, shown or text)
        return Outcome(State.FAILED, dead, None, error_type, text, at=self._clock.wall())
