"""The index of dead letters in the table: one partition for each queue.

A dead letter has two rows, written and deleted together: ``n-NUMBER`` with the letter, in the order
of the notes, and ``k-KEY`` with its number. Numbers are nanoseconds of the writer's clock. If the
clocks of two workers differ, a note that is made while you page through the index may get a number
that you have passed; the next listing shows it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import msgpack

from aztask.results.damage import Columns, Damaged
from aztask.results.deadindex import IndexedDeadLetter, damaged_note, read_note
from aztask.results.local.deadindex import payload_of_dead
from aztask.results.tables.client import TableRequests, TimeBudget
from aztask.results.tables.errors import AlreadyExists, OutcomeUnknown, RowNotFound
from aztask.results.tables.names import key_text
from aztask.results.tables.rows import INLINE_BYTES

TRIES: Final = 5
BATCH: Final = 256
PAGE: Final = 1000
PARTS: Final = 250
"""Properties for the envelope: a row has 252 properties at most."""
_WHY: Final = ("reason", "description")
_NUMBER: Final = re.compile(r"n-[0-9]{20}")


class TablesDeadIndex:
    """The implementation of `aztask.results.deadindex.DeadIndex` in Azure Tables."""

    def __init__(self, requests: TableRequests, now: Callable[[], int] = time.time_ns) -> None:
        """`now`: a clock in nanoseconds, injected in tests."""
        self._requests = requests
        self._now = now

    def note(self, letters: Sequence[IndexedDeadLetter]) -> None:
        """Store these notes; an existing note of the same key stays as it is."""
        for first in range(0, len(letters), BATCH):
            self._requests.each(TimeBudget(), self._note, letters[first : first + BATCH])

    def page(self, queue: str, after: int, limit: int) -> list[IndexedDeadLetter]:
        """Up to `limit` notes of the queue after the number `after`, in order."""
        last = _number(after)
        while rows := self._rows(queue, last, limit):
            letters = [_letter(queue, row) for row in rows if _NUMBER.fullmatch(row["RowKey"])]
            if letters:
                return letters
            last = rows[-1]["RowKey"]
        return []

    def _rows(
        self, queue: str, after: str, limit: int, select: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        return self._requests.query(
            TimeBudget(),
            "PartitionKey eq @queue and RowKey gt @after and RowKey lt @end",
            {"queue": _partition(queue), "after": after, "end": "n-~"},
            limit,
            select,
        )

    def drop(self, queue: str, keys: Collection[str]) -> None:
        """Delete the notes with these keys."""
        known = sorted(keys)
        for first in range(0, len(known), BATCH):
            self._requests.each(
                TimeBudget(),
                lambda call, key: self._drop(call, queue, key),
                known[first : first + BATCH],
            )

    def keep_only(self, queue: str, keys: Collection[str], before: float) -> int:
        """Delete notes made before `before` whose keys are not among `keys`; returns how many.

        A note whose key is damaged is deleted together with the last ones.
        """
        after, dropped = "n-", 0
        while True:
            page = self._rows(queue, after, PAGE, ("RowKey", "key", "at"))
            gone = [row for row in page if _is_gone(row, keys, before)]
            for first in range(0, len(gone), BATCH):
                self._requests.each(
                    TimeBudget(),
                    lambda call, row: self._delete(call, queue, row.get("key"), row["RowKey"]),
                    gone[first : first + BATCH],
                )
            dropped += len(gone)
            if len(page) < PAGE:
                return dropped
            after = page[-1]["RowKey"]

    def _note(self, call: TimeBudget, letter: IndexedDeadLetter) -> None:
        """Write one note. If the process dies here, both rows exist or neither."""
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
            except (AlreadyExists, OutcomeUnknown):
                continue  # another worker noted it first, or another letter has this number
            return
        if self._requests.read(call, partition, row) is None:
            raise call.unavailable(self._requests.place)

    def _drop(self, call: TimeBudget, queue: str, key: str) -> None:
        known = self._requests.read(call, _partition(queue), _key(key))
        if known is not None:
            self._delete(call, queue, _packed(key), known.get("number"))

    def _delete(self, call: TimeBudget, queue: str, packed: object, number: object) -> None:
        """Delete both rows of a note, in one request if both exist. Neither name is trusted."""
        key = _key_in(packed)
        names = [] if key is None else [_key(key)]
        if isinstance(number, str) and _NUMBER.fullmatch(number):
            names.append(number)
        if not names:
            return
        rows: list[tuple[str, dict[str, Any]]] = [
            ("delete", {"PartitionKey": _partition(queue), "RowKey": name}) for name in names
        ]
        try:
            self._requests.together(call, rows)
        except (RowNotFound, OutcomeUnknown):
            # One of them is gone, or both are, by a request whose answer was lost.
            for name in names:
                self._requests.delete(call, _partition(queue), name)


def _partition(queue: str) -> str:
    return f"d-{key_text(queue)}"


def _key(key: str) -> str:
    return f"k-{key_text(key)}"


def _number(number: int) -> str:
    return f"n-{number:020d}"


def _entity(letter: IndexedDeadLetter, number: int) -> dict[str, Any]:
    """The note's row; its envelope takes as many properties as it needs."""
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


def _letter(queue: str, row: Mapping[str, Any]) -> IndexedDeadLetter:
    """The note in a row, damaged or not."""
    number, key = int(row["RowKey"].removeprefix("n-")), _key_in(row.get("key"))
    columns = Columns(row)
    try:
        names = [f"envelope{index}" for index in range(columns.count("parts", most=PARTS))]
        envelope = b"".join(columns.data(name) or b"" for name in names)
        why = columns.unpacked("why")
        if not isinstance(why, list) or len(why) != len(_WHY):
            raise Damaged("its reason is missing or wrong")
    except Damaged as damage:
        return damaged_note(queue, number, key, damage)
    texts = dict(zip(_WHY, why, strict=True))
    return read_note(queue, number, {**row, **texts, "key": key, "envelope": envelope})


def _is_gone(row: Mapping[str, Any], keys: Collection[str], before: float) -> bool:
    """True for a note made before that time whose dead letter is not among `keys`."""
    try:
        old = Columns(row).time("at") < before
    except Damaged:
        old = True
    key = _key_in(row.get("key"))
    return old and (not keys if key is None else key not in keys)


def _key_in(packed: object) -> str | None:
    """The key of a note; None if it is damaged."""
    try:
        found = Columns({"key": packed}).unpacked("key")
    except Damaged:
        return None
    return found if isinstance(found, str) else None


def _packed(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return packed
