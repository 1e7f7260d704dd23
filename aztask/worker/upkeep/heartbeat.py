"""The sign of life: what a worker tells of itself, and of what it runs."""

from __future__ import annotations

from typing import Final

from aztask.results.base import RunningTask, WorkerRecord
from aztask.worker.pipeline.work import WorkItem, message_of
from aztask.worker.pool.children import Pool
from aztask.worker.runtime import WorkerRuntime

MOST_TASKS: Final = 100
"""Tasks in one sign, the longest-running ones: it is written every few seconds."""


class Heartbeat:
    """Only the supervisor's loop uses it."""

    def __init__(self, runtime: WorkerRuntime, pool: Pool) -> None:
        self._name = runtime.name
        self._queues = tuple(runtime.options.queues)
        self._pool = pool
        self._deliveries = runtime.deliveries
        self._clock = runtime.clock
        self._born = runtime.clock.wall()

    def running_ids(self) -> list[str]:
        """The ids of the tasks that run."""
        return [item.key.task_id for item, _ in self._pool.running()]

    def record(self, finished: int, *, stopped: bool = False) -> WorkerRecord:
        """The worker as it is now. finished: tasks since it began."""
        running = sorted(self._pool.running(), key=lambda pair: pair[1])
        seen_at = self._clock.wall()
        behind = seen_at - self._clock.monotonic()
        return WorkerRecord(
            self._name,
            self._born,
            seen_at,
            self._queues,
            len(running),
            finished,
            stopped,
            len(self._deliveries),
            tuple(_told(item, at + behind) for item, at in running[:MOST_TASKS]),
        )


def _told(item: WorkItem, started_at: float) -> RunningTask:
    message = message_of(item)
    return RunningTask(message.id, message.task, item.queue, started_at, message.resubmit_count)
