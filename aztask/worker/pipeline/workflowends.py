"""Tasks of workflows in the pipeline: their inputs before the run, their bits after the record.

Rules
1. A message without a workflow costs nothing here.
2. Inputs are read before the start row is owned: if the store is unreachable, the delivery waits as
   it is.
3. Every end sets its bit: a recorded outcome, the repeated settlement of one, and a dead letter.
   What cannot be set because a document is damaged is left to housekeeping, and harms no other end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from aztask.settlement import DeadLetter
from aztask.stores.records.base import State
from aztask.stores.records.damage import Damaged
from aztask.stores.records.owners import FOREIGN_ID, OTHER_TASK
from aztask.worker.pipeline.isolation import UNDONE
from aztask.worker.pipeline.turns import OUT_OF_TURN
from aztask.worker.pipeline.work import WorkItem, message_of
from aztask.workflows.engine import WorkflowEngine
from aztask.workflows.inputs import Input
from aztask.workflows.joins import TaskEnd
from aztask.workflows.place import NodePlace

logger = logging.getLogger(__name__)

INPUT_LOST: Final = "input-lost"
NO_RESULTS: Final = "no-result-store"
NOT_ENDS: Final = frozenset({FOREIGN_ID, OTHER_TASK, OUT_OF_TURN})
"""Reasons of dead letters that are not the node's own message."""


class WorkflowEnds:
    """Reads inputs and sets bits. Any thread may call."""

    def __init__(self, engine: WorkflowEngine | None) -> None:
        """engine: None if the app has no result store that keeps workflows."""
        self._engine = engine

    def refresh(self) -> None:
        """Notice at once that a workflow was cancelled, in tests whose clock stands still."""
        if self._engine is not None:
            self._engine.graphs.forget_all()

    def prepare(self, items: Sequence[WorkItem]) -> None:
        """Read the inputs of these deliveries, and find those whose workflow was cancelled.

        A workflow without an owner is adopted: this broker has its messages. Raises
        BrokerUnavailable, and ForeignId for a workflow of another owner; calling again is harmless.
        """
        inputs: dict[tuple[str, int | None, bool], Input | None] = {}
        cancelled: dict[str, bool] = {}
        for item in items:
            place, workflow = item.place, message_of(item).workflow
            if place is None or workflow is None:
                continue
            if self._engine is None:
                item.refusal = (NO_RESULTS, f"{item.label} belongs to a workflow: set results=")
                continue
            try:
                if workflow not in cancelled:
                    cancelled[workflow] = self._engine.graphs.cancelled(workflow)
                    self._engine.graphs.own(workflow)
                item.dropped = cancelled[workflow]
                if place.takes is not None and not item.dropped:
                    key = (workflow, place.takes, place.takes_errors)
                    if key not in inputs:
                        inputs[key] = self._engine.inputs.load(workflow, place)
                    item.input = inputs[key]
            except Damaged as damage:
                item.refusal = (INPUT_LOST, damage.reason)

    def follow(self, items: Sequence[WorkItem]) -> None:
        """Set the bits of these items' ends and send what follows, before they are settled.

        Raises BrokerUnavailable and SendUnconfirmed: nothing is settled, and it is tried again. The
        crash windows are those of `aztask.workflows.joins`.
        """
        self.ended([end for item in items if item.place is not None for end in _ends(item)])

    def ended(self, ends: Sequence[TaskEnd]) -> None:
        """Set the bits of these ends; an end that fails alone is logged and left alone."""
        if not ends or self._engine is None:
            return
        try:
            self._engine.joins.ended(ends)
        except UNDONE:
            raise
        except Exception as error:  # a document may hold anything
            if len(ends) > 1:
                for end in ends:
                    self.ended([end])
                return
            logger.error(
                "workflow %s: the end of its node %d is not counted, housekeeping tries again: %s",
                ends[0].workflow,
                ends[0].place.node,
                error,
                exc_info=not isinstance(error, Damaged),
            )


def _ends(item: WorkItem) -> Iterable[TaskEnd]:
    """The end of this item's task, if it has ended for good."""
    decided, place, message = item.decided, item.place, message_of(item)
    if decided is None or place is None or message.workflow is None:
        return
    outcome, settlement = decided.outcome, decided.settlement
    repeated = decided.repeated or item.tries > 0
    if outcome is not None and outcome.state.final:
        yield TaskEnd(
            message.workflow,
            place,
            message.generation,
            outcome.state,
            outcome.value,
            outcome.error_type,
            outcome.error,
            repeated,
        )
    elif isinstance(settlement, DeadLetter) and settlement.reason not in NOT_ENDS:
        yield failed(message.workflow, place, message.generation, settlement, repeated=repeated)


def failed(
    workflow: str, place: NodePlace, generation: int, dead: DeadLetter, *, repeated: bool = False
) -> TaskEnd:
    """The end of a task whose message became a dead letter."""
    reason, text = dead.reason, dead.description
    return TaskEnd(workflow, place, generation, State.FAILED, None, reason, text, repeated=repeated)
