"""Runs one statement for many rows: most of a small statement's cost is starting it."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from itertools import chain
from typing import Final, TypeAlias

Row: TypeAlias = tuple[object, ...]

_SIZES: Final = (100, 20)
"""Rows per statement. There are only few sizes, so that all statements stay prepared."""


class BatchStatement:
    """A statement in two forms.

    one: the statement for a single row.
    many: the statement for several rows; ``{rows}`` is replaced by repetitions of `row`.

    Values are bound in the order head, rows, tail. Head and tail are the same for all rows.
    """

    def __init__(self, one: str, many: str, row: str) -> None:
        self.one = one
        self._many = [(size, many.format(rows=", ".join([row] * size))) for size in _SIZES]

    def run(
        self, connection: sqlite3.Connection, rows: Sequence[Row], head: Row = (), tail: Row = ()
    ) -> int:
        """Run the statement for all rows, in order; returns how many table rows it changed."""
        changed = done = 0
        for size, sql in self._many:
            while len(rows) - done >= size:
                values = [*head, *chain.from_iterable(rows[done : done + size]), *tail]
                changed += connection.execute(sql, values).rowcount
                done += size
        if done < len(rows):
            rest = [(*head, *row, *tail) for row in rows[done:]]
            changed += connection.executemany(self.one, rest).rowcount
        return changed
