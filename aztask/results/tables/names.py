"""Names of the table's rows, and of the blobs beside them.

Partitions
* ``t-TASK``: all rows of one task. A run's row key is (generation, hop) counting down, so that the
  latest comes first, then ``r``; ``e`` marks the note that the run is expected.
* ``x``: runs whose rows are damaged, see `aztask.results.tables.quarantine`.
* ``c-SHARD``: marks of cancelled tasks.
* ``i-SHARD-STATE-HOUR``: ended runs, see `aztask.results.tables.index`.
* ``w``: workers.
* ``d-QUEUE``: dead letters, see `aztask.results.tables.dead`.
* ``k-NAME``: control entries, see `aztask.results.tables.controls`.
* ``s-SCHEDULE``: a schedule and its occurrences, see `aztask.results.tables.schedules`.
* ``u-SHARD``: holders of unique tasks, see `aztask.results.tables.uniques`.
* ``g-WORKFLOW;DOCUMENT``, ``o-SHARD`` and ``e-SHARD``: see `aztask.results.tables.workflows`.

Keys contain only letters, digits and a few signs: all other characters of a task id are escaped,
and a long id is hashed. (The service forbids ``/ \\ # ?`` and control characters, and more than 1
KiB.)
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Final
from zlib import crc32

from aztask.results.base import RunKey

SHARDS: Final = 4
"""A partition serves 2,000 requests a second, an account 20,000: at four requests for each task,
this many shards are enough."""

WORKERS: Final = "w"
FIRST_RUN: Final = "0"
LAST_RUN: Final = ":"
"""The row keys of a task's runs are between these two."""

_LONGEST_KEY: Final = 250
_TOP: Final = 10**19
_PLAIN: Final = re.compile(r"[^A-Za-z0-9.:-]")
_ESCAPED: Final = re.compile(r"_([0-9a-f]{1,6})_")
_PARTITION: Final = re.compile(r"t-[A-Za-z0-9.:_~-]{0,250}")
_ROW: Final = re.compile(r"([0-9]{20})-([0-9]{20})-[er]")
_BLOB: Final = re.compile(r"[0-9]{10}/(.+)![0-9a-f]{32}", re.DOTALL)


def key_text(text: str) -> str:
    """`text` as a part of a key; two texts never give the same."""
    escaped = _PLAIN.sub(lambda match: f"_{ord(match[0]):x}_", text)
    if len(escaped) <= _LONGEST_KEY:
        return escaped
    return f"~{sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


def partition_of(task_id: str) -> str:
    """The partition of a task's rows."""
    return f"t-{key_text(task_id)}"


def shard_of(partition: str) -> int:
    """The number of the shard that a task belongs to."""
    return crc32(partition.encode()) % SHARDS


def row_of(key: RunKey, kind: str = "r") -> str:
    """A run's row key. `kind` is ``r`` for the run, ``e`` for the note that it is expected."""
    return f"{_TOP - key.generation:020d}-{_TOP - key.hop:020d}-{kind}"


def key_of_row(partition: str, row: str) -> RunKey:
    """A run's key as far as its row's place shows it; a hashed task id cannot be read back."""
    name = partition.removeprefix("t-")
    task_id = _ESCAPED.sub(lambda match: chr(min(int(match[1], 16), 0x10FFFF)), name)
    found = _ROW.fullmatch(row)
    if found is None:
        return RunKey(task_id)
    return RunKey(task_id, max(0, _TOP - int(found[1])), max(0, _TOP - int(found[2])))


def is_row(row: str) -> bool:
    """True if a row key is one of ours in a task's partition: a run's, or the note of one."""
    return bool(_ROW.fullmatch(row))


def is_run(partition: str, row: str) -> bool:
    """True if a row with these keys can be a run's."""
    return bool(_PARTITION.fullmatch(partition)) and is_row(row) and row.endswith("r")


def is_blob_of(name: str, partition: str, row: str) -> bool:
    """True if a blob of that name belongs to that row, or the name is empty."""
    found = _BLOB.fullmatch(name)
    return not name or (found is not None and found[1] == f"{partition}!{row}")
