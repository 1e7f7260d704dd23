"""Names of the table's rows, and of the blobs beside them.

Partitions
* ``t-TASK``: all rows of one task. A run's row key is (generation, hop) counting down, so that the
  latest comes first, then ``r``; ``e`` marks the note that the run is expected.
* ``x``: runs whose rows are damaged, see `aztask.stores.records.tables.quarantine`.
* ``c-SHARD``: marks of cancelled tasks.
* ``im-MARK-SHARD-STATE-HOUR``: ended runs of an owner, see `aztask.stores.records.tables.index`;
  ``i-SHARD-STATE-HOUR``: those without an owner.
* ``owners``: the owners whose workers use the table, see `aztask.stores.records.tables.runs`.
* ``w``: workers.
* ``d-QUEUE``: dead letters, see `aztask.stores.records.deadindex`.
* ``k-NAME``: control entries, see `aztask.stores.records.controls`.
* ``s-SCHEDULE`` and ``s.MARK-SCHEDULE``: a schedule, its occurrences and claims, see
  `aztask.stores.records.tables.schedules`.
* ``u-SHARD``: holders of unique tasks, see `aztask.stores.records.uniques`.
* ``U-MARK-SHARD``, ``K-MARK-NAME``, ``D-MARK-QUEUE``: holders, control entries and dead letters
  with an owner, see `aztask.stores.tables.rows`.
* ``n-WORKER`` and ``N-MARK-WORKER``: its at-most-once runs, see `aztask.stores.records.onceruns`.
* ``h-TASK`` and ``H-MARK-TASK``: the recorded steps of a task, see `aztask.steps.records`.
* ``p-TASK`` and ``P-MARK-TASK``: what a task emits, see `aztask.steps.parts`.
* ``j-PART`` and ``J-MARK-PART``: what workers did, see `aztask.stores.records.history`.
* ``g-WORKFLOW;DOCUMENT``, ``o-SHARD``, ``em-MARK-SHARD`` and ``e-SHARD``: see
  `aztask.stores.records.tables.workflows`.
* ``aztask-verify-RUN``: what ``aztask azure verify`` tries roles with, and removes, see
  `aztask.operate.verifystores`.

How a task id becomes a part of a key: `aztask.stores.layout`.
"""

from __future__ import annotations

import re
from typing import Final

from aztask.stores.layout import key_text
from aztask.stores.records.base import RunKey

WORKERS: Final = "w"
FIRST_RUN: Final = "0"
LAST_RUN: Final = ":"
"""The row keys of a task's runs are between these two."""

_TOP: Final = 10**19
_ESCAPED: Final = re.compile(r"_([0-9a-f]{1,6})_")
_PARTITION: Final = re.compile(r"t-[A-Za-z0-9.:_~-]{0,250}")
_ROW: Final = re.compile(r"([0-9]{20})-([0-9]{20})-[er]")
_BLOB: Final = re.compile(r"[0-9]{10}/(.+)![0-9a-f]{32}", re.DOTALL)


def partition_of(task_id: str) -> str:
    """The partition of a task's rows."""
    return f"t-{key_text(task_id)}"


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
