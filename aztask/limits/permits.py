"""A worker's permits of concurrency limits: taken, kept between tasks, renewed and given back.

Rules
1. `take` and `maintain` ask the store; one thread calls them. `free` does not, and any thread may
   call it.
2. A permit that a task gave back is used by the next one without a request. Permits that were not
   used for `IDLE_SECONDS` go back to the store.
3. While other workers wait and hold none, a permit that becomes free goes back, if they have waited
   for longer than the deliveries here.
4. After `deadline`, a permit may not be used; tasks that still run end themselves before another
   worker can get it.
5. The limit may become lower while workers hold more than it allows. Then no permit that a task
   gives back is used again, but goes back to the store, until all workers together hold no more.
   No permit of before is used until the entry was written once under the lower limit.

Crash window: a worker that dies keeps its permits for `LEASE_SECONDS` at most.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Final

from aztask.limits.holders import (
    LEASE_SECONDS,
    RENEW_SECONDS,
    STOP_SECONDS,
    HolderRow,
    Holders,
)
from aztask.limits.storeclock import StoreClock
from aztask.stores.records.controls import ControlStore, Entry, EntryChange
from aztask.stores.rows import New, change
from aztask.support.clock import Clock

IDLE_SECONDS: Final = 1.0
REFUSED_SECONDS: Final = 0.5
YIELDED_SECONDS: Final = 2.0
"""Seconds for which a worker that was refused, or has yielded, does not ask again."""

TRIES: Final = 12


@dataclass(slots=True)
class Stock:
    """The permits of one entry. Times are on the clock of the deadlines.

    count: granted; used: by deliveries here; back: to be given back as soon as possible.
    ticket: since when the oldest delivery here waits, in the store's time.
    told: the deadline that `maintain` reported last.
    most: the limit, as a delivery asked last. obeyed: that of the last write.
    """

    count: int = 0
    used: int = 0
    back: int = 0
    most: int = 0
    obeyed: int = 0
    deadline: float = 0.0
    told: float = 0.0
    renew_at: float = 0.0
    idle_since: float = 0.0
    ask_at: float = 0.0
    ticket: float | None = None
    asked: bool = False
    state: Holders = field(default_factory=Holders)
    tag: str | None = None


class Permits:
    """The stocks of all entries of one worker."""

    def __init__(self, store: ControlStore, time: StoreClock, worker: str, clock: Clock) -> None:
        self._store = store
        self._time = time
        self._worker = worker
        self._clock = clock
        self._lock = threading.Lock()
        self._stocks: dict[str, Stock] = {}
        self.error: Exception | None = None

    def take(self, entry: str, most: int, ticket: float, wanted: int = 1) -> bool:
        """Take a permit; False if there is none now. Raises BrokerUnavailable.

        most: the limit. ticket: since when the delivery waits, in the store's time. wanted: how
        many deliveries need one now, so that one request gets all of them.
        """
        now = self._clock.monotonic()
        with self._lock:
            stock = self._stocks.setdefault(entry, Stock())
            stock.most = most
            if self._use(stock, now):
                return True
            former = stock.ticket
            stock.ticket = ticket if former is None else min(former, ticket)
            if now < stock.ask_at:
                return False
        self._write(entry, stock, wanted)
        with self._lock:
            if not self._use(stock, self._clock.monotonic()):
                return False
            stock.ticket = former
            return True

    def _use(self, stock: Stock, now: float) -> bool:
        spare = stock.used + stock.back < stock.count and not self._above(stock)
        if spare and now < stock.deadline:
            stock.used += 1
            return True
        return False

    def _above(self, stock: Stock) -> bool:
        """Whether the workers hold more than the limit, as far as this one knows (rule 5)."""
        others = stock.state.valid(self._time.now()).others(self._worker)
        return stock.most < max(stock.obeyed, others + stock.count - stock.back)

    def free(self, entry: str) -> None:
        """Note that a delivery no longer uses its permit."""
        with self._lock:
            stock = self._stocks[entry]
            stock.used -= 1
            stock.idle_since = self._clock.monotonic()
            older = stock.state.waiting(self._worker)
            if older and stock.back < len(older) and older[0] < (stock.ticket or older[0] + 1.0):
                stock.back += 1

    def waits(self, entry: str, ticket: float | None) -> None:
        """Note since when the oldest delivery waits here; None if none does."""
        with self._lock:
            if entry in self._stocks:
                self._stocks[entry].ticket = ticket

    def deadline(self, entry: str) -> float:
        """Until when a permit may be used, on the clock of the deadlines."""
        return self._stocks[entry].deadline

    def maintain(self) -> list[str]:
        """Renew what is due, and give back what is idle; returns the entries that were renewed.

        Every request for another permit renews those that are held, too. Their entries are among
        them, or tasks that run would end while others wait.

        An entry whose row had expired is not: its tasks end at their old deadline. An entry that
        cannot be written does not stop the others: `error` says why, and the next call tries again.
        """
        renewed = []
        self.error = None
        for entry, stock in list(self._stocks.items()):
            now = self._clock.monotonic()
            with self._lock:
                spare = stock.count - stock.used - stock.back
                if spare > 0 and stock.ticket is None and now - stock.idle_since >= IDLE_SECONDS:
                    stock.back += spare
                due = stock.back > 0 or (stock.count > 0 and now >= stock.renew_at)
                due = due or (spare > 0 and self._above(stock))
                gone = not stock.count and not stock.used and not stock.asked
                if gone and stock.ticket is None:
                    del self._stocks[entry]
            if due or (stock.asked and stock.ticket is None):
                try:
                    self._write(entry, stock)
                except Exception as error:  # noqa: BLE001  # the caller logs it
                    self.error = self.error or error
            if stock.deadline > stock.told and stock.used <= stock.count:
                stock.told = stock.deadline
                renewed.append(entry)
        return renewed

    def release_all(self) -> None:
        """Give everything back at the worker's end. Raises BrokerUnavailable."""
        for entry, stock in list(self._stocks.items()):
            with self._lock:
                stock.back, stock.ticket = stock.count, None
            if stock.count or stock.asked:
                self._write(entry, stock)

    def _write(self, entry: str, stock: Stock, wanted: int = 0) -> None:
        """Renew the row, give back what is to go back or is above the limit, and ask for more."""

        def asked(tag: str | None) -> New[Asked, None]:
            asked_at, now = self._clock.monotonic(), self._time.now()
            state = stock.state.valid(now)
            with self._lock:
                # An expired row is gone: what runs under it ends itself, so it counts as given.
                mine = state.rows.get(self._worker, HolderRow(0, 0.0)).count
                count = min(mine, stock.count) - stock.back
                back, ticket, used, most = stock.back, stock.ticket, stock.used, stock.most
            count, free = max(0, count), most - state.others(self._worker)
            count = max(free, used) if count > max(free, used) else count
            count += max(0, min(wanted, free - count))
            row = HolderRow(count, now + LEASE_SECONDS, ticket if not count else None)
            return New(Asked(state.with_row(self._worker, row), row, back, most, asked_at), None)

        change(StockCell(self, entry, stock), asked, "the permits of this limit", tries=TRIES)

    def write(self, entry: str, stock: Stock, asked: Asked) -> bool:
        """Replace the entry that the stock was read from; False if another worker has."""
        (tag,) = self._store.write([EntryChange(entry, asked.state.to_data(), stock.tag)])
        if tag is None:
            return False
        row, back = asked.row, asked.back
        with self._lock:
            stock.state, stock.tag = asked.state, tag
            granted = row.count > stock.count - back
            stock.count, stock.back, stock.obeyed = row.count, stock.back - back, asked.most
            stock.deadline = asked.at + LEASE_SECONDS - STOP_SECONDS
            if not stock.used:  # the next delivery that takes one asks for the deadline
                stock.told = stock.deadline
            stock.renew_at = asked.at + RENEW_SECONDS
            stock.asked = row.ticket is not None
            pause = YIELDED_SECONDS if back else 0.0 if granted else REFUSED_SECONDS
            stock.ask_at = asked.at + pause
        return True

    def read(self, entry: str, stock: Stock) -> None:
        """Read the entry into its stock."""
        (found,) = self._store.read([entry])
        state = _state_of(found, self._time.now())
        with self._lock:
            stock.state = state
            stock.tag = None if found is None else found.tag


