"""Workflows: list and show them; cancel them, and resume them after their tasks failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Final

from aztask.app import App
from aztask.errors import AztaskError, ForeignId, NotFound, ResultDamaged
from aztask.operate.action import Action, Progress, Subject, results_of
from aztask.operate.deadletters.actions import ReplayLetters, replay_by_id
from aztask.stores.records.base import State
from aztask.stores.records.damage import Damaged
from aztask.support.display import visible
from aztask.workflows.bits import Bit, Failure
from aztask.workflows.edits import row_name
from aztask.workflows.engine import WorkflowEngine
from aztask.workflows.graph import Root
from aztask.workflows.plan import ROOT, Node, Plan, Slot, task_id_of
from aztask.workflows.rows import Row, read_row

# -- A workflow as people see it: a tree of its nodes with their states, and a list of workflows.

ASKED: Final = 200
"""Tasks without a bit whose state is asked from the result store; of more it is not shown."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node: a task, or a group with its members.

    * `state`: None if it is not known: it may be waiting, or not sent yet.
    * `members`: for each member of a group, its nodes in the order in which they run.
    """

    number: int
    task_id: str
    task: str
    queue: str
    state: State | None
    started_at: float | None = None
    ended_at: float | None = None
    failure: Failure | None = None
    members: tuple[tuple[NodeView, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class WorkflowView:
    """One workflow, with the nodes of its outermost chain."""

    workflow: str
    root: Root
    nodes: tuple[NodeView, ...]

    def all_nodes(self) -> Iterator[NodeView]:
        """Every node, groups before their members."""
        stack = list(reversed(self.nodes))
        while stack:
            node = stack.pop()
            yield node
            stack += [each for member in reversed(node.members) for each in reversed(member)]


def view(engine: WorkflowEngine, workflow: str) -> WorkflowView | None:
    """The workflow as it is now; None if it is unknown. Raises Damaged, BrokerUnavailable."""
    root = engine.graphs.root(workflow)
    plan = None if root is None else engine.graphs.plan(workflow, root)
    if root is None or plan is None:
        return None
    return WorkflowView(workflow, root, _Viewer(engine, workflow, plan).nodes())


def summaries(
    engine: WorkflowEngine, limit: int, state: str | None = None
) -> Iterator[tuple[str, Root | Damaged | ForeignId]]:
    """Open workflows, then ended ones, the newest first: ids, and roots or what is wrong.

    Workflows of other owners are among them, unless a state is asked for: theirs is not read.
    """
    listed = engine.store.all_workflows(limit)
    seen: set[str] = set()
    for each in sorted(listed, key=lambda one: (one.ended_at is not None, -(one.at))):
        if each.workflow in seen or len(seen) >= limit:
            continue
        try:
            root = engine.graphs.root(each.workflow)
        except ForeignId as foreign:
            seen.add(each.workflow)
            if state is None:
                yield each.workflow, foreign
            continue
        except Damaged as damage:
            seen.add(each.workflow)
            yield each.workflow, damage
            continue
        if root is not None and state in (None, root.state.value):
            seen.add(each.workflow)
            yield each.workflow, root


@dataclass(slots=True)
class _Viewer:
    engine: WorkflowEngine
    workflow: str
    plan: Plan
    rows: dict[tuple[int, int], Row] = field(default_factory=dict)
    asked: int = 0

    def nodes(self) -> tuple[NodeView, ...]:
        joins = [node for node in self.plan.nodes if not node.task and node.size]
        places = [(node, row) for node in joins for row in range(node.rows)]
        names = [(self.workflow, row_name(node.number, row)) for node, row in places]
        for (node, number), data in zip(places, self.engine.documents.read(names), strict=True):
            if data is not None:
                row = read_row(data, node.layout.row_size(number))
                self.rows[node.number, number] = row
        return self._slot(Slot(ROOT, 0))

    def _bit(self, slot: Slot) -> Bit | None:
        number, index = self.plan.nodes[slot.join].layout.place(slot.member)
        row = self.rows.get((slot.join, number))
        return None if row is None else row.bit(index)

    def _slot(self, slot: Slot) -> tuple[NodeView, ...]:
        bit = self._bit(slot)
        nodes = self.plan.in_slots[slot]
        return tuple(self._node(node, bit) for node in nodes)

    def _node(self, node: Node, bit: Bit | None) -> NodeView:
        state, failure = None, None
        if bit is not None and node.number < bit.node:
            state = State.SUCCEEDED
        elif bit is not None and node.number == bit.node:
            state = bit.state
            failure = bit.failures[0] if bit.failures and node.task else None
        elif not node.task and (row := self.rows.get((node.number, 0))) and row.decision:
            state = row.decision.state
        task_id = task_id_of(self.workflow, node.number)
        started = ended = None
        if node.task and self.asked < ASKED:
            self.asked += 1
            record = self.engine.results.get(task_id)
            if record is not None:
                state = record.state
                started = record.started_at
                ended = record.outcome.at if record.outcome is not None else None
        members: tuple[tuple[NodeView, ...], ...] = ()
        if not node.task:
            slots = [Slot(node.number, member) for member in range(node.size)]
            members = tuple(self._slot(each) for each in slots)
        return NodeView(
            node.number, task_id, node.task, node.queue, state, started, ended, failure, members
        )


__all__ = [
    "STATES",
    "CancelWorkflow",
    "NodeView",
    "ResumeWorkflow",
    "WorkflowShown",
    "WorkflowView",
    "cancel",
    "members_first_failed",
    "resume",
    "shown",
    "workflow",
    "workflows",
]

STATES: Final = ("started", "succeeded", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class WorkflowShown:
    """A workflow in a list.

    * `root`: None for one that is ``foreign`` (then `owner` says whose it is) or ``unreadable``
      (then `damage` says why).
    """

    id: str
    state: str
    root: Root | None = None
    owner: str = ""
    damage: str = ""


def workflows(app: App, limit: int, state: str | None = None) -> list[WorkflowShown]:
    """Up to `limit` workflows: open ones first, then those that have ended, the newest first.

    Those of another app on the same result store are among them. state: only those, of `STATES`.
    """
    results_of(app)
    return [shown(each, root) for each, root in summaries(app.workflows.engine, limit, state)]


def shown(workflow: str, root: Root | Damaged | ForeignId) -> WorkflowShown:
    """A workflow as a line of a list."""
    if isinstance(root, ForeignId):
        return WorkflowShown(workflow, "foreign", owner=root.owner)
    if isinstance(root, Damaged):
        return WorkflowShown(workflow, "unreadable", damage=root.reason)
    return WorkflowShown(workflow, root.state.value, root)


def workflow(app: App, workflow_id: str) -> WorkflowView:
    """One workflow as a tree. Raises NotFound, ResultDamaged, ForeignId."""
    results_of(app)
    try:
        found = view(app.workflows.engine, workflow_id)
    except Damaged as damage:
        raise ResultDamaged(
            f"workflow {visible(workflow_id)} cannot be read: {damage.reason}"
        ) from None
    if found is None:
        raise NotFound(f"no workflow has the id {visible(workflow_id)}")
    return found


def members_first_failed(node: NodeView) -> list[tuple[NodeView, ...]]:
    """The members of a group: those that did not succeed first, the others in their order."""
    return sorted(
        node.members,
        key=lambda member: all(each.state in (None, State.SUCCEEDED) for each in member),
    )


def cancel(app: App, workflow_id: str) -> CancelWorkflow:
    """Cancel a workflow: no further task of it starts. Raises as `workflow` does."""
    found = workflow(app, workflow_id)
    return CancelWorkflow(app, int(found.root.ended_at is None), workflow_id)


@dataclass(slots=True)
class CancelWorkflow(Action[bool]):
    """Cancels a workflow; `act` returns False if it has ended. count: 0 if it had before."""

    name: ClassVar[str] = "workflow-cancel"

    workflow: str

    def __str__(self) -> str:
        return f"cancel workflow {visible(self.workflow)}"

    def subject(self) -> Subject:
        """The workflow that it acts on."""
        return Subject(workflow_id=self.workflow)

    def _act(self, progress: Progress) -> bool:
        cancelled = self.app.workflows.result(self.workflow).cancel()
        self.done = int(cancelled)
        return cancelled


def resume(app: App, workflow_id: str) -> ResumeWorkflow:
    """Replay the dead-lettered tasks of a workflow. It goes on behind each that succeeds now.

    What a body was given before does not change. Raises as `workflow` does, and AztaskError if none
    of its tasks is among the dead letters.
    """
    found = workflow(app, workflow_id)
    queues: dict[str, set[str]] = defaultdict(set)
    for node in found.all_nodes():
        if node.task and node.state not in (None, State.SUCCEEDED):
            queues[node.queue].add(node.task_id)
    replayed = replay_by_id(app, queues)
    succeeded = found.root.state is State.SUCCEEDED
    return ResumeWorkflow(app, replayed.count, workflow_id, replayed, succeeded)


@dataclass(slots=True)
class ResumeWorkflow(Action[int]):
    """Replays the tasks of a workflow; `act` returns how many.

    succeeded: whether the workflow had succeeded, so that only its tasks' own results change.
    """

    name: ClassVar[str] = "workflow-resume"

    workflow: str
    replayed: ReplayLetters
    succeeded: bool

    def __str__(self) -> str:
        return f"resume workflow {visible(self.workflow)}"

    def subject(self) -> Subject:
        """The workflow that it acts on."""
        return Subject(workflow_id=self.workflow)

    def _act(self, progress: Progress) -> int:
        try:
            self.replayed.work(progress)
        finally:
            self.done = self.replayed.report.done
        if not self.done:
            raise AztaskError(
                f"workflow {visible(self.workflow)} has no task among the dead letters; aztask "
                "workflow show lists its tasks"
            )
        return self.done
