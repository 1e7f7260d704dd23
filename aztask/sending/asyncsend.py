"""Sends from coroutines: those under way at the same time share batches, and a few threads.

Rules
1. No call has a thread of its own. One thread at a time sends for a queue, and takes all calls that
   have arrived since its last batch: a thousand concurrent calls are a handful of requests.
2. A call fails alone. If a batch is refused for what is in it, its calls are sent one by one; if a
   part of it is not confirmed, only the calls of that part raise SendUnconfirmed. If the broker is
   unavailable, all calls of the batch raise that error: one after the other, each would wait until
   its own timeout.
3. Hooks and the lookup of the sending task run with the context variables of the caller.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

from aztask.errors import (
    BrokerUnavailable,
    InvalidQueueName,
    QueueNotFound,
    SendUnconfirmed,
)
from aztask.sending.publisher import Publication
from aztask.sending.send import BATCH, Sender
from aztask.support.threadpool import ThreadPool

THREADS: Final = 4
"""Queues for which one process sends at the same time; each has one thread at a time."""


class SendCall:
    """One call: its steps, and the coroutine that waits for it."""

    def __init__(self, steps: Generator[Publication, None, list[str]]) -> None:
        """Called on the event loop of the coroutine."""
        self._steps = steps
        self._variables = contextvars.copy_context()
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[list[str]] = self._loop.create_future()
        self.due: Publication | None = None

    def advance(self, error: BaseException | None = None) -> bool:
        """Take the next step, after an error or a success; True if more is to be published."""
        self.due = None
        try:
            if error is not None:
                self.due = self._variables.run(self._steps.throw, error)
            else:
                self.due = self._variables.run(next, self._steps)
        except StopIteration as end:
            self._answer(self.future.set_result, end.value)
        except BaseException as problem:  # noqa: BLE001  # the coroutine raises it
            self._answer(self.future.set_exception, problem)
        return self.due is not None

    def fail(self, error: BaseException) -> None:
        """Have the coroutine raise this error, unless it has its answer."""
        self.due = None
        self._answer(self.future.set_exception, error)

    def _answer(self, settle: Callable[[Any], None], value: Any) -> None:
        def tell() -> None:
            if not self.future.done():  # else it was cancelled
                settle(value)

        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:  # the loop was closed: no coroutine waits
            self.future.cancel()


class AsyncSender:
    """Sends for coroutines, through the app's `Sender`. A forked child begins anew."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._forget()

    async def send(self, queue: str, steps: Generator[Publication, None, list[str]]) -> list[str]:
        """Carry out these steps of `Sender.steps`; returns the task ids.

        If the coroutine is cancelled, the messages may or may not be sent.
        """
        if self._pid != os.getpid():
            self._forget()
        call = SendCall(steps)
        with self._lock:
            self._waiting[queue].append(call)
            begin = queue not in self._busy
            self._busy.add(queue)
        if begin:
            self._threads.submit(lambda: self._send_all(queue))
        return await call.future

    def close(self) -> None:
        """End the threads, once what was begun is sent."""
        self._threads.close()
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._waiting: dict[str, list[SendCall]] = defaultdict(list)
        self._busy: set[str] = set()
        self._threads = ThreadPool("sending", THREADS)

    def _send_all(self, queue: str) -> None:
        """Send until no call waits for this queue."""
        begun: list[SendCall] = []
        while True:
            with self._lock:
                arrived = self._waiting.pop(queue, [])
                if not arrived and not begun:
                    self._busy.discard(queue)
                    return
            calls = [*begun, *arrived]
            try:
                ready = [*begun, *(call for call in arrived if call.advance())]
                begun = [call for batch in _batches(ready) for call in self._publish(batch)]
            except BaseException as error:  # noqa: BLE001  # a bug of ours must not stop the queue
                for call in calls:
                    call.fail(error)
                begun = []

    def _publish(self, calls: Sequence[SendCall]) -> list[SendCall]:
        """Publish for these calls, all at once; returns those that have more to publish."""
        due = [call.due for call in calls if call.due is not None]
        messages = [message for each in due for message in each.messages]
        error: BaseException | None = None
        try:
            self._sender.publish(due[0].queue, messages, due[0].delay)
        except SendUnconfirmed as unconfirmed:
            return [call for call in calls if call.advance(self._part(call, unconfirmed))]
        except (BrokerUnavailable, InvalidQueueName, QueueNotFound) as problem:
            error = problem
        except BaseException as problem:  # noqa: BLE001  # the coroutines raise it
            if len(calls) > 1:
                return [left for call in calls for left in self._publish([call])]
            error = problem
        return [call for call in calls if call.advance(error)]

    def _part(self, call: SendCall, error: SendUnconfirmed) -> SendUnconfirmed | None:
        """The error for the messages of this call; None if all of them are stored."""
        ids = self._sender.message_ids(call.due.messages) if call.due else set()
        own = [each for each in error.unconfirmed if each.message_id in ids]
        return SendUnconfirmed(str(error), own) if own else None


def _batches(calls: Sequence[SendCall]) -> list[list[SendCall]]:
    """Calls that can be published together: of equal delay, up to `BATCH` messages."""
    batches: list[list[SendCall]] = []
    open_batches: dict[float, tuple[list[SendCall], int]] = {}
    for call in calls:
        if call.due is None:
            continue
        delay, size = call.due.delay, len(call.due.messages)
        batch, filled = open_batches.get(delay, ([], BATCH))
        if filled + size > BATCH:
            batch, filled = [], 0
            batches.append(batch)
        batch.append(call)
        open_batches[delay] = (batch, filled + size)
    return batches
