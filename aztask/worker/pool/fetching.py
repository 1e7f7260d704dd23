"""Payloads in a pool process: fetches the arguments of a task, stores its result.

The pool process fetches and stores, so the worker's memory does not grow with the payloads.

Rules
1. A payload that is gone or was changed makes a dead letter, which says so.
2. If the store of the payloads cannot be reached, the task is put off, and that is not counted as
   a failure: `PAUSE_SECONDS` at first, `LONGEST_PAUSE` at most.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from aztask.app import App
from aztask.errors import (
    AztaskError,
    CodecError,
    ContentRefused,
    PayloadDamaged,
    PayloadMissing,
    Snooze,
)
from aztask.message.message import TaskMessage
from aztask.message.payload import MARK, StoredValue, stored_in
from aztask.retry import UNDECODABLE
from aztask.settlement import DeadLetter
from aztask.stores.payloads.holders import result_owner
from aztask.stores.payloads.payloads import owned
from aztask.stores.payloads.store import PayloadKind
from aztask.support.failpoint import hit_in_pool
from aztask.task import Task

PAYLOAD_MISSING: Final = "payload-missing"
PAYLOAD_DAMAGED: Final = "payload-damaged"
PAUSE_SECONDS: Final = 5.0
LONGEST_PAUSE: Final = 300.0


class PayloadUnavailable(AztaskError):
    """The store of the payloads cannot be reached now; the task is put off."""

    def put_off(self, message: TaskMessage) -> Snooze:
        """The request to run the task later."""
        return Snooze(min(LONGEST_PAUSE, PAUSE_SECONDS * 2 ** min(message.snooze_count, 10)))


class Fetching:
    """Fetches and stores for the slots of one pool process. Any thread may call.

    * `large`: whether large values can be stored.
    * `result_bytes`, `checkpoint_bytes`: encoded values of more bytes are stored apart.
    """

    def __init__(self, app: App, worker: int) -> None:
        """worker: the process id of the worker."""
        self._codec = app.codec
        self._payloads = app.payloads
        self._worker = worker
        payloads = app.payloads
        self.large = payloads is not None
        self.result_bytes = payloads.result_threshold if payloads is not None else sys.maxsize
        self.checkpoint_bytes = (
            payloads.checkpoint_threshold if payloads is not None else sys.maxsize
        )

    def needed(self, message: TaskMessage, given: object) -> bool:
        """True if reading the call of this message may fetch something."""
        if self._payloads is None:
            return False
        return (
            message.payload is not None
            or bool(given)
            or MARK in message.body
            or stored_in(message.saved) is not None
        )

    def arguments(
        self, task: Task[..., Any], message: TaskMessage
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in a message. Raises CodecError, BrokerUnavailable."""
        if message.payload is None and MARK not in message.body:
            return task.arguments(self._codec, message)
        if message.payload is not None:
            message = self._filled(message)
        args, kwargs = task.arguments(self._codec, message)
        if MARK in message.body:
            args = tuple(self._codec.resolved(value) for value in args)
            kwargs = {name: self._codec.resolved(value) for name, value in kwargs.items()}
        return args, kwargs

    def _filled(self, message: TaskMessage) -> TaskMessage:
        if self._payloads is None:
            where = StoredValue.parse(message.payload or "").described
            raise ContentRefused(
                f"the arguments are stored apart, {where}, and this worker has no store for"
                " them: give its App the payloads=... of the sender, then replay this"
            )
        message = self._payloads.filled(message)
        hit_in_pool("loaded", self._worker)
        return message

    def stored(self, kind: PayloadKind, data: bytes, task_id: str) -> bytes:
        """Store an encoded value apart; returns the encoded reference. Raises BrokerUnavailable.

        * `task_id`: the task whose result or checkpoint it is.
        """
        if self._payloads is None:
            return data
        owner = result_owner(task_id) if kind is PayloadKind.RESULT else task_id
        stored = self._payloads.keep(kind, data, owner=owner)
        if kind is PayloadKind.RESULT:
            hit_in_pool("result-stored", self._worker)
        return self._codec.encode_value(stored)

    def discard(self, data: bytes | None, task_id: str) -> None:
        """Remove the checkpoint that an encoded value refers to, if it is one of this task.

        A value of `App.put`, which the task gave as its checkpoint, stays.
        """
        stored = stored_in(data) if self._payloads is not None else None
        if stored is not None and self._payloads is not None:
            self._payloads.discard(owned([str(stored)], task_id))


def undecodable(cause: CodecError) -> DeadLetter:
    """The dead letter of a message whose call cannot be read."""
    reason = UNDECODABLE
    if isinstance(cause, PayloadMissing):
        reason = PAYLOAD_MISSING
    elif isinstance(cause, PayloadDamaged):
        reason = PAYLOAD_DAMAGED
    return DeadLetter(reason, str(cause))
