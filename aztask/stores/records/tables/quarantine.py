"""Damaged rows of runs in the table: which ones, since when, and why.

A row in quarantine stays where it is, so that you can inspect it. It gets one more property, the
reason; as long as that is there, the row counts as damaged, except for one that is there for its
signature: it counts if the signature does not fit now (`aztask.stores.records.rowsigning`). A row
in the quarantine's partition names it, so that damaged rows are found without reading the whole
table.

Crash window: if the process dies between the two writes, the row is listed but has no such
property; the next reader of the row finds the damage again and adds it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import BrokerError, BrokerUnavailable
from aztask.stores.records.base import UNFINISHED_SECONDS
from aztask.stores.records.damage import KEPT, Columns, Damaged
from aztask.stores.records.rowsigning import NO_SIGNER, RowSigner
from aztask.stores.records.tables.names import is_run
from aztask.stores.records.tables.rows import DAMAGE, RunRow, believed, broker_in, plain, run_of
from aztask.stores.tables.client import TableRequests, TimeBudget
from aztask.stores.tables.errors import RowConflict
from aztask.support.clock import Clock

logger = logging.getLogger(__name__)

PARTITION: Final = "x"
PAGE: Final = 1000
PURGE_PAGE: Final = 200


class Quarantine:
    """The damaged rows of one table. Any thread may call."""

    def __init__(
        self,
        requests: TableRequests,
        clock: Clock,
        owner: Owner = NO_OWNER,
        signer: RowSigner = NO_SIGNER,
    ) -> None:
        """owner: whose rows it deletes. signer: verifies them."""
        self._signer = signer
        self._mine = owner.broker
        self._requests = requests
        self._clock = clock

    def note(self, call: TimeBudget, run: RunRow, reason: str) -> None:
        """Put a damaged row into quarantine, and log it the first time."""
        partition, row = run.place
        entity = {
            "PartitionKey": PARTITION,
            "RowKey": _row_of(run),
            "partition": partition,
            "row": row,
            "at": float(self._clock.wall()),
        }
        if broker := run.broker or self._mine:  # it was found by one of its messages, or its index
            entity["broker"] = broker
        if self._requests.ensure(call, entity):
            logger.error(KEPT, run.key.task_id, run.key.generation, run.key.hop, reason)
        if not run.in_quarantine:
            self._mark(run, {"PartitionKey": partition, "RowKey": row, DAMAGE: plain(reason)})

    def _mark(self, run: RunRow, mark: dict[str, Any]) -> None:
        """Add the reason to the row.

        If the row has changed, its next reader does it. In a row that accepts no further property
        the damage is found again each time.
        """
        try:
            # A time budget of its own: a refusal stops no other request.
            self._requests.merge(TimeBudget(), mark, run.tag)
        except BrokerUnavailable:
            raise
        except BrokerError as error:
            logger.info("a damaged row is not marked, its next reader tries again: %s", error)

    def runs(self, call: TimeBudget, limit: int) -> list[RunRow]:
        """The runs in quarantine, the last ones found first.

        Without keys, those that are there for their signatures are listed as they were found.
        """
        entities = self._requests.query(
            call, "PartitionKey eq @quarantine", {"quarantine": PARTITION}, PAGE
        )
        found = sorted(filter(None, map(_entry, entities)), reverse=True)[:limit]
        runs = self._requests.each(call, self._read, found)
        return [run for run in runs if run is not None]

    def forget(self, call: TimeBudget, run: RunRow) -> None:
        """Delete the entry of a run whose row is deleted."""
        self._requests.delete(call, PARTITION, _row_of(run))

    def purge(self, before: float) -> int:
        """Delete rows that were put into quarantine before that time; returns how many.

        Those of other owners stay, and those without one are kept for `UNFINISHED_SECONDS` more.
        If the process dies in between, the next purge continues with the row that names it.
        """
        call, text = TimeBudget(), "PartitionKey eq @quarantine and at lt @before"
        values = {"quarantine": PARTITION, "before": before, "mine": self._mine}
        entities = []
        if self._mine:
            entities = self._requests.query(call, f"{text} and broker eq @mine", values, PURGE_PAGE)
            values["before"] = before - UNFINISHED_SECONDS
        # A filter cannot ask for a property that is missing.
        found = self._requests.query(call, text, values, PAGE)
        entities += [each for each in found if not broker_in(each)][:PURGE_PAGE]
        return sum(self._requests.each(call, self._clear, entities))

    def adopt(self, call: TimeBudget, old: Owner) -> None:
        """Make the entries of `old` its own."""
        text, values = "PartitionKey eq @x and broker eq @old", {"x": PARTITION, "old": old.broker}
        for entity in self._requests.query(call, text, values, PAGE):
            place = {name: entity[name] for name in ("PartitionKey", "RowKey")}
            self._requests.add(TimeBudget(), {**place, "broker": self._mine})

    def _clear(self, call: TimeBudget, entity: Mapping[str, Any]) -> bool:
        entry, there = _entry(entity), False
        run = None if entry is None else self._read(call, entry)
        if run is not None:
            try:
                there = self._requests.delete(call, *run.place, run.tag)
            except RowConflict:
                return False  # it is being repaired
        self._requests.delete(call, PARTITION, entity["RowKey"])
        return there

    def _read(self, call: TimeBudget, entry: tuple[float, str, str]) -> RunRow | None:
        """The run, if its row is still damaged; else None."""
        _, partition, row = entry
        entity = self._requests.read(call, partition, row)
        if entity is None:
            return None
        run = run_of(entity, partition, row, listed=not self._signer)
        run = believed(run, self._signer)
        return run if run.damage else None


def _row_of(run: RunRow) -> str:
    return sha256("!".join(run.place).encode()).hexdigest()


def _entry(entity: Mapping[str, Any]) -> tuple[float, str, str] | None:
    """When the row was found, and its place; None for an entry that names none."""
    columns = Columns(entity)
    try:
        found = columns.time("at"), columns.text("partition"), columns.text("row")
    except Damaged:
        return None
    return found if is_run(*found[1:]) else None
