"""Marks of cancelled tasks in the table: a partition for each shard, a row for each task.

A mark's row key is ``MARK!TASK``, with the mark of its owner. One without an owner, which an older
release or a program without a broker has written, is ``TASK``: each worker that receives the task
obeys it. All are in one partition, so that one query finds both kinds. ``!`` is in no other part of
a key.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from aztask.address.owner import NO_OWNER, Owner
from aztask.stores.layout import SHARDS, shard_of
from aztask.stores.records.tables.names import partition_of
from aztask.stores.tables.client import TableRequests, TimeBudget

AT_ONCE: Final = 64
PURGE_PAGE: Final = 256
_ANYONE: Final = "t-"
_ANYONE_END: Final = "t."
_MORE: Final = "!"
# Within one partition: this "or" reads no other rows.
_OURS: Final = (
    "( ( RowKey ge @own and RowKey lt @own_end ) or ( RowKey ge @first and RowKey lt @end ) )"
)
_OLD: Final = "( at lt @before or Timestamp lt @written )"
_LATEST: Final = datetime.max.replace(tzinfo=UTC).timestamp() - 86400.0


class CancellationMarks:
    """The marks of cancelled tasks."""

    def __init__(self, requests: TableRequests, owner: Owner = NO_OWNER) -> None:
        """owner: whose marks it makes, obeys and deletes."""
        self._requests = requests
        self._mine = owner.of_broker
        self._own = _own(self._mine)

    def put(self, task_id: str, at: float, *, running: bool) -> None:
        """Mark a task; with `running`, its run should be stopped, too, even after a later mark."""
        task = partition_of(task_id)
        place = {"PartitionKey": _marks_of(shard_of(task)), "RowKey": f"{self._own}{task}"}
        mark = {**place, "at": float(at), "running": running}
        if self._mine.known:
            mark["broker"] = self._mine.broker
        if running:
            self._requests.put(TimeBudget(), mark)
        else:
            self._requests.ensure(TimeBudget(), mark)

    def has(self, call: TimeBudget, partition: str) -> bool:
        """True if the task of this partition is marked."""
        return bool(self._marks(call, partition))

    def page(self, call: TimeBudget, shard: int) -> set[str]:
        """The tasks of the first marks of a shard, which are nearly always all of them.

        If there are more, it has `AT_ONCE` members.
        """
        return self._page(call, shard, "")

    def among(
        self, call: TimeBudget, partitions: Sequence[str], pages: dict[int, set[str]]
    ) -> set[str]:
        """Those that are marked. If a shard has more marks than its page, each is looked up."""
        return self._among(call, partitions, pages, self.has)

    def to_stop(self, task_ids: Sequence[str]) -> list[str]:
        """Those of these tasks whose runs should be stopped."""
        call = TimeBudget()
        partitions = [partition_of(each) for each in task_ids]
        shards = sorted(set(map(shard_of, partitions)))
        pages = dict(zip(shards, self._requests.each(call, self._to_stop, shards), strict=True))
        marked = self._among(call, partitions, pages, self._stops)
        return list(itertools.compress(task_ids, (each in marked for each in partitions)))

    def drop(self, call: TimeBudget, partition: str) -> None:
        """Delete the task's mark, if it has one."""
        for row in self._rows(partition):
            self._requests.delete(call, _marks_of(shard_of(partition)), row)

    def purge(self, before: float) -> None:
        """Delete marks older than `before`.

        If a mark's own time is damaged, the service's time of its last write counts.
        """
        call = TimeBudget()
        written = datetime.fromtimestamp(max(0.0, min(before, _LATEST)), UTC)

        def page(call: TimeBudget, shard: int) -> list[dict[str, Any]]:
            return self._requests.query(
                call,
                f"PartitionKey eq @marks and {_OURS} and {_OLD}",
                {"before": before, "written": written, **self._values(shard)},
                PURGE_PAGE,
                ("PartitionKey", "RowKey"),
            )

        old = itertools.chain.from_iterable(self._requests.each(call, page, range(SHARDS)))
        self._requests.each(
            call,
            lambda call, mark: self._requests.delete(call, mark["PartitionKey"], mark["RowKey"]),
            old,
        )

    def _among(
        self,
        call: TimeBudget,
        partitions: Sequence[str],
        pages: dict[int, set[str]],
        has: Callable[[TimeBudget, str], bool],
    ) -> set[str]:
        unsure = [each for each in partitions if len(pages[shard_of(each)]) == AT_ONCE]
        found = self._requests.each(call, has, unsure)
        return set().union(*pages.values(), itertools.compress(unsure, found))

    def _to_stop(self, call: TimeBudget, shard: int) -> set[str]:
        return self._page(call, shard, " and running eq true")

    def _stops(self, call: TimeBudget, partition: str) -> bool:
        return any(bool(mark.get("running")) for mark in self._marks(call, partition))

    def _rows(self, partition: str) -> list[str]:
        """The row keys of a task's own mark, and of one without an owner."""
        return sorted({f"{self._own}{partition}", partition})

    def _marks(self, call: TimeBudget, partition: str) -> list[dict[str, Any]]:
        """The marks of a task, in one request."""
        text = "PartitionKey eq @marks and ( RowKey eq @own or RowKey eq @task )"
        own = f"{self._own}{partition}"
        values = {"marks": _marks_of(shard_of(partition)), "own": own, "task": partition}
        return self._requests.query(call, text, values, 2)

    def _values(self, shard: int) -> dict[str, Any]:
        own = self._own or _ANYONE
        return {
            "marks": _marks_of(shard),
            "own": own,
            "own_end": f"{own[:-1]}{chr(ord(own[-1]) + 1)}",
            "first": _ANYONE,
            "end": _ANYONE_END,
        }

    def _page(self, call: TimeBudget, shard: int, condition: str) -> set[str]:
        text = f"PartitionKey eq @marks and {_OURS}{condition}"
        rows = self._requests.query(call, text, self._values(shard), AT_ONCE, ("RowKey",))
        found = {row["RowKey"].removeprefix(self._own) for row in rows}
        # One mark of each kind for a task: as many members as rows say that there are more.
        return found | {f"{_MORE}{number}" for number in range(len(rows) - len(found))}

    def adopt(self, old: Owner) -> int:
        """Make the marks of `old` its own: write the new one, then delete the old one.

        If the process dies in between, the next call deletes the old one.
        """
        moved = 0
        for shard in range(SHARDS):
            marks = _marks_of(shard)
            values = {"marks": marks, "old": old.broker}
            while rows := self._requests.query(
                TimeBudget(), "PartitionKey eq @marks and broker eq @old", values, PURGE_PAGE
            ):
                for row in rows:
                    call, task = TimeBudget(), row["RowKey"].removeprefix(_own(old))
                    kept: dict[str, Any] = {
                        name: row[name] for name in ("at", "running") if name in row
                    }
                    place = {"PartitionKey": marks, "RowKey": f"{self._own}{task}"}
                    self._requests.ensure(call, {**place, **kept, "broker": self._mine.broker})
                    self._requests.delete(call, marks, row["RowKey"])
                moved += len(rows)
        return moved


def _marks_of(shard: int) -> str:
    return f"c-{shard}"


def _own(owner: Owner) -> str:
    """The beginning of the row keys of an owner's marks."""
    return f"{owner.of_broker.mark}!" if owner.known else ""
