"""One statement for many rows: most of a small statement's cost is starting it."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from itertools import chain
from typing import Final, TypeAlias

Row: TypeAlias = tuple[object, ...]

_SIZES: Final = (100, 20)
"""Rows that one statement takes: few sizes, so that all stay prepared."""


class BatchStatement:
    """A statement in two forms.

    one: for a single row. many: for several, with ``{rows}`` where `row` is repeated. Values are
    bound in the order head, rows, tail; head and tail are the same for all rows.
    """

    def __init__(self, one: str, many: str, row: str) -> None:
        self.one = one
        self._many = [(size, many.format(rows=", ".join([row] * size))) for size in _SIZES]

    def run(
        self, connection: sqlite3.Connection, rows: Sequence[Row], head: Row = (), tail: Row = ()
    ) -> int:
        """Run it for all rows, in order; returns how many rows of the table it changed."""
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
