"""How far a limit is used: read from its entries, for people."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from aztask.limits.declaration import Limit
from aztask.limits.holders import Holders, worker_of
from aztask.limits.rates import RateState
from aztask.stores.records.controls import ControlStore


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
