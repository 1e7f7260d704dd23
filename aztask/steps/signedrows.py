"""The signatures of rows that belong to one task: its steps, its signals, the parts of its stream.

Rules
1. With signing keys, a row is signed for its place. One that was changed, or copied from another
   place, is refused.
2. A row without a signature is obeyed until ``old_signatures=False``: a program without keys wrote
   it. So keys may come to one process after the other.
3. A program without keys reads signed rows, too. It verifies nothing.
4. With encryption, the data are encrypted for their task and their place, as a message is that is
   stored. Without the key, reading raises BrokerUnavailable: the task waits for a worker that has
   it.
"""

from __future__ import annotations

from typing import Final

from aztask.errors import ContentRefused
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.message.signatures import STORED
from aztask.queues.local.payload import envelope_of, payload_of
from aztask.stores.records.damage import Damaged
from aztask.stores.rows import Place, Row

_MARK: Final = STORED.encode()
_UNSIGNED: Final = (
    "it is not signed, and old_signatures is False: a program without signing keys wrote it"
)


class SignedRows:
    """Signs the data of one kind of row, and opens what is believed. Any thread may call."""

    def __init__(self, codec: Codec, kind: str, *, keys_name_tasks: bool = False) -> None:
        """For one kind of row.

        * `codec`: signs, if it has keys. `kind`: such as ``step``; it is part of the signature.
        * `keys_name_tasks`: the key of a row says whose it is, so its signature covers that alone.
        """
        self._codec = codec
        self._kind = kind
        self._whole = not keys_name_tasks

    def closed(self, task_id: str, place: Place, data: bytes) -> bytes:
        """The data with their signature; without keys, as they are."""
        if not self._codec.signs:
            return data
        message = TaskMessage(task_id, self._kind, "", data)
        return payload_of(self._codec.to_envelope(message, stored=self._signed_for(place)))

    def opened(self, row: Row) -> bytes:
        """The data of a row, as `closed` got them. Raises ContentRefused, DecodeError, Damaged."""
        data = row.values["data"]
        if not isinstance(data, bytes):
            raise Damaged("the row has no data")
        envelope = envelope_of(data) if _MARK in data else None
        if envelope is not None and STORED in envelope.content_type:
            stored = self._signed_for(row.place)
            if not self._codec.signs:
                return self._codec.from_unsigned(envelope, "", stored=stored).body
            return self._codec.from_envelope(envelope, "", any_age=True, stored=stored).body
        if self._codec.signs and not self._codec.takes_old:
            raise ContentRefused(_UNSIGNED)
        return data

    def _signed_for(self, place: Place) -> str:
        of = f" of {place.partition}" if self._whole else ""
        return f"{self._kind} {place.key}{of}"
