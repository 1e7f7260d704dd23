"""Waits for the write lock while another process holds it.

Why not SQLite's busy handler: it sleeps longer and longer, up to a tenth of a second. Beside a
process that writes without pause, one write in a hundred then waits for most of a second. Trying
again about every millisecond costs little, and a write waits only a few milliseconds.
"""

from __future__ import annotations

import random
import sqlite3
import time
from typing import Any, Final

_execute = sqlite3.Connection.execute

_BUSY: Final = sqlite3.SQLITE_BUSY
_PRIMARY_CODE: Final = 0xFF  # the other bits are the extended code (sqlite.org/rescode.html)
_SHORTEST, _LONGEST = 0.0001, 0.001


class PatientConnection(sqlite3.Connection):
    """A connection whose statements wait for the lock, up to `patience` seconds.

    Inside a transaction it does not wait: the transaction has the lock, or can never get it.
    """

    patience: float = 0.0

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """Execute one statement; raises OperationalError (SQLITE_BUSY) after `patience`."""
        try:
            return _execute(self, sql, parameters)
        except sqlite3.OperationalError as error:
            if self.in_transaction or error.sqlite_errorcode & _PRIMARY_CODE != _BUSY:
                raise
        until = time.monotonic() + self.patience
        while True:
            time.sleep(random.uniform(_SHORTEST, _LONGEST))  # noqa: S311  # spreads load, guards nothing
            try:
                return _execute(self, sql, parameters)
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode & _PRIMARY_CODE == _BUSY
                if not busy or time.monotonic() > until:
                    raise
