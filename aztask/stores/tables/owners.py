"""Owners in the table: where rows with an owner are, and which owners have some.

The partitions of rows with an owner begin with a capital letter and the owner's mark, such as
``U-MARK-SHARD`` for ``u-SHARD``: the release before reads none of them. Each row has the owner's
broker and app as properties, too, since a mark cannot be read back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aztask.address.owner import Owner
from aztask.stores.tables.client import TableRequests, TimeBudget
from aztask.support.clock import Clock

LOOK_SECONDS: Final = 60.0
"""Seconds between two looks for rows without an owner."""

MIXED_SECONDS: Final = 600.0
"""Seconds after the last one was seen for which all keys are looked up in both places."""

_MOST_OWNERS: Final = 1000
_NAMES: Final = ("PartitionKey", "RowKey")


class UnownedRows:
    """Remembers whether rows without an owner may exist, so that usual calls do not look for them.

    At most one request a minute. So rows of a former release are noticed within a minute of the
    first one; from then on they are noticed at once, until none was seen for ten minutes.
    """

    def __init__(self, requests: TableRequests, unowned: str, clock: Clock) -> None:
        """`unowned`: how the partitions of such rows begin, before the ``-``."""
        self._requests = requests
        self._unowned = unowned
        self._clock = clock
        self._look_at: float | None = None
        self._until = 0.0

    def may_exist(self) -> bool:
        """True if there may be some. Raises BrokerUnavailable."""
        now = self._clock.monotonic()
        if self._look_at is None or now >= self._look_at:
            if self.exist():
                self.seen()
            self._look_at = now + LOOK_SECONDS
        return now < self._until

    def exist(self) -> bool:
        """True if there is one now: one request."""
        return exists(self._requests, f"{self._unowned}-", f"{self._unowned}.")

    def seen(self) -> None:
        """Note that there is one."""
        self._until = self._clock.monotonic() + MIXED_SECONDS


def exists(requests: TableRequests, first: str, last: str) -> bool:
    """True if a partition from `first` to before `last` has a row: one request."""
    text = "PartitionKey ge @first and PartitionKey lt @last"
    return bool(requests.query(TimeBudget(), text, {"first": first, "last": last}, 1, _NAMES))


def owners_in(requests: TableRequests, letter: str) -> set[Owner]:
    """The owners of the partitions ``LETTER-MARK-...``: one request for each of them."""
    found: set[Owner] = set()
    after = f"{letter}-"
    text = "PartitionKey ge @after and PartitionKey lt @last"
    for _ in range(_MOST_OWNERS):
        values = {"after": after, "last": f"{letter}."}
        names = (*_NAMES, "broker", "app")
        rows = requests.query(TimeBudget(), text, values, 1, names)
        if not rows:
            break
        owner = owner_of(rows[0])
        if owner.known:
            found.add(owner)
        mark = str(rows[0]["PartitionKey"]).split("-")[1]
        after = f"{letter}-{mark}."  # "." comes after "-", so this is behind all rows of the mark
    return found


def owner_of(row: Mapping[str, Any]) -> Owner:
    """The owner that a row names."""
    broker, app = row.get("broker"), row.get("app")
    return Owner(
        broker if isinstance(broker, str) else "", app if isinstance(app, str) and broker else ""
    )
