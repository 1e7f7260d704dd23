"""Which runs a purge leaves alone: those of workflows, which are deleted after their workflow."""

from __future__ import annotations

from collections.abc import Callable

from aztask.stores.records.workflows import workflow_of
from aztask.stores.tables.client import TimeBudget


class Keeping:
    """The answers for one call of a purge, which asks once for each workflow. Any thread may call.

    A workflow may start in the meantime: its runs are new, so no purge finds them.
    """

    def __init__(self, exists: Callable[[TimeBudget, str], bool]) -> None:
        """exists: whether a workflow is in the store."""
        self._exists = exists
        self._known: dict[str, bool] = {}

    def keeps(self, call: TimeBudget, task_id: str) -> bool:
        """True if the task belongs to a workflow that exists."""
        workflow = workflow_of(task_id)
        if workflow is None:
            return False
        if workflow not in self._known:
            self._known[workflow] = self._exists(call, workflow)
        return self._known[workflow]
