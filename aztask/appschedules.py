"""The schedules of an app, and the keys of its unique tasks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, Unpack, cast

from aztask.appqueues import AppQueues
from aztask.canvas.graphs import Signature
from aztask.config import Settings
from aztask.connections import Connections
from aztask.errors import NotUnique
from aztask.message.codec import Codec
from aztask.schedules.schedules import Plan, ScheduleOptions, Schedules
from aztask.sending.send import Sender
from aztask.task import Invocation, Task
from aztask.taskoptions import SendOptions
from aztask.uniqueness.engine import UniqueEngine


class AppSchedules:
    """The part of `aztask.app.App` that knows its schedules and its unique tasks."""

    name: str
    settings: Settings
    codec: Codec
    tasks: dict[str, Task[..., Any]]
    _connections: Connections
    _sender: Sender

    def schedule(self, name: str, call: Signature, **options: Unpack[ScheduleOptions]) -> Plan:
        """Send a task at certain times. Every worker of the app takes part, without a leader.

        ::

            app.schedule("nightly", report.s(), cron="0 2 * * *", tz="Europe/Berlin")
            app.schedule("poll", poll.s("eu"), every=30, overlap="skip")

        * `name`: names the schedule; one without a dot gets the app's name in front.
        * `call`: one call of a task; `Signature.with_options` sets its queue, expiry or session.
        * `options`: when, and by which rules, see `ScheduleOptions`.

        The first occurrence is after the first start of a worker, never in the past. A schedule
        that no running code declares stops after 10 minutes. Raises ConfigurationError,
        DuplicateTask, and TypeError for arguments that do not match the task. See
        docs/how-to/basics/schedules.md.
        """
        queues = cast("AppQueues", self)
        plan = self.schedules.plan(name, call, **options)
        queues._default_named |= call.options.get("queue") == self.settings.default_queue
        return self.schedules.declare(plan)

    @cached_property
    def schedules(self) -> Schedules:
        """The `Schedules` of the app, to make, pause or trigger some at run time."""
        return Schedules(
            self.name,
            cast("AppQueues", self).queue_for,
            self._connections.results,
            self.codec,
            self._send_occurrence,
            self._sender.events.report,
        )

    def unique_engine(self, task: str) -> UniqueEngine:
        """The keys of unique tasks. `task`: one of them, for the error without a result store."""
        return self._sender.unique.engine(task)

    def _send_occurrence(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Mapping[str, Any],
        headers: Mapping[str, Any],
    ) -> None:
        """Send the task of an occurrence as any other task, with these headers."""
        queue, call = str(options["queue"]), Invocation(args, kwargs)
        known, sessions = self.tasks.get(name), cast("AppQueues", self).has_sessions(queue)
        given = cast("SendOptions", options)
        with suppress(NotUnique):  # another task of that key waits or runs: that is enough
            self._sender.send(name, known, queue, (call,), given, sessions, headers)
