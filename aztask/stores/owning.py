"""Moving rows from one owner to another."""

from __future__ import annotations

from typing import Final

from aztask.address.owner import Owner
from aztask.errors import BrokerUnavailable
from aztask.stores.rows import Change, Rows, RowStore

PASSES: Final = 10
"""How often rows that change in the meantime are looked for again."""


def move_rows(store: RowStore, rows: Rows, old: Owner, new: Owner) -> int:
    """Make all rows of an owner those of another one; returns how many were found.

    A row that the new owner has already stays, and the other one is deleted. Crash window: where
    the store has no transaction, both exist; the next call deletes the old one.
    """
    moved = 0
    with store.joined():
        for _ in range(PASSES):
            found = list(rows.of_owner(old))
            if not found:
                return moved
            for row in found:
                place = row.place._replace(owner=new)
                made = rows.write(Change(place, row.values, beside=True))
                if made is None and rows.get([place]) == [None]:
                    break
                moved += rows.write(Change(row.place, None, row)) is not None
    raise BrokerUnavailable(f"the rows of {old} keep changing; try again")
