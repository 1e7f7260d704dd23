"""Compare a queue with what the app requires of it: facts and a plan in, findings out. No I/O.

Rules
1. A setting with which the worker would refuse to start, or lose messages, is a problem; a setting
   that weakens a promise is a warning.
2. An unknown setting is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from aztask.errors import ConfigurationError, QueueNotFound
from aztask.queues.base import Capabilities, QueueFacts
from aztask.sending.queueplan import LEAST_LIMIT, QueuePlan
from aztask.support.finding import Finding, fine, problem, warning

TOLERANCE: Final = 0.5
WELL_ABOVE: Final = 2


def judge(facts: QueueFacts, plan: QueuePlan, can: Capabilities) -> Iterator[Finding]:
    """The findings about one queue."""
    check = _Check(facts, plan, can)
    if facts.exists is False:
        yield from check.missing()
        return
    if facts.unread:
        yield check.unread()
    yield from check.state()
    yield from check.lease()
    yield from check.leases_of_tasks()
    yield from check.duplicates()
    yield from check.deliveries()
    yield from check.sessions()


class _Check:
    def __init__(self, facts: QueueFacts, plan: QueuePlan, can: Capabilities) -> None:
        self._facts = facts
        self._plan = plan
        self._can = can
        self._queue = facts.queue
        self._subject = f"queue {facts.queue}"

    def missing(self) -> Iterator[Finding]:
        """The queue does not exist."""
        if self._facts.made_on_use:
            yield fine(self._subject, "exists", "it is created when it is first used")
            return
        yield self._problem(
            "exists",
            "it does not exist",
            f"create it: aztask queues create {self._queue}",
            QueueNotFound(f"there is no queue {self._queue!r}"),
        )

    def unread(self) -> Finding:
        """The queue's settings cannot be read."""
        believed = ""
        if self._can.fixed_lease:
            believed = (
                f"; a worker assumes a lease of {self._plan.lease:g} s and checks it against its "
                "messages"
            )
        return warning(
            self._subject,
            "settings",
            f"its settings were not checked ({self._facts.unread}){believed}",
            "run aztask doctor again as a user, and on a machine, that can read them",
        )

    def state(self) -> Iterator[Finding]:
        """The queue exists, is enabled, and has a place for dead letters."""
        if self._facts.exists:
            yield fine(self._subject, "exists", "it exists")
        if self._facts.active is False:
            yield self._problem(
                "active", "it is disabled, partly or completely", "enable it in the portal"
            )
        if self._facts.dead_letters is False:
            yield self._problem(
                "dead-letters",
                "there is no queue for its dead letters",
                f"create it: aztask queues create {self._queue}",
                QueueNotFound(f"the queue {self._queue!r} has no queue for its dead letters"),
            )

    def lease(self) -> Iterator[Finding]:
        """The lock duration equals the lease that the worker requests."""
        actual, expected = self._facts.lease_seconds, self._plan.lease
        if actual is None:
            return
        if abs(actual - expected) > TOLERANCE:
            yield self._problem(
                "lease",
                f"it holds messages for {actual:g} s, but the worker requests {expected:g} s and "
                "is refused",
                f"write app.queue({self._queue!r}, lease={actual:g}), or set the queue's lock: "
                f"aztask queues create {self._queue} --lease {expected:g}s",
            )
        elif self._plan.max_lease <= actual:
            yield self._problem(
                "max-lease",
                f"it holds messages for {actual:g} s, but max_lease is {self._plan.max_lease:g} s",
                "raise max_lease: it caps the lease with all its renewals",
            )
        else:
            yield fine(self._subject, "lease", f"it holds messages for {actual:g} s, renewed")

    def leases_of_tasks(self) -> Iterator[Finding]:
        """If the queue decides the lease, a task's own lease has no effect."""
        actual = self._facts.lease_seconds
        for task in self._plan.tasks:
            if actual is None:
                break
            if task.max_lease is not None and task.max_lease <= actual:
                yield self._problem(
                    "task-lease",
                    f"task {task.name} has a max_lease of {task.max_lease:g} s, which is not "
                    f"longer than the queue's {actual:g} s",
                    "raise it, or give the task a queue with a shorter lock",
                )
            if task.lease is not None and abs(task.lease - actual) > TOLERANCE:
                yield warning(
                    self._subject,
                    "task-lease",
                    f"task {task.name} requests a lease of {task.lease:g} s; the queue decides: "
                    f"{actual:g} s",
                    "remove lease=, or give the task a queue of its own",
                )

    def duplicates(self) -> Iterator[Finding]:
        """The duplicate detection window covers everything that a redelivery may repeat."""
        window, longest = self._facts.duplicate_window, self._plan.longest_delay
        if window is None or self._can.atomic_resubmit:
            return
        if not window:
            yield warning(
                self._subject,
                "duplicates",
                "duplicate detection is off: if a worker dies between sending a retry and "
                "completing its original, the retry may run twice",
                "it cannot be switched on later: delete the queue and create it again with "
                f"aztask queues create {self._queue} (not in the Basic tier)",
            )
        elif window < longest:
            yield warning(
                self._subject,
                "duplicates",
                f"duplicate detection looks back {window:g} s, less than the longest delay of a "
                f"retry, {longest:g} s",
                f"aztask queues create {self._queue} --duplicate-window {self._plan.window:g}s",
            )
        else:
            yield fine(self._subject, "duplicates", f"duplicate detection looks back {window:g} s")

    def deliveries(self) -> Iterator[Finding]:
        """The service's delivery limit must not be reached before ours, which gives a reason."""
        actual, ours = self._facts.max_deliveries, self._plan.limit
        if actual is None:
            return
        if actual <= ours:
            yield self._problem(
                "deliveries",
                f"the service dead-letters after {actual} deliveries, before aztask does ({ours}): "
                "without a reason, and with retries left",
                f"aztask queues create {self._queue} --max-deliveries {LEAST_LIMIT}",
            )
        elif actual < WELL_ABOVE * ours:
            yield warning(
                self._subject,
                "deliveries",
                f"the service dead-letters after {actual} deliveries, close to aztask's {ours}",
                f"aztask queues create {self._queue} --max-deliveries {LEAST_LIMIT}",
            )
        else:
            yield fine(
                self._subject,
                "deliveries",
                f"the service dead-letters after {actual} deliveries, well above aztask's {ours}",
            )

    def sessions(self) -> Iterator[Finding]:
        """The queue has sessions if, and only if, the app uses them."""
        actual, expected = self._facts.sessions, self._plan.own.sessions
        if actual is None:
            return
        if expected and not actual:
            yield self._problem(
                "sessions",
                "the app uses sessions, and the queue has none",
                "it cannot be changed: delete the queue and create it again with aztask queues "
                f"create {self._queue} --sessions",
            )
        elif actual and not expected:
            yield self._problem(
                "sessions",
                "it requires sessions, and the app does not use them",
                f"use another queue, or write app.queue({self._queue!r}, sessions=True)",
            )

    def _problem(
        self, check: str, text: str, advice: str, error: QueueNotFound | None = None
    ) -> Finding:
        error_of_it = error or ConfigurationError(f"{self._subject}: {text}")
        return problem(self._subject, check, text, advice, error_of_it)
