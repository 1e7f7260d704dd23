"""Rows about operations in the result store: the audit, jobs, mutes, and what watchers sent.

Rules
1. Rows belong to the broker, as runs do: whatever program acts on its queues writes to one ledger.
2. Keys of the audit and of jobs begin with the time, counted backwards: the newest comes first, and
   a page ends with a key behind which the next one begins. What one process adds at one time of the
   store, which may be a whole second, is ordered by a count.
3. Both are kept for `KEPT_SECONDS`. Who adds one removes a few that are older.
4. A row that another program wrote, or a newer release, is reported as damaged and hides no other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, Final

from aztask.address.owner import NO_OWNER, Owner
from aztask.message.headers import TIME_LIMIT
from aztask.stores.layout import SqlLayout, TablesLayout
from aztask.stores.records.owners import is_other_broker
from aztask.stores.rows import Change, KeepsRows, Kind, Place, Row, RowStore, move_rows
from aztask.support import chance

_STEPS: Final = (
    """
    CREATE TABLE operations (
        part TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL, data BLOB NOT NULL,
        PRIMARY KEY (part, key))
    WITHOUT ROWID;
    """,
)
_OWNED_STEPS: Final = (
    """
    CREATE TABLE owned_operations (
        broker TEXT NOT NULL, part TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL,
        data BLOB NOT NULL, PRIMARY KEY (broker, part, key))
    WITHOUT ROWID;
    """,
)
OPERATIONS: Final = Kind(
    {"data": bytes},
    SqlLayout(
        "owned_operations",
        "operations",
        "part",
        "key",
        steps={"operations": _STEPS, "owned_operations": _OWNED_STEPS},
    ),
    TablesLayout("O", "o"),
    long="data",
)

AUDIT: Final = "audit"
WATCH: Final = "watch"
JOBS: Final = "jobs"
MUTES: Final = "mutes"

VERSION: Final = 1
KEPT_SECONDS: Final = 90 * 86400.0
REMOVED: Final = 20
"""Old rows that are removed for each one that is added."""
_END: Final = 10**14 - 1
_LAST: Final = 10**8 - 1


_added = count(1)


def newest_first(at: float) -> str:
    """A key of its own for a time; later times come first, and later calls in this process.

    at: UTC epoch seconds.
    """
    return f"{_before(at)}-{_LAST - next(_added) % _LAST:08d}{chance.token(12)}"


def _before(at: float) -> str:
    return f"{max(0, _END - int(at * 1000)):014d}"


def packed(record: Mapping[str, Any]) -> bytes:
    """A record as the bytes of a row."""
    return json.dumps({"v": VERSION, **record}, separators=(",", ":")).encode()


def unpacked(row: Row) -> Mapping[str, Any] | None:
    """The record in a row; None if it is damaged, or of a newer release.

    A number that no time can be is damage, too: what shows it could not.
    """
    data = row.values.get("data")
    try:
        found = (
            json.loads(data, parse_float=_number, parse_constant=_number)
            if isinstance(data, bytes)
            else None
        )
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("v") == VERSION else None


def _number(text: str) -> float:
    """Raises ValueError for infinity, and for what no time can be; false for nan, too."""
    number = float(text)
    if not -TIME_LIMIT < number < TIME_LIMIT:
        raise ValueError(f"{text} is out of range")
    return number


class Ledger:
    """The ledger of one broker. Any thread may call. All methods raise BrokerUnavailable."""

    def __init__(self, store: RowStore, owner: Owner) -> None:
        self._store = store
        self._owner = owner.of_broker
        self._rows = store.of(OPERATIONS)

    def now(self) -> float:
        """The store's time, which all who write share; UTC epoch seconds."""
        return self._store.now()

    def get(self, part: str, keys: Sequence[str]) -> list[Row | None]:
        """The rows with these keys, in order; None for missing ones."""
        return self._rows.get([Place(self._owner, part, key) for key in keys])

    def page(self, part: str, limit: int, after: str = "") -> list[Row]:
        """Up to `limit` rows in the order of their keys, behind the key `after`."""
        # A key that follows `after` directly: keys have none of the characters below "-".
        first = f"{after}-" if after else ""
        return self._rows.range(self._owner, part, first, limit=limit)

    def write(self, part: str, key: str, data: bytes | None, before: Row | None) -> Row | None:
        """Make, replace or delete a row; None if `before` is not the current version."""
        values = None if data is None else {"data": data}
        return self._rows.write(Change(Place(self._owner, part, key), values, before))

    def put(self, part: str, key: str, data: bytes) -> None:
        """Write a row, whatever is there."""
        self._rows.put(Place(self._owner, part, key), {"data": data})

    def remove(self, part: str, keys: Sequence[str]) -> None:
        """Delete the rows with these keys, whatever is there."""
        self._rows.remove([Place(self._owner, part, key) for key in keys])

    def old(self, part: str, at: float) -> list[str]:
        """Some keys of rows that were kept long enough at this time."""
        first = _before(at - KEPT_SECONDS)
        found = self._rows.range(self._owner, part, first, limit=REMOVED, short=True)
        return [row.place.key for row in found]

    def owners(self) -> set[Owner]:
        """Whose rows are in the store."""
        return self._rows.owners()

    def adopt(self, old: Owner) -> int:
        """Make the rows of another owner's broker ours; returns how many were found."""
        if not is_other_broker(self._owner, old):
            return 0
        return move_rows(self._store, self._rows, old.of_broker, self._owner)


def ledger_of(results: object) -> Ledger | None:
    """The ledger in a result store; None if there is no store, or if it keeps none."""
    if not isinstance(results, KeepsRows):
        return None
    return Ledger(results.rows, results.owner or NO_OWNER)
