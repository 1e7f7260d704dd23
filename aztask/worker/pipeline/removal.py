"""Removes the payloads of messages that have ended.

Rules
1. A payload is removed after its message's last settlement was confirmed, and only by the delivery
   that has the recorded outcome: a superfluous copy of a message removes nothing. Only the
   arguments and checkpoints of the task itself are removed, as their names tell
   (`aztask.stores.payloads.store`): a checkpoint may refer to a value that other tasks use, too.
2. Dead letters keep their payloads, so that a replay works.
3. Removal never fails a delivery. What is left over is removed by ``aztask doctor --collect``.

Crash window: if the worker dies after the settlement and before the removal, the payload is left
over.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import Final

from aztask.message.message import TaskMessage
from aztask.message.payload import stored_in
from aztask.settlement import DeadLetter
from aztask.stores.payloads.payloads import Payloads, owned
from aztask.support.failpoint import hit
from aztask.support.threadpool import ThreadPool
from aztask.worker.pipeline.work import WorkItem

logger = logging.getLogger(__name__)

CLOSING_SECONDS: Final = 10.0


class PayloadRemoval:
    """Removes payloads: at once from a folder, on a thread of its own from a container."""

    def __init__(self, payloads: Payloads) -> None:
        self._payloads = payloads
        self._lock = threading.Lock()
        self._waiting: list[str] = []
        self._threads: ThreadPool | None = None
        self._last: Future[None] | None = None

    def after(self, items: Sequence[WorkItem]) -> None:
        """Remove the payloads of those that have ended."""
        names: list[str] = []
        for item in items:
            opened = item.opened
            if opened is not None and (opened.message.payload or opened.message.saved):
                names += _ended(item, opened.message)
        if not names:
            return
        if not self._payloads.store.remote:
            self._remove(names)
            return
        with self._lock:
            self._waiting += names
            if self._threads is None:
                self._threads = ThreadPool("payload-removal", 1)
            self._last = self._threads.submit(self._remove_waiting)

    def close(self) -> None:
        """Finish what is waiting, for `CLOSING_SECONDS` at most."""
        if self._last is not None and self._threads is not None:
            try:
                self._last.result(CLOSING_SECONDS)
            except NotInTime:
                logger.warning(
                    "payloads of ended tasks are left over, aztask doctor --collect removes them"
                )
            self._threads.close()

    def _remove_waiting(self) -> None:
        """Remove all that has arrived since the last request, in one request."""
        with self._lock:
            names, self._waiting = self._waiting, []
        self._remove(names)

    def _remove(self, names: Sequence[str]) -> None:
        self._payloads.discard(names)
        hit("removed", len(names))


def _ended(item: WorkItem, message: TaskMessage) -> Iterator[str]:
    """The names of the payloads that belong to an item's task, if it has ended for good."""
    outcome = item.outcome
    if not item.settled or outcome is None or not outcome.state.final:
        return
    at_most_once = item.task is not None and item.task.delivery == "at-most-once"
    if isinstance(item.settlement, DeadLetter) and not at_most_once:
        return
    references = [message.payload] if message.payload is not None else []
    if (saved := stored_in(message.saved)) is not None:
        references.append(str(saved))
    yield from owned(references, message.id)
