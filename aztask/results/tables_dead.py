"""The index of dead letters in the table: one partition for each queue.

A letter has two rows, written and deleted together: ``n-NUMBER`` with the letter, in the order of
the notes, and ``k-KEY`` with its number. Numbers are nanoseconds of the writer's clock: where the
clocks of two workers differ, a letter that is noted while somebody pages through them may come
before the place he has reached, and is seen the next time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import msgpack

from aztask.brokers.local_payload import envelope_of
from aztask.results.deadindex import NotedDead
from aztask.results.local_deadindex import payload_of_dead
from aztask.results.tables_client import Call, Requests
from aztask.results.tables_errors import Gone, There, Unsure
from aztask.results.tables_rows import INLINE_BYTES, key_text

TRIES: Final = 5
BATCH: Final = 256
PAGE: Final = 1000


class TablesDeadIndex:
    """See the protocol, `aztask.results.deadindex.DeadIndex`."""

    def __init__(self, requests: Requests, now: Callable[[], int] = time.time_ns) -> None:
        """now: nanoseconds, injected in tests."""
        self._requests = requests
        self._now = now

    def note(self, letters: Sequence[NotedDead]) -> None:
        """Keep these; one that is known already stays as it was noted first."""
        for first in range(0, len(letters), BATCH):
            self._requests.each(Call(), self._note, letters[first : first + BATCH])

    def page(self, queue: str, after: int, limit: int) -> list[NotedDead]:
        """Up to `limit` notes of the queue behind the number `after`, in order."""
        rows = self._requests.query(
            Call(),
            "PartitionKey eq @queue and RowKey gt @after and RowKey lt @end",
            {"queue": _partition(queue), "after": _number(after), "end": "n-~"},
            limit,
        )
        return [_letter(queue, row) for row in rows]

    def drop(self, queue: str, keys: Collection[str]) -> None:
        """These are gone."""
        known = sorted(keys)
        for first in range(0, len(known), BATCH):
            self._requests.each(
                Call(), lambda call, key: self._drop(call, queue, key), known[first : first + BATCH]
            )

    def keep_only(self, queue: str, keys: Collection[str], before: float) -> int:
        """Drop the notes made before that time whose dead letters are not among `keys`."""
        after, dropped = "n-", 0
        while True:
            page = self._requests.query(
                Call(),
                "PartitionKey eq @queue and RowKey gt @after and RowKey lt @end",
                {"queue": _partition(queue), "after": after, "end": "n-~"},
                PAGE,
                ("RowKey", "key", "at"),
            )
            old = [_unpacked(row["key"]) for row in page if row["at"] < before]
            gone = [key for key in old if key not in keys]
            self.drop(queue, gone)
            dropped += len(gone)
            if len(page) < PAGE:
                return dropped
            after = page[-1]["RowKey"]

    def _note(self, call: Call, letter: NotedDead) -> None:
        """One letter. If the process dies here, both rows are there or none."""
        partition, row = _partition(letter.queue), _key(letter.key)
        for _ in range(TRIES):
            if self._requests.read(call, partition, row) is not None:
                return
            number = self._now()
            known = {"PartitionKey": partition, "RowKey": row, "number": _number(number)}
            try:
                self._requests.together(
                    call, [("create", known), ("create", _entity(letter, number))]
                )
            except (There, Unsure):
                continue  # noted meanwhile, or another letter has this number
            return
        if self._requests.read(call, partition, row) is None:
            raise call.unavailable(self._requests.place)

    def _drop(self, call: Call, queue: str, key: str) -> None:
        partition, row = _partition(queue), _key(key)
        for _ in range(TRIES):
            known = self._requests.read(call, partition, row)
            if known is None:
                return
            rows = [{"PartitionKey": partition, "RowKey": each} for each in (row, known["number"])]
            try:
                self._requests.together(call, [("delete", each) for each in rows])
            except (Gone, Unsure):
                continue  # somebody else's, or ours whose answer was lost
            return
        raise call.unavailable(self._requests.place)


def _partition(queue: str) -> str:
    return f"d-{key_text(queue)}"


def _key(key: str) -> str:
    return f"k-{key_text(key)}"


def _number(number: int) -> str:
    return f"n-{number:020d}"


def _entity(letter: NotedDead, number: int) -> dict[str, Any]:
    """The letter; its envelope in as many properties as it takes."""
    data = payload_of_dead(letter.envelope)
    parts = {
        f"envelope{index}": data[first : first + INLINE_BYTES]
        for index, first in enumerate(range(0, len(data), INLINE_BYTES))
    }
    return {
        "PartitionKey": _partition(letter.queue),
        "RowKey": _number(number),
        "key": _packed(letter.key),
        "why": _packed((letter.reason, letter.description)),
        "at": float(letter.at),
        "delivery_count": letter.delivery_count,
        "parts": len(parts),
        **parts,
    }


def _letter(queue: str, row: Mapping[str, Any]) -> NotedDead:
    reason, description = _unpacked(row["why"])
    data = b"".join(row[f"envelope{index}"] for index in range(row["parts"]))
    return NotedDead(
        queue,
        envelope_of(data),
        reason,
        description,
        row["at"],
        row["delivery_count"],
        int(row["RowKey"].removeprefix("n-")),
    )


def _packed(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return packed


def _unpacked(data: bytes) -> Any:
    return msgpack.unpackb(data, unicode_errors="surrogatepass")
