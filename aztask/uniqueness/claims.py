"""What the result store keeps of the holder of a key, packed by msgpack."""

from __future__ import annotations

from dataclasses import dataclass, fields

import msgpack

from aztask.stores.records.damage import Columns, Damaged

VERSION = 1


@dataclass(frozen=True, slots=True)
class KeyClaim:
    """The holder of a key. Times are UTC epoch seconds.

    * `task_id`, `generation`: the task.
    * `until`: "started", "finished", "quiet", or "" for a time.
    * `taken_at`: when it took the key; `ends_at`: when the key is free, whatever happened.
    * `queue`, `payload`: its signed message until it is sent, then "" and b"".
    * `due_at`: when the message may be received.
    * `closing`: a debounced message is being sent; the next call is another task.
    """

    task_id: str
    generation: int
    until: str
    taken_at: float
    ends_at: float
    queue: str = ""
    payload: bytes = b""
    due_at: float = 0.0
    closing: bool = False

    @property
    def sent(self) -> bool:
        """True once the broker has accepted the message."""
        return not self.payload

    def pack(self) -> bytes:
        """The claim as bytes; `read_claim` reads them."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        packed: bytes = msgpack.packb({"v": VERSION, **values})
        return packed


def read_claim(data: bytes) -> KeyClaim:
    """The claim that `KeyClaim.pack` wrote. Raises Damaged."""
    found = Columns({"holder": data}).unpacked("holder")
    if not isinstance(found, dict) or found.get("v") != VERSION:
        raise Damaged("the holder of a unique task is wrong; a newer aztask may know it")
    columns = Columns(found)
    return KeyClaim(
        columns.text("task_id"),
        columns.count("generation"),
        columns.text("until"),
        columns.time("taken_at"),
        columns.time("ends_at"),
        columns.text("queue"),
        columns.data("payload") or b"",
        columns.time("due_at"),
        columns.flag("closing"),
    )
