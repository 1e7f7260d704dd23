"""The port of rows in memory: what every store does, without a file, a service or a clock.

The contract suite proves that it behaves as the stores do (`contract/test_contract_rows.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from threading import RLock

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import EncodeError
from aztask.stores.layout import number_key
from aztask.stores.rows import Change, Kind, Place, Row, StoreTime, Values
from aztask.support.clock import SYSTEM_CLOCK, Clock

MOST_BYTES = 900 * 1024
"""A row of the smaller service."""


@dataclass
class ModelStore:
    """The implementation of `aztask.stores.rows.RowStore` in memory.

    * `lost`: so many answers to changes that come next are lost; the changes are made.
    """

    clock: Clock = SYSTEM_CLOCK
    remote: bool = False
    lost: int = 0
    tables: dict[str, dict[Place, tuple[dict[str, object], int, float]]] = field(
        default_factory=dict
    )
    lock: RLock = field(default_factory=RLock)
    writes: int = 0

    def of(self, kind: Kind) -> ModelRows:
        return ModelRows(self, kind, self.tables.setdefault(kind.sql.owned, {}))

    @contextmanager
    def joined(self) -> Iterator[None]:
        """One transaction: an error undoes what its calls have changed."""
        with self.lock:
            before = deepcopy(self.tables)
            try:
                yield
            except BaseException:
                for name, rows in self.tables.items():
                    rows.clear()
                    rows.update(before.get(name, {}))
                raise

    def now(self) -> float:
        return self.clock.wall()

    def time(self) -> StoreTime:
        now = self.clock.monotonic()
        return StoreTime(self.clock.wall(), now, now)


@dataclass
class ModelRows:
    """The rows of one kind."""

    store: ModelStore
    kind: Kind
    rows: dict[Place, tuple[dict[str, object], int, float]]

    def get(self, places: Sequence[Place]) -> list[Row | None]:
        with self.store.lock:
            return [self._get(place) for place in places]

    def _get(self, place: Place) -> Row | None:
        if place not in self.rows and self.kind.inherits:
            place = place._replace(owner=NO_OWNER)
        return self._row(place) if place in self.rows else None

    def _row(self, place: Place) -> Row:
        values, version, _ = self.rows[place]
        return Row(place, dict(values), str(version))

    def range(
        self,
        owner: Owner,
        partition: str,
        first: str = "",
        last: str = "",
        limit: int = 1000,
        *,
        short: bool = False,
    ) -> list[Row]:
        with self.store.lock:
            keys = {at: self._ranged(at) for at in self.rows if at[:2] == (owner, partition)}
            places = sorted((each for each in keys if first <= keys[each]), key=keys.__getitem__)
            found = [each for each in places if not last or keys[each] < last]
            rows = [self._row(each) for each in found[:limit]]
        cut = {self.kind.long: None} if short else {}
        return [row._replace(values={**row.values, **cut}) for row in rows]

    def _order(self, item: tuple[Place, object]) -> tuple[str, str]:
        return item[0].partition, self._ranged(item[0])

    def _ranged(self, place: Place) -> str:
        number = self.rows[place][0].get(self.kind.number)
        return number_key(number) if isinstance(number, int) else place.key

    def due(self, owner: Owner, before: float, limit: int) -> list[Place]:
        with self.store.lock:
            times = {place: values[self.kind.due] for place, (values, *_) in self.rows.items()}
            found = [each for each in times if each.owner == owner and times[each] < before]
            return sorted(found, key=times.__getitem__)[:limit]

    def of_owner(
        self, owner: Owner, prefix: str = "", written_before: float | None = None
    ) -> Iterable[Row]:
        with self.store.lock:
            before = float("inf") if written_before is None else written_before
            return [
                self._row(place)
                for place, (_, _, at) in sorted(self.rows.items(), key=self._order)
                if place.owner == owner
                and (place.partition or place.key).startswith(prefix)
                and at < before
            ]

    def may_be_unowned(self) -> bool:
        return NO_OWNER in self.owners()

    def owners(self) -> set[Owner]:
        with self.store.lock:
            return {place.owner for place in self.rows}

    def write(self, change: Change) -> Row | None:
        made = self._change([change])
        return None if made is None else made[0]

    def write_all(self, changes: Sequence[Change]) -> list[Row | None]:
        return [self.write(each) for each in changes]

    def together(self, changes: Sequence[Change]) -> list[Row] | None:
        self.kind.check_together(changes)
        return self._change(changes)

    def _change(self, changes: Sequence[Change]) -> list[Row] | None:
        for each in changes:
            self._check(each.place, each.values or {})
        with self.store.lock:
            if not all(map(self._is_current, changes)):
                return None
            made = [self._made(each) for each in changes]
            if self.store.lost:
                self.store.lost -= 1  # asked again, the store finds a conflict, and its own values
                if not all(self._is_there(each) for each in changes):
                    return None
            return made

    def _is_current(self, change: Change) -> bool:
        place, _, before, beside = change
        if before is not None:
            return place in self.rows and str(self.rows[place][1]) == before.tag
        stray = place._replace(owner=NO_OWNER) in self.rows and self.kind.inherits and not beside
        return place not in self.rows and not stray

    def _is_there(self, change: Change) -> bool:
        if change.values is None:
            return change.place not in self.rows
        kept = self.rows[change.place][0] if change.place in self.rows else {}
        return {**kept, self.kind.number: None} == {**(change.values), self.kind.number: None}

    def _made(self, change: Change) -> Row:
        if change.values is None:
            del self.rows[change.place]
            assert change.before is not None
            return change.before
        self.put(change.place, change.values)
        return self._row(change.place)

    def remove(self, places: Sequence[Place]) -> None:
        with self.store.lock:
            for place in places:
                self.rows.pop(place, None)

    def put(self, place: Place, values: Values) -> None:
        self._check(place, values)
        with self.store.lock:
            self.store.writes += 1
            kept = {name: values.get(name) for name in self.kind.columns}
            if self.kind.number:
                kept[self.kind.number] = self.store.writes
            self.rows[place] = (kept, self.store.writes, self.store.clock.wall())

    def merge(self, place: Place, values: Values) -> bool:
        with self.store.lock:
            if place not in self.rows:
                return False
            self.put(place, {**self.rows[place][0], **values})
            return True

    def _check(self, place: Place, values: Values) -> None:
        self.kind.check(place, values)
        sizes = [len(each) for each in values.values() if isinstance(each, str | bytes)]
        if sum(sizes) > MOST_BYTES:
            raise EncodeError(f"{sum(sizes)} bytes are too many for a row")