@dataclass(frozen=True, slots=True)
class Asked:
    """What a worker writes: the new state with its row, what goes back, and when it began.

    most: the limit that it obeys.
    """

    state: Holders
    row: HolderRow
    back: int
    most: int
    at: float


class StockCell:
    """The entry of a stock, for `change`. What this worker wrote last is tried first."""

    def __init__(self, permits: Permits, entry: str, stock: Stock) -> None:
        self._permits = permits
        self._entry = entry
        self._stock = stock
        self._known = stock.tag is not None

    def read(self) -> str | None:
        """The tag of the state in the stock, which is read again unless it may be current."""
        if not self._known:
            self._permits.read(self._entry, self._stock)
        self._known = False
        return self._stock.tag

    def write(self, asked: Asked, before: str | None) -> bool:
        """Replace the state, and take what was granted into the stock."""
        return self._permits.write(self._entry, self._stock, asked)


def _state_of(entry: Entry | None, now: float) -> Holders:
    """The state in an entry; for a damaged one, all permits are held for a lease from now.

    Workers that hold some do not renew it, so their tasks end themselves in that time.
    """
    if entry is None:
        return Holders()
    try:
        return Holders.from_data(entry.data)
    except ValueError:
        return Holders({"": HolderRow(10**9, now + LEASE_SECONDS)})
