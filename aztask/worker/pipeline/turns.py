"""Whether it is a message's turn, and where its end counts: the result store says, not the message.

Rules
1. Without keys any program that may send writes a message's place. So the place of a workflow's
   task is taken from the stored graph, with the sizes of its joins. A message that names a node of
   another task, or has another id than the node's, is refused.
2. With keys the place is signed. But a release before 0.2 signed what it stored for later as it
   signed what it sent: a program that read such a step could send it before its turn, also when
   nothing of that release is left. So a step runs only if what it follows is recorded, and a
   debounced call only if its row says that it is being sent, or is gone.
3. Rule 2 is for messages of hop 0. A later one was signed, to be sent, by the worker that ran the
   one before. A replay is checked, too, as an attacker can make dead letters; but one of a workflow
   that was deleted runs.
4. A refused message becomes a dead letter, and nothing is recorded: the run of that id, and the
   workflow's node, are those of the message whose turn will come.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from aztask.app import App
from aztask.errors import CodecError
from aztask.settlement import DeadLetter
from aztask.stores.records.damage import Damaged
from aztask.support.floodlog import FloodLog
from aztask.uniqueness.rules import QUIET, key_of
from aztask.worker.pipeline.work import Stage, WorkItem, message_of
from aztask.workflows.engine import WorkflowEngine
from aztask.workflows.place import NodePlace
from aztask.workflows.plan import GraphPlan, task_id_of

logger = logging.getLogger(__name__)

OUT_OF_TURN: Final = "out-of-turn"


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
