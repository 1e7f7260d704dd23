"""Marks of cancelled tasks in the table: a partition for each shard, a row for each task."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from aztask.results.tables.client import TableRequests, TimeBudget
from aztask.results.tables.names import SHARDS, partition_of, shard_of

AT_ONCE: Final = 64
PURGE_PAGE: Final = 256
_LATEST: Final = datetime.max.replace(tzinfo=UTC).timestamp() - 86400.0


class CancellationMarks:
    """The marks of cancelled tasks."""

    def __init__(self, requests: TableRequests) -> None:
        self._requests = requests

    def put(self, task_id: str, at: float, *, running: bool) -> None:
        """Mark a task; with `running`, its run should be stopped, too, even after a later mark."""
        partition, row = _place(partition_of(task_id))
        mark = {"PartitionKey": partition, "RowKey": row, "at": float(at), "running": running}
        if running:
            self._requests.put(TimeBudget(), mark)
        else:
            self._requests.ensure(TimeBudget(), mark)

    def has(self, call: TimeBudget, partition: str) -> bool:
        """True if the task of this partition is marked."""
        return self._requests.read(call, *_place(partition)) is not None

    def page(self, call: TimeBudget, shard: int) -> set[str]:
        """The first marks of a shard, which are nearly always all of them."""
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
        self._requests.delete(call, *_place(partition))

    def purge(self, before: float) -> None:
        """Delete marks older than `before`.

        If a mark's own time is damaged, the service's time of its last write counts.
        """
        call = TimeBudget()
        written = datetime.fromtimestamp(max(0.0, min(before, _LATEST)), UTC)

        def page(call: TimeBudget, shard: int) -> list[dict[str, Any]]:
            return self._requests.query(
                call,
                "PartitionKey eq @marks and ( at lt @before or Timestamp lt @written )",
                {"marks": _marks_of(shard), "before": before, "written": written},
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
        mark = self._requests.read(call, *_place(partition))
        return mark is not None and bool(mark.get("running"))

    def _page(self, call: TimeBudget, shard: int, condition: str) -> set[str]:
        text = f"PartitionKey eq @marks{condition}"
        marks = {"marks": _marks_of(shard)}
        rows = self._requests.query(call, text, marks, AT_ONCE, ("RowKey",))
        return {row["RowKey"] for row in rows}


def _marks_of(shard: int) -> str:
    return f"c-{shard}"


def _place(partition: str) -> tuple[str, str]:
    return _marks_of(shard_of(partition)), partition
