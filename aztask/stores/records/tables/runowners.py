"""The owners of runs in the table: who has workers here, and moving rows to another owner.

Partition ``owners`` has a row for each, named by its mark. A run's owner is in its row, and no
index leads from an owner to runs that have not ended: so workers register, once in each process.
"""

from __future__ import annotations

from typing import Any, Final

from aztask.address.owner import Owner
from aztask.stores.records.tables.names import is_row
from aztask.stores.records.tables.rows import broker_in
from aztask.stores.tables.client import TableRequests, TimeBudget

PARTITION: Final = "owners"
PAGE: Final = 1000
_RUNS_OF: Final = "PartitionKey ge 't-' and PartitionKey lt 't.' and broker eq @old"


class RunOwners:
    """The owners of one table. Any thread may call."""

    def __init__(self, requests: TableRequests, owner: Owner) -> None:
        self._requests = requests
        self._mine = owner.of_broker
        self._registered = not owner.known

    def register(self) -> None:
        """List this owner; one request in the life of a process."""
        if not self._registered:
            self._requests.ensure(TimeBudget(), {**_place(self._mine), "broker": self._mine.broker})
            self._registered = True

    def known(self, call: TimeBudget) -> set[Owner]:
        """The owners that are listed, and this one if it is."""
        rows = self._requests.query(call, "PartitionKey eq @owners", {"owners": PARTITION}, PAGE)
        return {Owner(broker) for row in rows if (broker := broker_in(row))}

    def forget(self, old: Owner) -> None:
        """No longer list an owner whose rows were moved; a worker of it lists it again."""
        place = _place(old.of_broker)
        self._requests.delete(TimeBudget(), place["PartitionKey"], place["RowKey"])

    def adopt_rows(self, old: Owner) -> int:
        """Set the owner of each row of `old`. Reads all rows of runs; if it dies, repeat it."""
        moved, after = 0, None
        while True:
            rows, after = self._requests.page(
                TimeBudget(), _RUNS_OF, {"old": old.broker}, ("PartitionKey", "RowKey"), after
            )
            self._requests.each(TimeBudget(), self._set, rows)
            moved += sum(is_row(row["RowKey"]) for row in rows)
            if after is None:
                return moved

    def _set(self, call: TimeBudget, row: dict[str, Any]) -> None:
        place = {name: row[name] for name in ("PartitionKey", "RowKey")}
        self._requests.add(call, {**place, "broker": self._mine.broker})


def _place(owner: Owner) -> dict[str, Any]:
    return {"PartitionKey": PARTITION, "RowKey": owner.mark}
