"""The queues of an app: their settings, their leases, and how they are created."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Unpack

from aztask.adaptive.advisor import LeaseAdvisor
from aztask.address.priorities import NORMAL, priority_queue, queue_of_priority
from aztask.appoptions import QueueOptionNames
from aztask.brokers.base import Broker, QueueOptions
from aztask.config import QueueSettings, Settings
from aztask.sending.queueplan import QueuePlan, plan_of
from aztask.task import Task
from aztask.taskoptions import check_options


class AppQueues(ABC):
    """The part of `aztask.app.App` that knows its queues."""

    leases: LeaseAdvisor

    def __init__(self, settings: Settings, *, given: Collection[str]) -> None:
        """given: the names of the settings that the app's own options set."""
        self.settings = settings
        self.tasks: dict[str, Task[..., Any]] = {}
        self._queues: dict[str, QueueSettings] = {}
        self._by_priority: dict[str, str] = {}
        self._lease_given = "lease" in given
        self._default_named = "default_queue" in given

    @property
    @abstractmethod
    def broker(self) -> Broker:
        """The broker; `App` connects it."""

    def queue(self, name: str, **options: Unpack[QueueOptionNames]) -> None:
        """Set options of one queue, for example ``app.queue("slow", lease=300)``.

        With ``priorities={"high": 4, "low": 1}`` the queue has priorities: a queue of its own for
        each one, and the weights by which workers take tasks from them, see
        docs/how-to/advanced/priorities.md.

        `QueueSettings` describes the options. This creates nothing: run ``aztask queues create``.
        Raises ConfigurationError if an option is wrong or contradicts the app's settings.
        """
        check_options(options, QueueOptionNames, f"queue {name!r}")
        settings = QueueSettings.from_options(name, options)
        settings.over(self.settings)
        self._queues[name] = settings
        self._by_priority = {
            **{queue: home for queue, home in self._by_priority.items() if home != name},
            **{
                priority_queue(name, each): name
                for each in settings.priorities or ()
                if each != NORMAL
            },
        }

    def queue_for(self, task: Task[..., Any] | None, options: Mapping[str, Any]) -> str:
        """The queue that an invocation is sent to.

        * `task`: None for a task that another program registers.
        * `options`: those of the send. A queue that they name has only the priority that they name.

        Raises ConfigurationError for a priority that the queue does not have.
        """
        queue, priority = options.get("queue"), options.get("priority")
        if task is not None and not queue:
            queue, priority = task.queue, priority or task.priority
        queue = queue or self.settings.default_queue
        if priority is None:
            return str(queue)
        own = self._queues.get(queue)
        return queue_of_priority(queue, priority, own.priorities if own else None)

    def queue_weights(self) -> dict[str, int]:
        """The declared weights of queues: of those with priorities, and of their priorities."""
        return {
            priority_queue(name, priority): weight
            for name, own in self._queues.items()
            for priority, weight in (own.priorities or {}).items()
        }

    def priority_queues(self, name: str) -> list[str]:
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
        left = {name: set(self.priority_queues(name)) - set(queues) for name in sorted(named)}
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

    def queue_settings(self, name: str) -> Settings:
        """The settings that apply to the queue: its own where it has any, else the app's."""
        own = self._own(name)
        return own.over(self.settings) if own else self.settings

    def lease_seconds(self, name: str) -> float:
        """The lease duration to request for the queue, in seconds.

        It is the queue's setting, else the app's, else the broker's default.
        """
        settings = self.queue_settings(name)
        if self._lease_asked(name):
            return settings.lease_seconds
        return min(self.broker.capabilities.default_lease_seconds, settings.max_lease_seconds / 2)

    def lease_now(self, name: str) -> float:
        """The lease duration to request now, in seconds.

        With ``lease_advice`` it is the learned one, otherwise `lease_seconds`.
        """
        if not self.leases.enabled:
            return self.lease_seconds(name)
        settings, capabilities = self.queue_settings(name), self.broker.capabilities
        return self.leases.lease_now(name, self.lease_seconds(name), settings, capabilities)

    def _lease_asked(self, name: str) -> bool:
        own = self._own(name)
        return self._lease_given or (own is not None and own.lease_seconds is not None)

    def queue_plan(self, name: str) -> QueuePlan:
        """What the app requires of a queue: its lease, sessions, duplicate detection and so on."""
        return plan_of(
            name,
            self._own(name),
            self.queue_settings(name),
            self.tasks.values(),
            home=self._by_priority.get(name, name),
            lease=self.lease_seconds(name),
            lease_asked=self._lease_asked(name),
        )

    def queue_options(self, name: str) -> QueueOptions:
        """The options to create the queue with.

        Raises ConfigurationError if the service lacks one of them.
        """
        return self.queue_plan(name).options(self.broker.capabilities)

    def has_sessions(self, name: str) -> bool:
        """True if the app configured the queue with ``sessions=True``."""
        own = self._own(name)
        return bool(own and own.sessions)

    def queue_names(self) -> list[str]:
        """The queues that the app's tasks and settings name, sorted.

        The default queue is one of them, unless nothing names it and every task has a queue of its
        own: then it need not exist.
        """
        default = self.settings.default_queue
        names = {task.queue or default for task in self.tasks.values()}
        names |= {*self._queues, *self._by_priority}
        if self._default_named or not self.tasks:
            names.add(default)
        return sorted(names)
