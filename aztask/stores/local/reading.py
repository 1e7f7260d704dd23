"""Reads rows of SQLite without trusting them: a text may be no text."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any


def rows_of(
    connection: sqlite3.Connection, sql: str, values: Sequence[object] | Mapping[str, object]
) -> list[Any]:
    """All rows of a query. Text that is not UTF-8 is returned as bytes, and so counts as damaged.

    During the call no other thread may use the connection.
    """
    try:
        return connection.execute(sql, values).fetchall()
    except sqlite3.OperationalError as error:
        if "decode" not in str(error):
            raise
    usual = connection.text_factory
    connection.text_factory = _text_or_bytes
    try:
        return connection.execute(sql, values).fetchall()
    finally:
        connection.text_factory = usual


def _text_or_bytes(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
