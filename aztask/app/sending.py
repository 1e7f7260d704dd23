"""The sends of an app: routed to a queue, sent, and turned into results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from aztask.app.queues import DeclaredQueues
from aztask.app.tasks import DeclaredLimits
from aztask.context import current_context
from aztask.errors import AztaskError, NotUnique
from aztask.message.codec import Codec
from aztask.result import AsyncResult
from aztask.sending.asyncsend import AsyncSender
from aztask.sending.send import Sender
from aztask.steps.history import OpenStep
from aztask.steps.signals import TaskSignals
from aztask.stores.connections import Connections
from aztask.stores.events.event import Event
from aztask.task import Invocation, Task
from aztask.taskoptions import SendOptions


class Sends:
    """Sends the calls of one app, from threads and from coroutines.

    * `sender`: makes the messages and publishes them; `async_sender` does so for coroutines.
    * `on_sent`: called after each send while the app is inline, see `App.redirect`.
    """

    def __init__(
        self,
        connections: Connections,
        codec: Codec,
        queues: DeclaredQueues,
        tasks: Mapping[str, Task[..., Any]],
        limits: DeclaredLimits,
        sender: Sender,
    ) -> None:
        self._connections = connections
        self._codec = codec
        self._queues = queues
        self._tasks = tasks
        self._limits = limits
        self.sender = sender
        self.async_sender = AsyncSender(sender)
        self.signals = TaskSignals(connections, codec)
        self.on_sent: Callable[..., None] | None = None

    def send(
        self,
        name: str,
        task: Task[..., Any] | None,
        calls: Sequence[Invocation],
        options: SendOptions,
    ) -> list[AsyncResult[Any]]:
        """Send all calls as one batch. task: None for one that another program registers."""
        if (step := _step(options)) is not None:
            given = [cast("SendOptions", {**options, "task_id": step.next_id()}) for _ in calls]
            pairs = zip(calls, given, strict=True)
            return [each for call, own in pairs for each in self.send(name, task, (call,), own)]
        queue = self._queues.route(task, options)
        self._limits.check_costs(task, calls)
        sessions = self._queues.has_sessions(queue)
        ids = self.sender.send(name, task, queue, calls, options, sessions)
        if self.on_sent is not None:
            self.on_sent(name, queue, calls, ids, options)
        return self._results_of(ids)

    async def asend(
        self,
        name: str,
        task: Task[..., Any] | None,
        calls: Sequence[Invocation],
        options: SendOptions,
    ) -> list[AsyncResult[Any]]:
        """`send` for coroutines: it never blocks the event loop."""
        if self.on_sent is not None:  # inline: the tasks run where they are sent
            return await asyncio.to_thread(self.send, name, task, calls, options)
        if (step := _step(options)) is not None:
            given = [cast("SendOptions", {**options, "task_id": step.next_id()}) for _ in calls]
            pairs = zip(calls, given, strict=True)
            return [
                sent for call, own in pairs for sent in await self.asend(name, task, (call,), own)
            ]
        queue = self._queues.route(task, options)
        self._limits.check_costs(task, calls)
        sessions = self._queues.has_sessions(queue)
        steps = self.sender.steps(name, task, queue, calls, options, sessions)
        return self._results_of(await self.async_sender.send(queue, steps))

    def send_occurrence(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Mapping[str, Any],
        headers: Mapping[str, Any],
    ) -> None:
        """Send the task of an occurrence as any other task, with these headers."""
        queue, call = str(options["queue"]), Invocation(args, kwargs)
        known, sessions = self._tasks.get(name), self._queues.has_sessions(queue)
        if known is not None:
            call = Invocation(*known.conversion.peek(args, kwargs), (args, kwargs))
        given = cast("SendOptions", options)
        with suppress(NotUnique):  # another task of that key waits or runs: that is enough
            ids = self.sender.send(name, known, queue, (call,), given, sessions, headers)
            if self.on_sent is not None:
                self.on_sent(name, queue, (call,), ids, given)

    def route(self, task: Task[..., Any] | None, options: Mapping[str, Any]) -> str:
        """The queue of a send that is about to be made, see `DeclaredQueues.route`."""
        return self._queues.route(task, options)

    def report(self, event: Event) -> None:
        """Write an event that no message belongs to."""
        self.sender.events.report(event)

    def result(self, task_id: str) -> AsyncResult[Any]:
        """The `AsyncResult` of a task id. Asks no server."""
        return self._results_of([task_id])[0]

    def signal(self, task_id: str, name: str, value: Any) -> None:
        """Send a signal to a task; see `AsyncResult.signal`."""
        self.signals.signal(task_id, name, value)
        self._woken()

    def signal_all(self, task_ids: Iterable[str], name: str, value: Any) -> dict[str, AztaskError]:
        """Send one signal to each task; see `App.signal_all`."""
        refused = self.signals.signal_all(task_ids, name, value)
        self._woken()
        return refused

    def wake(self, task_id: str) -> None:
        """Wake a task that waits, so that it finds out that it was cancelled."""
        if self.signals.wake(task_id):
            self._woken()

    def _woken(self) -> None:
        if self.on_sent is not None:  # inline: the task runs now
            self.on_sent("", "", (), (), {})

    def close(self) -> None:
        """End the threads and close the event file. Sending again opens them again."""
        self.async_sender.close()
        self.sender.close()

    def _results_of(self, ids: Sequence[str]) -> list[AsyncResult[Any]]:
        results, decode = self._connections.results, self._codec.decode_value
        tasks, codec = self._tasks, self._codec
        return [AsyncResult(task_id, results, decode, tasks, codec, self) for task_id in ids]


def _step(options: SendOptions) -> OpenStep | None:
    """The step of a task that sends now, unless the send has an id of its own.

    Its sends get ids that derive from the step: if the step runs again, it sends nothing twice.
    """
    context = current_context()
    return None if context is None or options.get("task_id") else context.steps.current
