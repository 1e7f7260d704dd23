"""Tasks of workflows in the pipeline: their turn and inputs before the run, their bits after it.

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

from aztask.app import App
from aztask.errors import CodecError
from aztask.settlement import DeadLetter
from aztask.stores.records.base import State
from aztask.stores.records.damage import Damaged
from aztask.stores.records.owners import FOREIGN_ID, OTHER_TASK
from aztask.support.floodlog import FloodLog
from aztask.uniqueness.rules import QUIET, key_of
from aztask.worker.pipeline.settling import UNDONE
from aztask.worker.pipeline.work import Stage, WorkItem, message_of
from aztask.workflows.engine import WorkflowEngine
from aztask.workflows.inputs import Input
from aztask.workflows.joins import TaskEnd
from aztask.workflows.place import NodePlace
from aztask.workflows.plan import GraphPlan, task_id_of

logger = logging.getLogger(__name__)

INPUT_LOST: Final = "input-lost"
OUT_OF_TURN: Final = "out-of-turn"
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


# -- Whose turn it is ------------------------------------------------------------------------------
#
# Whether it is a message's turn, and where its end counts, the result store says, not the message.
#
# Rules
# 1. Without keys any program that may send writes a message's place. So the place of a workflow's
#    task is taken from the stored graph, with the sizes of its joins. A message that names a node
#    of another task, or has another id than the node's, is refused.
# 2. With keys the place is signed. But a release before 0.2 signed what it stored for later as it
#    signed what it sent: a program that read such a step could send it before its turn, also when
#    nothing of that release is left. So a step runs only if what it follows is recorded, and a
#    debounced call only if its row says that it is being sent, or is gone.
# 3. Rule 2 is for messages of hop 0. A later one was signed, to be sent, by the worker that ran the
#    one before. A replay is checked, too, as an attacker can make dead letters; but one of a
#    workflow that was deleted runs.
# 4. A refused message becomes a dead letter, and nothing is recorded: the run of that id, and the
#    workflow's node, are those of the message whose turn will come.


class Turns:
    """Refuses deliveries whose turn has not come. Any thread may call."""

    def __init__(self, app: App, engine: WorkflowEngine | None, floods: FloodLog) -> None:
        """engine: of workflows; None if the app has no result store that keeps them."""
        self._app = app
        self._engine = engine
        self._floods = floods
        self._signed = app.codec.signs

    def check(self, items: Sequence[WorkItem]) -> list[WorkItem]:
        """Refuse those whose turn has not come; returns the others.

        Raises BrokerUnavailable, and ForeignId for a workflow of another owner; calling again is
        harmless.
        """
        for item in items:
            if item.stage is Stage.RECEIVED and (objection := self._objection(item)):
                line = "%s did not run, dead-lettered: %s: %s"
                self._floods.warning(logger, OUT_OF_TURN, line, item.label, OUT_OF_TURN, objection)
                item.decide(DeadLetter(OUT_OF_TURN, objection))
        return [item for item in items if item.stage is Stage.RECEIVED]

    def _objection(self, item: WorkItem) -> str:
        """Why it may not run now; "" if it may."""
        message = message_of(item)
        first = not message.hop
        if item.place is not None and message.workflow is not None:
            if self._engine is None or (self._signed and not first):
                return ""
            return self._of_step(self._engine, item, item.place, message.workflow)
        if self._signed and first and item.task is not None and item.task.unique is not None:
            return self._of_debounced(item) if item.task.unique.until == QUIET else ""
        return ""

    # -- workflows ---------------------------------------------------------------------------

    def _of_step(
        self, engine: WorkflowEngine, item: WorkItem, place: NodePlace, workflow: str
    ) -> str:
        try:
            plan = engine.graphs.plan(workflow)
            if not self._signed:
                return "" if plan is None else _misplaced(item, plan, place, workflow)
            if plan is None:
                again = message_of(item).generation > 0
                return "" if again else f"workflow {workflow} no longer exists"
            if place.node < len(plan.nodes) and engine.inputs.begun(workflow, plan, place.node):
                return ""
        except Damaged as damage:
            # Without keys the task runs as before; its input and its end meet the damage.
            return damage.reason if self._signed else ""
        return (
            f"what node {place.node} of workflow {workflow} follows is not recorded: another"
            " program has sent what waits in the result store for its turn"
        )

    # -- debounced tasks -----------------------------------------------------------------------

    def _of_debounced(self, item: WorkItem) -> str:
        """A call that no row waits for was sent; one whose row is closing is being sent."""
        message, task = message_of(item), item.task
        if task is None or task.unique is None:
            return ""
        try:
            filled = message if self._app.payloads is None else self._app.payloads.filled(message)
            args, kwargs = task.arguments(self._app.codec, filled)
            key = key_of(self._app.codec, task, task.unique, args, kwargs)
        except (CodecError, TypeError):
            return ""  # no key that a call could have: no row waits for it, and it fails as it runs
        if self._app.unique_engine(task.name).waits_quietly(key, message.id):
            return (
                f"call {message.id} waits in the result store for its quiet time: another program"
                " has sent it before"
            )
        return ""


def _misplaced(item: WorkItem, plan: GraphPlan, place: NodePlace, workflow: str) -> str:
    """Take the place from the graph; says why there is none for this message."""
    message, node = message_of(item), place.node
    known = node < len(plan.nodes) and plan.nodes[node].task == message.task
    if known and message.id == task_id_of(workflow, node):
        item.place = NodePlace.of(plan, plan.nodes[node])
        return ""
    return f"workflow {workflow} has no node {node} of task {message.task} with this id"
