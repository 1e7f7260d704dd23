"""Inline mode: tasks run in the test's own thread when they are sent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Final

from aztask.app import App
from aztask.context import Context, current_context, set_current_context, unsent_context
from aztask.errors import ConfigurationError, ResultTimeout
from aztask.message.envelope import Envelope
from aztask.operate.deadletters.view import DeadLetters, DeadLetterView
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker
from aztask.result import AsyncResult
from aztask.sending.sent import Sent, find, named
from aztask.stores.records.local.store import LocalResults
from aztask.support import clock
from aztask.support.chance import new_id
from aztask.support.clock import Clock, replaced
from aztask.task import Invocation, Task
from aztask.taskoptions import SendOptions, delay_seconds
from aztask.testing.inlineworker import InlineClock, InlineWorker
from aztask.workflows.mailing import Posted
from aztask.workflows.place import NodePlace

PEEKED: Final = 10_000
DEEPEST: Final = 20
"""Sends of tasks run at once down to this depth, and beyond it after the task that sends. So a task
may send itself a thousand times."""


class Inline:
    """The inline mode of an app, from ``with app.inline() as inline``.

    * `sent`: every invocation that the program or a workflow sent in the block, as `Sent`, in
      order. In a workflow it has only the signature's own arguments, not the value before it.
    """

    def __init__(self, app: App, *, run: bool = True, now: datetime | None = None) -> None:
        """Called by `App.inline`, which describes `run` and `now`."""
        if now is not None and now.tzinfo is None:
            raise ConfigurationError(f"now takes a datetime with a time zone, not {now!r}")
        self._app = app
        self._runs = run
        self._start = now
        self.sent: list[Sent] = []

    def __enter__(self) -> Inline:
        """Replace the app's broker and result store by new ones in memory."""
        time = InlineClock(self._start)
        self._clock = time.clock
        self._database = Database(":memory:")
        broker = LocalBroker(self._database, clock=time.clock)
        results = InlineResults(self._database, time.clock, self)
        with ExitStack() as undo:
            undo.callback(self._database.close)
            if self._start is not None:
                # Times that a program computes from the machine's clock mean nothing here.
                undo.enter_context(replaced(Clock(wall=self._clock.wall)))
            undo.callback(self._app.redirect(broker, results, self._sent))
            self._app.workflows.watch(self)
            undo.callback(self._app.workflows.watch, None)
            self._worker = InlineWorker(self._app, broker, time)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the app its own connections back. Tasks that still wait are dropped."""
        self._worker.close()
        self._undo.close()

    # -- running -----------------------------------------------------------------------------

    def run(self) -> None:
        """Run all tasks that are due. ``app.inline()`` does so at every send by itself."""
        self._worker.run()

    def advance(self, seconds: float | timedelta) -> None:
        """Let time pass: everything that becomes due in it happens at its time, in order.

        Delayed, snoozed and debounced tasks run, and the app's schedules send theirs. Only the
        clock of `now` moves; `time.time` in your tasks does not.
        """
        passed = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
        if passed < 0:
            raise ValueError(f"advance takes seconds of 0 or more, not {seconds!r}")
        self._worker.advance(passed)

    @property
    def now(self) -> datetime:
        """The time of queues, delays, schedules and results, in UTC; only `advance` moves it."""
        return datetime.fromtimestamp(self._clock.wall(), UTC)

    def deliver(
        self, queue: str, body: bytes | str | dict[str, Any] | list[Any], **headers: Any
    ) -> AsyncResult[Any]:
        """Put a message into the queue as another program would, for the app's handler.

        * `body`: the message's bytes or text; a dict or a list is written as JSON.
        * `headers`: application properties.

        Returns the result of the handler.
        """
        if isinstance(body, dict | list):
            body = json.dumps(body)
        data = body.encode() if isinstance(body, str) else body
        message_id = new_id()
        self._app.broker.send(queue, [Envelope(data, headers, message_id)])
        found = next(
            each
            for each in self._app.broker.peek(queue, limit=PEEKED)
            if each.envelope.message_id == message_id
        )
        message = self._app.message_in(found.envelope, queue, found.position)
        if self._runs and self._worker.depth < DEEPEST:
            self._worker.run()
        return self._app.result(message.id)

    def progress(self) -> bool:
        """Run what is due; True if anything ran."""
        return self._worker.run()

    # -- what was sent -----------------------------------------------------------------------

    def sent_to(self, task: Task[..., Any] | str) -> list[Sent]:
        """What was sent to one task, which you give itself or by its name: a `Sent` for each call.

        Compare a part of it, such as the arguments::

            assert [sent.args for sent in inline.sent_to(resize)] == [("a.png", 200)]
        """
        return named(self.sent, task)

    def assert_sent(self, task: Task[..., Any] | str, *args: Any, **kwargs: Any) -> Sent:
        """Assert that the task was sent with exactly these arguments, and return that `Sent`.

        AssertionError lists all that was sent.
        """
        return find(self.sent, task, args, kwargs)

    def assert_not_sent(self, task: Task[..., Any] | str) -> None:
        """Assert that the task was not sent at all."""
        if found := self.sent_to(task):
            raise AssertionError(f"{found[0]} was sent")

    def dead_letters(self, queue: str | None = None) -> Sequence[DeadLetterView]:
        """The dead letters of a queue, by default of the app's default queue."""
        return DeadLetters(self._app, queue or self._app.settings.default_queue).list()

    def _sent(
        self,
        name: str,
        queue: str,
        calls: Sequence[Invocation],
        ids: Sequence[str],
        options: SendOptions,
    ) -> None:
        given = dict(options)
        for call, task_id in zip(calls, ids, strict=True):
            self.sent.append(Sent(task_id, name, queue, call.args, call.kwargs, given))
        self._worker.expect(delay_seconds(options, clock.wall()))
        self.started()

    # -- workflows, see `aztask.app.workflows.GraphWatcher` ----------------------------------

    def posted(self, posted: Sequence[Posted]) -> None:
        """Note tasks that a workflow has sent; they run when its start or its last task returns."""
        codec = self._app.codec
        for message, envelope in posted:
            args, kwargs = codec.decode_arguments(message)
            if task := self._app.tasks.get(message.task):
                taken = int(NodePlace.read(message.node).takes is not None) if message.node else 0
                args, kwargs = task.conversion.peek(args, kwargs, given=taken)
            given = {"delay": envelope.delay} if envelope.delay else {}
            sent = Sent(message.id, message.task, message.queue, tuple(args), kwargs, given)
            self.sent.append(sent)
            self._worker.expect(envelope.delay)

    def started(self) -> None:
        """Run what was sent, unless the program asked to keep it."""
        if self._runs and self._worker.depth < DEEPEST:
            self._worker.run()


