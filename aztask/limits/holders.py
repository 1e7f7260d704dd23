"""Who holds the permits of a concurrency limit: one entry in the result store, and nothing else.

Rules
1. Each worker has a row: how many permits it holds, until when, and since when it waits for more.
   The sum of the permits whose time has not come never exceeds the limit. Workers under one name
   have a row each (`holder_of`).
2. A worker renews its row before its time comes. If it dies, its permits are free when it has come.
3. Nothing here does I/O but `usage_of`; every change of the entry is a compare-and-set.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from aztask.limits.declaration import Limit
from aztask.limits.rates import RateState
from aztask.stores.records.controls import ControlStore
from aztask.support import chance

LEASE_SECONDS: Final = 10.0
"""How long a row is valid unless it is renewed."""

STOP_SECONDS: Final = 2.0
"""How long before that, a task must begin to stop: the grace of its process, and the clocks."""

RENEW_SECONDS: Final = 3.0

VERSION: Final = 1


_HOLDER: Final = re.compile(r"(.+)#[0-9a-f]{8}", re.DOTALL)


def holder_of(worker: str, incarnation: str) -> str:
    """The name under which a worker holds something: two workers may have one name."""
    return f"{worker}#{incarnation}"


def worker_of(holder: str) -> str:
    """The name of the worker, for people; releases before 0.2 held things under that name."""
    found = _HOLDER.fullmatch(holder)
    return found[1] if found else holder


@dataclass(frozen=True, slots=True)
class HolderRow:
    """A worker's row. `until`: in the store's UTC epoch seconds.

    `ticket`: since when its oldest delivery waits, for a worker that holds none; else None.
    """

    count: int
    until: float
    ticket: float | None = None


@dataclass(frozen=True, slots=True)
class Holders:
    """The state of a limit's entry, by worker."""

    rows: Mapping[str, HolderRow] = field(default_factory=dict)

    def valid(self, now: float) -> Holders:
        """The rows whose time has not come."""
        return Holders({name: row for name, row in self.rows.items() if row.until > now})

    def others(self, worker: str) -> int:
        """How many permits the other workers hold. Call `valid` first."""
        return sum(row.count for name, row in self.rows.items() if name != worker)

    def waiting(self, worker: str) -> list[float]:
        """Since when other workers wait that hold none, the oldest first."""
        found = [
            row.ticket
            for name, row in self.rows.items()
            if name != worker and row.ticket is not None and not row.count
        ]
        return sorted(found)

    def with_row(self, worker: str, row: HolderRow) -> Holders:
        """The state with this row of a worker; an empty row is removed."""
        rows = {name: each for name, each in self.rows.items() if name != worker}
        if row.count or row.ticket is not None:
            rows[worker] = row
        return replace(self, rows=rows)

    def to_data(self) -> bytes:
        """The entry's bytes; no two calls return the same."""
        rows = {name: [row.count, row.until, row.ticket] for name, row in self.rows.items()}
        return json.dumps([VERSION, rows, chance.token()], separators=(",", ":")).encode()

    @classmethod
    def from_data(cls, data: bytes) -> Holders:
        """The state in an entry. Raises ValueError for a damaged one."""
        try:
            version, rows, _ = json.loads(data)
            if version != VERSION:
                raise ValueError
            return cls({str(name): _row(row) for name, row in rows.items()})
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise ValueError("the entry of a limit is damaged") from None


def _row(record: Any) -> HolderRow:
    count, until, ticket = record
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError
    for time in (until, 0.0 if ticket is None else ticket):
        if not math.isfinite(time):
            raise ValueError
    return HolderRow(count, float(until), None if ticket is None else float(ticket))


# -- How far a limit is used -----------------------------------------------------------------------
#
# Read from its entries, for people.


@dataclass(frozen=True, slots=True)
class LimitUsage:
    """The use of one limit, or of one of its keys.

    * `wait_seconds`: until the next free slot, None without a rate.
    * `held`: permits by worker, None without a concurrency.
    * `damage`: what cannot be read; "" if all can.
    """

    wait_seconds: float | None
    held: dict[str, int] | None
    damage: str = ""


def usage_of(store: ControlStore, limit: Limit, key: str = "") -> LimitUsage:
    """Read the use of a limit now. key: as its function makes it. Raises BrokerUnavailable."""
    now, key = store.time().at, limit.digests.hidden(key)
    slots, permits = store.read([limit.entry(key), limit.permits_entry(key)])
    wait: float | None = None
    held: dict[str, int] | None = None
    damage = ""
    if limit.rate is not None:
        free_at = 0.0 if slots is None else RateState.from_data(slots.data).free_at
        wait = max(0.0, free_at - now)
    if limit.concurrency is not None:
        try:
            state = Holders() if permits is None else Holders.from_data(permits.data)
        except ValueError as error:
            state, damage = Holders(), str(error)
        rows = state.valid(now).rows
        counts: Counter[str] = Counter()
        for holder, row in rows.items():
            counts[worker_of(holder)] += row.count
        held = {worker: count for worker, count in counts.items() if count}
    return LimitUsage(wait, held, damage)
