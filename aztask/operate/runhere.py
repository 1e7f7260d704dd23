"""Running one task here and now: in this process, without a message, a lease or a worker.

Rules
1. Nothing is recorded and nothing is settled: a message whose arguments are used stays where it is,
   with its state, its counts and its outcome.
2. The task's code is the real one. What it sends is sent, and what it writes is written.
3. Lifespans and the hooks around a run are open, as in a pool process. Steps are not recorded, and
   checkpoints stay in the context.
4. A generator runs to its end, as in a worker: each value that it yields is emitted.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import traceback
from collections.abc import Coroutine
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from typing import Any

from aztask.app import App
from aztask.context import set_current_context, unsent_context
from aztask.errors import AztaskError, CodecError, NotFound, UnknownTask, did_you_mean
from aztask.message.message import TaskMessage
from aztask.operate.deadletters import DeadLetters, Selection
from aztask.operate.queues import LeftOut, all_queues, waiting
from aztask.steps.emitting import MemoryEmission, part_data
from aztask.steps.suspension import Suspension
from aztask.stores.records.damage import Damaged
from aztask.stores.records.workflows import workflows_of
from aztask.support.display import visible
from aztask.task import Task
from aztask.worker.pool.attempt import PreparedCall, trim_traceback
from aztask.worker.pool.fetching import Fetching
from aztask.workflows.inputs import first_argument
from aztask.workflows.place import NodePlace
from aztask.workflows.plan import task_id_of


@dataclass(frozen=True, slots=True)
class LocalCall:
    """A call of a task, to be run here.

    * `found`: where its arguments come from, such as ``the dead letters of queue orders``; "" if
      they were given.
    * `task_id`, `queue`, `retries`, `session`: what the context says.
    * `saved`: the checkpoint that an earlier run has left, decoded.
    """

    task: Task[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    found: str = ""
    task_id: str | None = None
    queue: str | None = None
    retries: int = 0
    session: str | None = None
    saved: Any = None

    def typed(self) -> LocalCall:
        """The call with arguments of the types that the task annotates. Raises CodecError."""
        args, kwargs = self.task.conversion.read(self.args, self.kwargs)
        return replace(self, args=args, kwargs=kwargs)


def task_named(app: App, name: str) -> Task[..., Any]:
    """A task of the app. Raises UnknownTask."""
    task = app.tasks.get(name)
    if task is None:
        hint = did_you_mean(name, list(app.tasks))
        raise UnknownTask(f"the app has no task {name!r}.{hint} See: aztask tasks")
    return task


def call_of(app: App, task_id: str) -> LocalCall:
    """The call of a task whose message is still there.

    It is looked for in the dead letters, among the messages that wait, and in the workflow that the
    task belongs to. Reads the queues of the broker: of a Storage queue, only the first 32 messages
    can be searched. Raises NotFound, UnknownTask, CodecError and BrokerUnavailable.
    """
    message, found = _message_of(app, task_id)
    task = task_named(app, message.task)
    args, kwargs = Fetching(app, os.getpid()).arguments(task, message)
    place = NodePlace.read(message.node) if message.node is not None else None
    if message.workflow is not None and place is not None and place.takes is not None:
        try:
            given = app.workflows.engine.inputs.load(message.workflow, place)
        except Damaged as damage:
            raise NotFound(
                f"task {visible(task_id)} takes the value of the task before it in workflow "
                f"{visible(message.workflow)}, which cannot be read: {damage.reason}"
            ) from None
        if given is not None:
            args = (first_argument(app.codec, *given.packet()), *args)
    saved = None if message.saved is None else app.codec.decode_value(message.saved)
    return LocalCall(
        task, args, kwargs, found, message.id, message.queue, message.resubmit_count,
        message.session, saved,
    )  # fmt: skip


def _message_of(app: App, task_id: str) -> tuple[TaskMessage, str]:
    left_out = LeftOut()
    queues = all_queues(app, left_out)
    for queue in queues:
        with left_out.reading(queue):
            for letter in DeadLetters(app, queue).find(Selection(ids=frozenset({task_id}))):
                if letter.message is None:
                    raise CodecError(f"dead letter {visible(task_id)}: {letter.problem}")
                return letter.message, f"the dead letters of queue {queue}"
    for queue in queues:
        with left_out.reading(queue):
            for each in waiting(app, queue):
                if each.message is not None and each.message.id == task_id:
                    return each.message, f"queue {queue}"
    member = _member(app, task_id)
    if member is not None:
        return member, f"workflow {member.workflow}"
    known = app.results.get(task_id) if app.results is not None else None
    if known is not None:
        raise NotFound(
            f"the arguments of task {visible(task_id)} are no longer stored: its message is "
            "removed once it has ended. Give them: "
            f"aztask run {visible(known.task or 'TASK')} --args '[...]'"
        )
    raise NotFound(f"no dead letter, message or workflow here has task {visible(task_id)}")


def _member(app: App, task_id: str) -> TaskMessage | None:
    """The stored message of a task of a workflow; None if the id is not that of one."""
    workflow, _, number = task_id.rpartition(".")
    if not workflow or not (number.isascii() and number.isdecimal()) or len(number) > 7:
        return None
    if workflows_of(app.results) is None:
        return None
    engine, node = app.workflows.engine, int(number)
    try:
        root = engine.graphs.root(workflow)
        if root is None or task_id_of(workflow, node) != task_id:
            return None
        return engine.mailer.stored(workflow, root, node)
    except Damaged:
        return None


class RunStopped(AztaskError):
    """The run would go on later, as a step asks that failed; only a worker goes on with it."""


class LocalParts(MemoryEmission):
    """What a task emits that runs here. It refuses what a worker would refuse."""

    def __init__(self, app: App) -> None:
        super().__init__()
        self._codec = app.codec

    def emit(self, value: Any, branch: str = "") -> None:
        """Show the value, as the next part. Raises EncodeError."""
        part_data(self._codec, value)
        self.show(value)

    def show(self, value: Any) -> None:
        """Keep the value; a command prints it."""
        self.values.append(value)


def run_here(app: App, call: LocalCall, parts: LocalParts | None = None) -> Any:
    """Run the task in this thread, and return its value; raises what it raises.

    A coroutine runs on an event loop of this thread. `Context.sleep` returns at once. Raises
    RunStopped for a step that its own retry policy would run again later.

    * `parts`: gets what the task emits. A coroutine emits from another thread.
    """
    with asyncio.Runner() as runner:

        def complete(coroutine: Coroutine[Any, Any, Any]) -> Any:
            return runner.run(coroutine, context=copy_context())

        lifespans = app.hooks.lifespan.open(complete)
        try:
            return copy_context().run(_run, app, call, parts or LocalParts(app), complete)
        except Suspension as stopped:
            raise RunStopped(
                f"task {call.task.name} has stopped, to go on later: {stopped}; only a worker goes "
                "on with it"
            ) from stopped
        finally:
            lifespans.close()


def traceback_of(error: Exception) -> str:
    """The traceback of a task's error, from the first frame of the task's own code on."""
    trim_traceback(error)
    return "".join(traceback.format_exception(error))


def _run(app: App, call: LocalCall, parts: LocalParts, complete: Any) -> Any:
    context = unsent_context(
        task=call.task.name,
        queue=call.queue or app.queue_for(call.task, {}),
        task_id=call.task_id,
        saved=call.saved,
        resubmit_count=call.retries,
        session=call.session,
    )
    context.emission = parts
    set_current_context(context)
    hook = app.hooks.run
    with hook.around(context) if hook else nullcontext(), context.steps:
        value = PreparedCall(call.task, context, call.args, call.kwargs).begin()
        return complete(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value