class InlineResults(LocalResults):
    """Results in memory. Waiting for one runs what is due, and fails if nothing is."""

    def __init__(self, database: Database, time: Clock, inline: Inline) -> None:
        super().__init__(database, clock=time)
        self._inline = inline

    def wait_changed(self, version: int, timeout: float) -> int:
        """Run what is due. Raises ResultTimeout instead of waiting for what will not happen."""
        if not self._inline.progress():
            raise ResultTimeout(
                "the task has not ended, and nothing is due: it waits for inline.advance(...), or "
                "this app has no such task"
            )
        return version + 1


# -- a `Context` for tasks that a test calls -----------------------------------------------


@contextmanager
def task_context(
    *,
    task_id: str | None = None,
    task: str = "test",
    queue: str | None = None,
    saved: Any = None,
    resubmit_count: int = 0,
    delivery_count: int = 1,
    session: str | None = None,
    lease: float | timedelta = math.inf,
) -> Iterator[Context]:
    """Make a `Context` the current one for the length of a ``with`` block, as in a running task.

    A task with a context that is called in the block gets it, and `aztask.current_context` returns
    it. Checkpoints are kept in ``context.saved``, and the state of the session in
    ``context.session.state``; an extension of the lease is always granted.

    * `task_id`: a new UUID by default.
    * `task`, `queue`: the names of task and queue: "test" and "default" by default.
    * `saved`: the checkpoint that an earlier run has left; none by default.
    * `resubmit_count`, `delivery_count`: 0 and 1 by default, as in a first run.
    * `session`: the name of the session; by default there is none.
    * `lease`: how long the lease lasts, in seconds or as a ``timedelta``; by default it does not
      end. 0 is a lease that is lost already.
    """
    seconds = lease.total_seconds() if isinstance(lease, timedelta) else lease
    context = unsent_context(
        task_id=task_id,
        task=task,
        queue=queue,
        saved=saved,
        resubmit_count=resubmit_count,
        delivery_count=delivery_count,
        session=session,
        lease=seconds,
    )
    before = current_context()
    set_current_context(context)
    try:
        yield context
    finally:
        set_current_context(before)
