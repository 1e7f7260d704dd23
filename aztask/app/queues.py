"""The queues of an app: their settings, their leases, and how they are created."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Unpack

from aztask.address.priorities import NORMAL, priority_queue, queue_of_priority
from aztask.app.options import QueueOptionNames
from aztask.app.tasks import DeclaredLimits
from aztask.config import QueueSettings, Settings
from aztask.errors import InvalidQueueName
from aztask.leaseadvice.advisor import LeaseAdvisor
from aztask.queues.base import ANY_SESSION, Broker, Position, QueueOptions
from aztask.queues.lease.held import HeldLease, LeaseTerms
from aztask.sending.queueplan import QueuePlan, plan_of
from aztask.stores.connections import Connections
from aztask.support.durations import to_seconds
from aztask.task import Task
from aztask.taskoptions import check_options


class DeclaredQueues:
    """The queues of an app: those that the code declares, and those that its tasks name."""

    def __init__(
        self,
        settings: Settings,
        connections: Connections,
        leases: LeaseAdvisor,
        tasks: Mapping[str, Task[..., Any]],
        limits: DeclaredLimits,
        *,
        given: Collection[str],
    ) -> None:
        """given: the names of the settings that the app's own options set."""
        self._settings = settings
        self._connections = connections
        self._leases = leases
        self._tasks = tasks
        self._limits = limits
        self._queues: dict[str, QueueSettings] = {}
        self._by_priority: dict[str, str] = {}
        self._names: set[str] = set()  # those that the broker allows
        self._lease_given = "lease" in given
        self._default_named = "default_queue" in given
        self.check_name(settings.default_queue, "default_queue")

    @property
    def broker(self) -> Broker:
        """The broker, connected at the first use. Raises ConfigurationError, BrokerUnavailable."""
        return self._connections.broker()

    def declare(self, name: str, **options: Unpack[QueueOptionNames]) -> None:
        """Set options of one queue, see `App.queue`. Raises ConfigurationError."""
        check_options(options, QueueOptionNames, f"queue {name!r}")
        settings = QueueSettings.from_options(name, options)
        settings.over(self._settings)
        for each in settings.priorities or (NORMAL,):
            self.check_name(priority_queue(name, each), f"queue {name!r}")
        self._queues[name] = settings
        self._by_priority = {
            **{queue: home for queue, home in self._by_priority.items() if home != name},
            **{
                priority_queue(name, each): name
                for each in settings.priorities or ()
                if each != NORMAL
            },
        }

    def check_name(self, queue: object, where: str) -> None:
        """Raise InvalidQueueName unless the broker allows the name, if the broker is known by now.

        * `queue`: None for no name.
        * `where`: who names it, for the error.
        """
        if queue is None or queue in self._names:
            return
        try:
            self._connections.check_queue_name(str(queue))
        except InvalidQueueName as error:
            raise InvalidQueueName(f"{where}: {error}") from None
        self._names.add(str(queue))

    def name_default(self) -> None:
        """Something names the default queue: it has to exist, whatever queues the tasks have."""
        self._default_named = True

    def route(self, task: Task[..., Any] | None, options: Mapping[str, Any]) -> str:
        """The queue of a send that is about to be made, see `queue_for`.

        Raises ConfigurationError if the task names a limit that is not declared: no worker would
        run it.
        """
        if task is not None and task.limits:
            self._limits.of(task)
        return self.queue_for(task, options)

    def queue_for(self, task: Task[..., Any] | None, options: Mapping[str, Any]) -> str:
        """The queue that an invocation is sent to.

        * `task`: None for a task that another program registers.
        * `options`: those of the send. A queue that they name has only the priority that they name.

        Raises ConfigurationError for a priority that the queue does not have.
        """
        queue, priority = options.get("queue"), options.get("priority")
        if task is not None and not queue:
            queue, priority = task.queue, priority or task.priority
        queue = queue or self._settings.default_queue
        if priority is None:
            return str(queue)
        own = self._queues.get(queue)
        return queue_of_priority(queue, priority, own.priorities if own else None)

    def weights(self) -> dict[str, int]:
        """The declared weights of queues: of those with priorities, and of their priorities."""
        return {
            priority_queue(name, priority): weight
            for name, own in self._queues.items()
            for priority, weight in (own.priorities or {}).items()
        }

    def of_priorities(self, name: str) -> list[str]:
        """The queues that belong to `name`: the queue itself, and one for each other priority."""
        own = self._queues.get(name)
        return [
            priority_queue(name, each) for each in (own.priorities if own else None) or (NORMAL,)
        ]

    def unserved(self, queues: Collection[str]) -> list[str]:
        """Warnings about the priorities of these queues that are not among them.

        * `queues`: those that a worker is told to serve; empty for all.
        """
        if not queues:
            return []
        named = {self._by_priority.get(name, name) for name in queues}
        left = {name: set(self.of_priorities(name)) - set(queues) for name in sorted(named)}
        return [
            f"this worker does not serve {', '.join(sorted(missing))}, which "
            f"{'belongs' if len(missing) == 1 else 'belong'} to the priorities of queue {name}: "
            "add it to -Q, unless other workers serve it"
            for name, missing in left.items()
            if missing
        ]

    def _own(self, name: str) -> QueueSettings | None:
        """The settings of the queue alone; the queue of a priority takes those of its queue."""
        own = self._queues.get(name)
        if own is None and name in self._by_priority:
            return replace(self._queues[self._by_priority[name]], name=name, priorities=None)
        return own

    def settings_of(self, name: str) -> Settings:
        """The settings that apply to the queue: its own where it has any, else the app's."""
        own = self._own(name)
        return own.over(self._settings) if own else self._settings

    def lease_seconds(self, name: str) -> float:
        """The lease duration to request for the queue, in seconds.

        It is the queue's setting, else the app's, else the broker's default.
        """
        settings = self.settings_of(name)
        if self._lease_asked(name):
            return settings.lease_seconds
        return min(self.broker.capabilities.default_lease_seconds, settings.max_lease_seconds / 2)

    def lease_now(self, name: str) -> float:
        """The lease duration to request now, in seconds.

        With ``lease_advice`` it is the learned one, otherwise `lease_seconds`.
        """
        if not self._leases.enabled:
            return self.lease_seconds(name)
        settings, capabilities = self.settings_of(name), self.broker.capabilities
        return self._leases.lease_now(name, self.lease_seconds(name), settings, capabilities)

    def _lease_asked(self, name: str) -> bool:
        own = self._own(name)
        return self._lease_given or (own is not None and own.lease_seconds is not None)

    def plan(self, name: str) -> QueuePlan:
        """What the app requires of a queue: its lease, sessions, duplicate detection and so on."""
        return plan_of(
            name,
            self._own(name),
            self.settings_of(name),
            self._tasks.values(),
            home=self._by_priority.get(name, name),
            lease=self.lease_seconds(name),
            lease_asked=self._lease_asked(name),
        )

    def options(self, name: str) -> QueueOptions:
        """The options to create the queue with.

        Raises ConfigurationError if the service lacks one of them.
        """
        return self.plan(name).options(self.broker.capabilities)

    def has_sessions(self, name: str) -> bool:
        """True if the app configured the queue with ``sessions=True``."""
        own = self._own(name)
        return bool(own and own.sessions)

    def held(
        self,
        queue: str,
        wait: float | timedelta,
        lease: float | timedelta | None,
        session: str | None,
        deferred: Position | None,
        stop: threading.Event | None = None,
    ) -> HeldLease:
        """The lease for these options of `App.receive`; it receives when its block is entered.

        * `stop`: once it is set, the wait for a message ends within a second.

        Raises ConfigurationError for a lease that the queue's settings do not allow.
        """
        settings = self.settings_of(queue)
        if lease is not None:
            settings = replace(settings, lease_seconds=to_seconds(lease, "lease"))
        return HeldLease(
            self.broker,
            queue,
            LeaseTerms(
                self.lease_now(queue) if lease is None else settings.lease_seconds,
                settings.max_lease_seconds,
                settings.renew_at,
            ),
            wait=to_seconds(wait, "wait"),
            session=session or (ANY_SESSION if self.has_sessions(queue) else None),
            deferred=deferred,
            stop=stop,
        )

    def names(self) -> list[str]:
        """The queues that the app's tasks and settings name, sorted.

        The default queue is one of them, unless nothing names it and every task has a queue of its
        own: then it need not exist.
        """
        default = self._settings.default_queue
        names = {task.queue or default for task in self._tasks.values()}
        names |= {*self._queues, *self._by_priority}
        if self._default_named or not self._tasks:
            names.add(default)
        return sorted(names)
