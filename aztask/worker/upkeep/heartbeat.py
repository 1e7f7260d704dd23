"""The heartbeat: a worker's record of itself and of the tasks that it runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Final

from aztask.hooks import WorkerStatus
from aztask.message.codec import Codec
from aztask.message.payload import stored_in
from aztask.stores.records.base import RunningTask, WorkerRecord
from aztask.stores.records.workerrow import PROGRESS
from aztask.support.parts import failures
from aztask.worker.pipeline.work import WorkItem, message_of
from aztask.worker.pool.pool import Pool
from aztask.worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

MOST_TASKS: Final = 100
"""Running tasks in one heartbeat, the longest first; it is written every few seconds."""


MOST_PROGRESS: Final = 500
"""Bytes of a checkpoint in a heartbeat. Longer ones are state to resume from, not progress."""


class Heartbeat:
    """Builds heartbeats; only the supervisor's loop uses it."""

    def __init__(self, runtime: WorkerRuntime, pool: Pool) -> None:
        self._name = runtime.name
        self._queues = tuple(runtime.options.queues)
        self._pool = pool
        self._deliveries = runtime.deliveries
        self._clock = runtime.clock
        self._born = runtime.clock.wall()
        self._codec = runtime.app.codec
        self._told: dict[str, bytes] = {}

    def news(self) -> bool:
        """Whether a running task has a checkpoint that the last heartbeat did not have."""
        running = sorted(self._pool.running(), key=lambda pair: pair[1])
        found = ((item.key.task_id, _progress_of(item)) for item, _ in running[:MOST_TASKS])
        return any(saved and self._told.get(task_id) != saved for task_id, saved in found)

    def running_ids(self) -> list[str]:
        """The ids of the running tasks."""
        return [item.key.task_id for item, _ in self._pool.running()]

    def record(self, *, stopped: bool = False) -> WorkerRecord:
        """The worker's current state, as other programs read it."""
        running = sorted(self._pool.running(), key=lambda pair: pair[1])
        seen_at = self._clock.wall()
        behind = seen_at - self._clock.monotonic()
        found = ((item.key.task_id, _progress_of(item)) for item, _ in running[:MOST_TASKS])
        self._told = {task_id: saved for task_id, saved in found if saved is not None}
        return WorkerRecord(
            self._name,
            self._born,
            seen_at,
            self._queues,
            len(running),
            self._deliveries.finished,
            stopped,
            len(self._deliveries),
            tuple(_running_tasks(running[:MOST_TASKS], behind, self._codec)),
            failing=tuple(failures()),
        )

    def status(self, *, draining: bool) -> WorkerStatus:
        """The worker's state for the hook."""
        now = self._clock.monotonic()
        return WorkerStatus(
            time.monotonic(),
            self._pool.capacity,
            sum(process.ready for process in self._pool.processes),
            tuple(max(0.0, now - at) for _, at in self._pool.running()),
            len(self._deliveries),
            draining,
        )


def _running_tasks(
    running: Sequence[tuple[WorkItem, float]], behind: float, codec: Codec
) -> Iterator[RunningTask]:
    """The tasks of a heartbeat. behind: what wall time is ahead of the clock of the deadlines."""
    for item, at in running:
        try:
            yield _running_task(item, at + behind, codec)
        except Exception:  # one delivery must not keep the heartbeat from being written
            logger.exception("%s is missing in the heartbeat", item.label)


def _running_task(item: WorkItem, started_at: float, codec: Codec) -> RunningTask:
    message, progress = message_of(item), _progress_of(item)
    if progress is not None and codec.encrypts:
        progress = codec.cipher.encrypt(progress, PROGRESS, message.id)
    return RunningTask(
        message.id,
        message.task,
        item.queue,
        started_at,
        message.resubmit_count,
        progress,
    )


def _progress_of(item: WorkItem) -> bytes | None:
    """The last checkpoint of a running task, encoded; None without one, or for a long one."""
    saved = item.opened.message.saved if item.opened is not None else None
    return saved if saved and len(saved) <= MOST_PROGRESS and not stored_in(saved) else None
