"""Moving rows from one owner to another."""

from __future__ import annotations

from itertools import islice
from typing import Final

from aztask.address.owner import Owner
from aztask.errors import BrokerUnavailable
from aztask.stores.rows import Change, Rows, RowStore

PASSES: Final = 10
"""How often rows that change in the meantime are looked for again."""

WINDOW: Final = 500
"""Rows that are moved in one transaction, where the store has them: workers go on in between."""


def move_rows(store: RowStore, rows: Rows, old: Owner, new: Owner) -> int:
    """Make all rows of an owner those of another one; returns how many were found.

    A row that the new owner has already stays, and the other one is deleted. Crash window: where
    the store has no transaction, both exist; the next call deletes the old one. If the process dies
    between two windows, the next call goes on.
    """
    moved = passes = 0
    while passes < PASSES:
        before = moved
        with store.joined():
            found = list(islice(rows.of_owner(old), WINDOW))
            if not found:
                return moved
            for row in found:
                place = row.place._replace(owner=new)
                made = rows.write(Change(place, row.values, beside=True))
                if made is None and rows.get([place]) == [None]:
                    break
                moved += rows.write(Change(row.place, None, row)) is not None
        passes = 0 if moved > before else passes + 1
    raise BrokerUnavailable(f"the rows of {old} keep changing; try again")
