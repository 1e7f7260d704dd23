"""Reads every row of the table, whatever it is for, with the long values of workflows' documents.

A new kind of row is never forgotten, because every partition is read. The long values of runs are
not fetched: they are values, and a reference to one that is stored apart is always short.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from aztask.stores.records.tables.blobs import Blobs
from aztask.stores.tables.client import TableRequests, TimeBudget
from aztask.stores.tables.errors import RowNotFound

_ALL: Final = "PartitionKey ge ''"
_RUNS: Final = "t-"
_NUMBER: Final = re.compile(r"([0-9]+)")


def values_of(requests: TableRequests, blobs: Blobs) -> Iterator[bytes]:
    """The values of each row, one request for a thousand rows. Raises BrokerUnavailable."""
    after: Any = None
    while True:
        rows, after = requests.page(TimeBudget(), _ALL, {}, None, after)
        for row in rows:
            yield _joined(row)
            blob = row.get("body_blob")
            if isinstance(blob, str) and not row["PartitionKey"].startswith(_RUNS):
                try:
                    yield blobs.load(TimeBudget(), None, blob) or b""
                except RowNotFound:
                    continue  # it was replaced: what the new one adds is young
        if after is None:
            return


def _joined(row: Mapping[str, Any]) -> bytes:
    """The values of a row, one behind the other: a long one is in several numbered properties."""
    data = [
        value.encode("utf-8", "replace") if isinstance(value, str) else bytes(value)
        for _, value in sorted(row.items(), key=lambda item: _numbered(item[0]))
        if isinstance(value, str | bytes)
    ]
    return b"".join(data)


def _numbered(name: str) -> list[tuple[int, str]]:
    """A key that sorts ``part10`` behind ``part9``."""
    return [
        (int(each), "") if each.isdigit() else (-1, each) for each in _NUMBER.split(name) if each
    ]
