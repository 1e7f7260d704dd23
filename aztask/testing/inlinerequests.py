"""The requests of tasks that run inline: checkpoints, session state, longer leases."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from aztask.app import App
from aztask.context import TaskLease
from aztask.errors import AztaskError, MessageTooLarge
from aztask.queues.base import SessionHolder
from aztask.queues.delivery import Renewed
from aztask.queues.lease.keeper import LeaseKeeper
from aztask.support.clock import Clock
from aztask.worker.pipeline.work import WorkItem, message_of
from aztask.worker.pool.answers import LOST, TOO_LARGE, Answers
from aztask.worker.pool.requests import RETRY_RESERVE


class InlineRequests:
    """Takes the packets that a pool process would send, and answers at once."""

    def __init__(self, app: App, keeper: LeaseKeeper, clock: Clock) -> None:
        self._app = app
        self._keeper = keeper
        self._clock = clock
        self._lock = threading.Lock()
        self._running: dict[int, tuple[WorkItem, TaskLease]] = {}
        self.answers = Answers()

    @contextmanager
    def of(self, item: WorkItem, lease: TaskLease) -> Iterator[None]:
        """In the block, requests about this delivery are answered."""
        self._running[item.number] = (item, lease)
        try:
            yield
        finally:
            del self._running[item.number]

    def send(self, packet: list[Any]) -> None:
        """Carry out a request: see the packets of `aztask.worker.pool.runner`."""
        kind, number, *details = packet
        item, lease = self._running[number]
        if kind == "extend":
            lease.renewed(max(item.delivery.deadline, self._clock.monotonic() + details[0]))
            return
        error, value = "", None
        try:
            with self._lock:
                if kind == "save":
                    error = self._save(item, details[0])
                else:
                    value = self._exchange(item, kind, *details)
        except MessageTooLarge as problem:
            error = f"{TOO_LARGE}{problem}"
        except AztaskError as problem:
            error = str(problem)
        self.answers.answer(number, error, value)

    def _save(self, item: WorkItem, state: bytes) -> str:
        envelope = self._app.codec.to_envelope(replace(message_of(item), saved=state))
        self._app.broker.check(envelope, reserve=RETRY_RESERVE)
        if not isinstance(self._keeper.update(item.lease, item.receiver, envelope), Renewed):
            return LOST
        item.rewrite(saved=state)
        return ""

    @staticmethod
    def _exchange(item: WorkItem, kind: str, *details: Any) -> bytes | None:
        holder, session = item.receiver, item.delivery.session or ""
        assert isinstance(holder, SessionHolder)  # noqa: S101  # the local broker has sessions
        if kind == "state":
            return holder.session_state(session)
        holder.set_session_state(session, details[0])
        return None
