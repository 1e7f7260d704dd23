"""Many invocations of one task: their common part is encoded only once.

Rules
1. An envelope made here equals, byte for byte, the one that
   `aztask.message.codec.Codec.to_envelope` makes of the same message; a test compares the two.
2. Each invocation has only keyword arguments, made from the columns of a table's row.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any

from aztask.message import serializer as formats
from aztask.message.codec import Codec
from aztask.message.envelope import Envelope
from aztask.message.message import MESSAGE_DEFAULTS, TaskMessage, build
from aztask.support.display import short_repr

_NO_ARGUMENTS: tuple[Any, ...] = ()
_NO_EMBED: dict[str, Any] = {}


class Template:
    """Makes envelopes for invocations of one task on one queue. Not thread-safe."""

    def __init__(
        self,
        codec: Codec,
        task: str,
        queue: str,
        *,
        delay: float = 0.0,
        expires_at: float | None = None,
        secret: bool = False,
    ) -> None:
        """Raises EncodeError for a name or a time that no reader would accept.

        * `secret`: the task has secret arguments, so that none is written as text.
        * `delay`: seconds until the invocations may start.
        * `expires_at`: UTC epoch seconds.
        """
        self._codec = codec
        self._shows = codec.argsrepr and not secret
        self._task = task
        self._queue = queue
        self._delay = delay
        self._expires_at = expires_at
        self._origin = f"{os.getpid()}@{socket.gethostname()}"
        self._plain = not codec.signs and not codec.encrypts
        self._quick = self._plain and codec.content_type == formats.MSGPACK
        self._small = min(codec.limits.depth, codec.limits.items, codec.limits.body_bytes)
        sample = self._slow("sample", {})
        self._envelope = dict(vars(sample))
        self._headers = dict(sample.headers)

    def envelope(self, task_id: str, kwargs: dict[str, Any]) -> Envelope:
        """The envelope of one invocation.

        * `task_id`: 1 to 100 plain characters, such as a UUID.

        Raises EncodeError (a value without an encoding, a wrong keyword), ContentRefused.
        """
        if not self._plain:
            return self._slow(task_id, kwargs)
        body, _, _ = self._codec.encode_arguments(_NO_ARGUMENTS, kwargs)
        headers = self._headers.copy()
        headers["id"] = headers["root_id"] = task_id
        if self._shows:
            headers["kwargsrepr"] = _shown(kwargs, body)
        values = self._envelope.copy()
        values["body"] = body
        values["headers"] = headers
        values["message_id"] = self._codec.keyed_id(f"{task_id}:0:0")
        values["correlation_id"] = task_id
        return build(Envelope, values)

    def envelopes(
        self, task_ids: Iterable[str], names: Sequence[str], rows: Iterable[Sequence[Any]]
    ) -> list[Envelope]:
        """The envelopes of many invocations: `names` are the keywords of each row's values.

        Raises what `envelope` raises, or the encoder's own TypeError, ValueError or OverflowError,
        without saying for which row: call `envelope` for each to find out.
        """
        if not self._quick or not names:
            return [
                self.envelope(task_id, dict(zip(names, row, strict=True)))
                for task_id, row in zip(task_ids, rows, strict=True)
            ]
        made = []
        pack, small, check = formats.pack, self._small, self._codec.check_written
        checked, shows = False, self._shows
        for task_id, row in zip(task_ids, rows, strict=True):
            kwargs = dict(zip(names, row, strict=True))
            if not checked:  # the names are the same in all rows
                self._codec.encode_arguments(_NO_ARGUMENTS, kwargs)
                checked = True
            body = pack((_NO_ARGUMENTS, kwargs, _NO_EMBED))
            if len(body) >= small:
                check(body, formats.MSGPACK)
            formats.check_keys(body)
            headers = {**self._headers, "id": task_id, "root_id": task_id}
            if shows:
                headers["kwargsrepr"] = _shown(kwargs, body)
            values = {**self._envelope, "body": body, "headers": headers}
            values["message_id"] = self._codec.keyed_id(f"{task_id}:0:0")
            values["correlation_id"] = task_id
            made.append(build(Envelope, values))
        return made

    def message(self, task_id: str, kwargs: dict[str, Any]) -> TaskMessage:
        """The message that `envelope` would write."""
        body, content_type, content_encoding = self._codec.encode_arguments(_NO_ARGUMENTS, kwargs)
        values = {
            **MESSAGE_DEFAULTS,
            "id": task_id,
            "task": self._task,
            "queue": self._queue,
            "body": body,
            "content_type": content_type,
            "content_encoding": content_encoding,
            "root_id": task_id,
            "expires": self._expires_at,
            "origin": self._origin,
        }
        if self._shows:
            values |= {"argsrepr": "()", "kwargsrepr": _shown(kwargs, body)}
        return build(TaskMessage, values)

    def _slow(self, task_id: str, kwargs: dict[str, Any]) -> Envelope:
        return self._codec.to_envelope(self.message(task_id, kwargs), delay=self._delay)


def _shown(kwargs: dict[str, Any], body: bytes) -> str:
    return short_repr(kwargs, len(body)) if kwargs else "{}"
