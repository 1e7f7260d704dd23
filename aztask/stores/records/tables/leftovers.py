"""What no index names: blobs without a row, and rows of runs that never end.

A blob is left over if its process died before it wrote the row that names it. A row never ends if
its message is gone: purged, expired in the service, or deleted with its queue.

Rules
1. A sweep reads on from where the last one stopped, for `SWEEP_SECONDS` each, so that it neither
   delays a worker's heartbeats nor leaves anything out, however much there is.
2. A blob is deleted if its row does not name it; a note of a sent run, once its message was due
   before the retention began; a run's row, when nothing has written it for the retention and
   `UNFINISHED_SECONDS` more. A row that is written in between is kept (ETag).
3. Rows of other owners, and the blobs of such rows, stay. A note without an owner is deleted
   `UNFINISHED_SECONDS` later than an own one.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final, Protocol, cast

from aztask.address.owner import NO_OWNER, Owner
from aztask.stores.records.base import UNFINISHED_SECONDS
from aztask.stores.records.tables.blobs import Blobs
from aztask.stores.records.tables.names import is_row
from aztask.stores.records.tables.rows import DAMAGE, broker_in, task_id_in
from aztask.stores.records.workflows import workflow_of
from aztask.stores.tables.client import TableRequests, TimeBudget
from aztask.stores.tables.errors import RowConflict
from aztask.support.clock import Clock, monotonic

# -- keeping ---------------------------------------------------------------------------------
#
# Which runs a purge leaves alone: those of workflows, which are deleted after their workflow.


class KnownWorkflows(Protocol):
    """The workflows of the store, of which a purge asks one thing."""

    def exists(self, call: TimeBudget, workflow: str) -> bool:
        """True if the workflow was started and is not deleted."""
        ...


class Keeping:
    """The answers for one call of a purge, which asks once for each workflow. Any thread may call.

    A workflow may start in the meantime: its runs are new, so no purge finds them.
    """

    def __init__(self, workflows: KnownWorkflows) -> None:
        self._workflows = workflows
        self._known: dict[str, bool] = {}

    def keeps(self, call: TimeBudget, task_id: str) -> bool:
        """True if the task belongs to a workflow that exists."""
        workflow = workflow_of(task_id)
        if workflow is None:
            return False
        if workflow not in self._known:
            self._known[workflow] = self._workflows.exists(call, workflow)
        return self._known[workflow]


# -- leftovers -------------------------------------------------------------------------------


SWEEP_SECONDS: Final = 4.0
COUNT_SECONDS: Final = 4.0
SETTLING_SECONDS: Final = 600.0
"""Seconds after which a blob without a row counts as left over."""

_TASKS: Final = "PartitionKey ge 't-' and PartitionKey lt 't.'"
_OLD: Final = f"{_TASKS} and Timestamp lt @written"
_SELECT: Final = (
    "PartitionKey", "RowKey", "Timestamp", "key", "due", "body_blob", "saved_blob", "broker",
    DAMAGE,
)  # fmt: skip
_LATEST: Final = datetime.max.replace(tzinfo=UTC).timestamp() - 86400.0


class Leftovers:
    """Finds and deletes the leftovers of one store; one thread at a time."""

    def __init__(
        self,
        requests: TableRequests,
        blobs: Blobs,
        workflows: KnownWorkflows,
        clock: Clock,
        owner: Owner = NO_OWNER,
    ) -> None:
        """owner: whose rows it deletes."""
        self._mine = owner.broker
        self._workflows = workflows
        self._requests = requests
        self._blobs = blobs
        self._clock = clock
        self._blobs_after: str | None = None
        self._rows_after: Any = None
        self._rows_done = False

    def sweep(self, before: float) -> tuple[int, bool]:
        """Read on for some seconds; returns how many rows were deleted, and True at the end.

        * `before`: UTC epoch seconds: the beginning of the retention.
        """
        deleted = 0
        if not self._rows_done:
            deleted, self._rows_done = self._sweep_rows(before)
        complete = self._sweep_blobs(before) and self._rows_done
        if complete:
            self._rows_done = False  # the next sweep begins anew
        return deleted, complete

    def count_rows(self) -> tuple[int, bool]:
        """Count rows of tasks for some seconds; returns how many, and True if that is all."""
        until = monotonic() + COUNT_SECONDS
        rows, after = 0, None
        while monotonic() < until:
            page, after = self._requests.page(TimeBudget(), _TASKS, {}, ("RowKey",), after)
            rows += sum(row["RowKey"].endswith("r") for row in page)
            if after is None:
                return rows, True
        return rows, False

    def _sweep_blobs(self, before: float) -> bool:
        limit = min(before, self._clock.wall() - SETTLING_SECONDS)
        until = monotonic() + SWEEP_SECONDS
        while monotonic() < until:
            found, place = self._blobs.older(TimeBudget(), limit, self._blobs_after)
            self._requests.each(TimeBudget(), self._clear_blob, found)
            self._blobs_after = place
            if place is None:
                return True
        return False

    def _clear_blob(self, call: TimeBudget, found: tuple[str, str, str]) -> None:
        name, partition, row = found
        entity = self._requests.read(call, partition, row)
        if entity is not None and broker_in(entity) not in (self._mine, ""):
            return
        if entity is None or name not in (entity.get("body_blob"), entity.get("saved_blob")):
            self._blobs.delete(name)

    def _sweep_rows(self, before: float) -> tuple[int, bool]:
        written = datetime.fromtimestamp(max(0.0, min(before, _LATEST)), UTC)
        until = monotonic() + SWEEP_SECONDS
        deleted, keeping = 0, Keeping(self._workflows)
        while monotonic() < until:
            rows, self._rows_after = self._requests.page(
                TimeBudget(), _OLD, {"written": written}, _SELECT, self._rows_after
            )
            old = [row for row in rows if self._is_left(row, before)]
            deleted += sum(
                self._requests.each(
                    TimeBudget(), lambda call, row: self._clear_row(call, row, keeping), old
                )
            )
            if self._rows_after is None:
                return deleted, True
        return deleted, False

    def _is_left(self, row: dict[str, Any], before: float) -> bool:
        """True if no message can need the row any longer.

        Damaged rows are left to the quarantine, and foreign ones to their owner.
        """
        name, due, broker = row["RowKey"], row.get("due"), broker_in(row)
        if not is_row(name) or row.get(DAMAGE) is not None or broker not in (self._mine, ""):
            return False
        if name.endswith("e"):
            later = 0.0 if broker == self._mine else UNFINISHED_SECONDS
            return not isinstance(due, int | float) or due < before - later
        written = cast("Any", row).metadata["timestamp"]
        return written is not None and written.timestamp() < before - UNFINISHED_SECONDS

    def _clear_row(self, call: TimeBudget, row: dict[str, Any], keeping: Keeping) -> bool:
        if keeping.keeps(call, task_id_in(row)):
            return False
        tag = str(cast("Any", row).metadata["etag"])
        try:
            there = self._requests.delete(call, row["PartitionKey"], row["RowKey"], tag)
        except RowConflict:
            return False  # its message has come after all
        self._blobs.delete(*(str(row.get(name) or "") for name in ("body_blob", "saved_blob")))
        return there
