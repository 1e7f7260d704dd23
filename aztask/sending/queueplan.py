"""What an app requires of one queue: how to create it, and what an existing one is compared with.

Rules
1. Settings that you give to the app or the queue are *requested*. Settings that follow from the
   tasks, such as a duplicate detection window that covers their delays, are *implied*: they apply
   when a queue is created, and never change an existing one.
2. On a queue that decides the lease itself, that lease is the one that the worker requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from aztask.config import QueueSettings, Settings
from aztask.errors import ConfigurationError
from aztask.queues.base import Capabilities, QueueOptions
from aztask.task import Task

LEAST_WINDOW: Final = 600.0
"""Seconds: the service's own default, which covers sends that you repeat after an outage."""

MOST_WINDOW: Final = 7 * 86400.0
LEAST_LIMIT: Final = 1000
MOST_LIMIT: Final = 2000
"""Deliveries: the most that the service allows (its documentation, "Service Bus quotas"; read)."""


@dataclass(frozen=True, slots=True)
class QueuePlan:
    """What an app requires of one queue. All durations are in seconds.

    * `own`: the queue's own settings.
    * `lease`: the lease that a worker will request; `lease_asked`: True if it is configured.
    * `max_lease`: the limit of the lease with all its renewals.
    * `max_deliveries`: aztask's own limit.
    * `tasks`: the tasks that are sent to this queue by default.
    """

    queue: str
    own: QueueSettings
    lease: float
    lease_asked: bool
    max_lease: float
    max_deliveries: int
    tasks: tuple[Task[..., Any], ...] = ()

    @property
    def longest_delay(self) -> float:
        """The longest delay of a retry in this queue, in seconds."""
        return max((task.retry.max_delay for task in self.tasks if _retries(task)), default=0.0)

    @property
    def limit(self) -> int:
        """The most deliveries of one message that aztask's own limits allow.

        A strategy that gives the same message back uses a delivery for each retry.
        """
        given_back = (
            task.retry.max_retries + task.retry.max_snoozes
            for task in self.tasks
            if task.retry_strategy != "resubmit"
        )
        return self.max_deliveries + max(given_back, default=0)

    def options(self, can: Capabilities) -> QueueOptions:
        """The options to create the queue with. Raises ConfigurationError."""
        own = self.own
        values: dict[str, Any] = {
            "lease": own.lease_seconds,
            "duplicate_window": own.duplicate_window_seconds,
            "time_to_live": own.time_to_live_seconds,
            "sessions": own.sessions,
        }
        implied: dict[str, Any] = {}
        if can.fixed_lease:
            self._check_lease(can)
            (values if self.lease_asked else implied)["lease"] = self.lease
            implied["max_deliveries"] = min(MOST_LIMIT, max(LEAST_LIMIT, 10 * self.limit))
        if can.duplicate_detection and not can.atomic_resubmit:
            implied["duplicate_window"] = self.window
        implied = {name: value for name, value in implied.items() if values.get(name) is None}
        return QueueOptions(**{**values, **implied, "implied": frozenset(implied)})

    @property
    def window(self) -> float:
        """Seconds of duplicate detection that cover the longest delay and a redelivery after it."""
        return min(MOST_WINDOW, max(LEAST_WINDOW, self.longest_delay + 2 * self.lease))

    def _check_lease(self, can: Capabilities) -> None:
        if self.lease > can.max_lease_seconds:
            raise ConfigurationError(
                f"queue {self.queue!r} has a configured lease of {self.lease:g} s, but its service "
                f"holds a message for {can.max_lease_seconds:g} s at most; say app.queue("
                f"{self.queue!r}, lease={can.max_lease_seconds:g}) or less: it is renewed"
            )


def plan_of(
    queue: str,
    own: QueueSettings | None,
    settings: Settings,
    tasks: Iterable[Task[..., Any]],
    *,
    lease: float,
    lease_asked: bool,
    home: str | None = None,
) -> QueuePlan:
    """The plan of one queue. `settings` are the app's with the queue's own in their place.

    * `home`: the queue whose priority this one is for; by default the queue itself.
    """
    default = settings.default_queue
    return QueuePlan(
        queue,
        own or QueueSettings(queue),
        lease,
        lease_asked,
        settings.max_lease_seconds,
        settings.max_deliveries,
        tuple(task for task in tasks if (task.queue or default) == (home or queue)),
    )


def _retries(task: Task[..., Any]) -> bool:
    return task.retry.max_retries > 0 or task.retry.max_snoozes > 0
