"""What a worker passes to the hooks for telemetry; each function is called only if a hook is there.

A hook may change one thing: the trace context of messages that came without one. Nothing that a
hook raises reaches the worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from aztask.hooks import KilledRun, Listeners, Receiving, Settling
from aztask.support.clock import Clock
from aztask.worker.pipeline.work import WorkItem, message_of


def report_received(
    listeners: Listeners[Receiving],
    queue: str,
    items: Sequence[WorkItem],
    asked_at: float,
    received_at: float,
) -> None:
    """Report one batch. asked_at, received_at: UTC epoch seconds."""
    readable = [item for item in items if item.opened is not None]
    receiving = Receiving(
        queue,
        [message_of(item) for item in readable],
        [item.delivery for item in readable],
        len(items),
        asked_at,
        received_at,
    )
    listeners.notify(receiving)
    for index, traceparent in receiving.traceparents.items():
        readable[index].rewrite(traceparent=traceparent)


def settling_of(items: Sequence[WorkItem]) -> Settling:
    """The settlements of one receiver's items, as the hook takes them."""
    return Settling(
        items[0].queue,
        [item.opened.message if item.opened is not None else None for item in items],
        [item.delivery for item in items],
        [item.settlement for item in items],
    )


def report_killed(
    listeners: Listeners[KilledRun], item: WorkItem, error_type: str, error: str, clock: Clock
) -> None:
    """Report a run whose process ended before it could answer.

    A process that ends within a moment leaves no start time; then the run has no duration.
    """
    now = clock.wall()
    listeners.notify(
        KilledRun(message_of(item), item.delivery, now - item.duration, now, error_type, error)
    )
