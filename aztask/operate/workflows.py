"""Workflows: list and show them; cancel them, and resume them after their tasks failed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from aztask.address.owner import NO_OWNER, Owner
from aztask.app import App
from aztask.errors import AztaskError, ForeignId, NotFound, ResultDamaged
from aztask.operate.action import Action, Progress, Subject, results_of
from aztask.operate.deadletters.actions import ReplayLetters, replay_by_id
from aztask.stores.records.base import LOST, RunRecord, State
from aztask.stores.records.damage import Damaged
from aztask.stores.records.owners import foreign_id, is_foreign
from aztask.stores.records.workflows import ListedWorkflow
from aztask.support.display import visible
from aztask.workflows.bits import Bit, Decision, Failure
from aztask.workflows.edits import RootEdit, join_name, row_name
from aztask.workflows.engine import WorkflowEngine
from aztask.workflows.graph import Root, read_root
from aztask.workflows.packing import read_join
from aztask.workflows.plan import ROOT, GraphPlan, JoinSlot, Node, task_id_of
from aztask.workflows.repair import MEMBER_LOST
from aztask.workflows.rows import JoinRow, read_row

# -- A workflow as people see it: a tree of its nodes with their states, and a list of workflows.

ROOTS: Final = 64
"""Workflows whose roots are read at once."""
ASKED: Final = 200
"""Tasks without a bit whose state is asked from the result store; of more it is not shown."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node: a task, or a group with its members.

    * `state`: None for a task that no worker has started; then `waits` says why, "" if that is not
      known.
    * `members`: for each member of a group, its nodes in the order in which they run.
    * `handler`: of a group, the task of its `on_error`.
    * `generation`: of the last run; `lost`: its message is gone without a dead letter.
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
    waits: str = ""
    handler: NodeView | None = None
    generation: int = 0
    lost: bool = False


@dataclass(frozen=True, slots=True)
class WorkflowView:
    """One workflow, with the nodes of its outermost chain, and the task of its `on_error`."""

    workflow: str
    root: Root
    nodes: tuple[NodeView, ...]
    handler: NodeView | None = None

    def all_nodes(self) -> Iterator[NodeView]:
        """Every node, groups before their members, and handlers of errors behind them."""
        stack = [*([self.handler] if self.handler else []), *reversed(self.nodes)]
        while stack:
            node = stack.pop()
            yield node
            stack += [node.handler] if node.handler else []
            stack += [each for member in reversed(node.members) for each in reversed(member)]


def view(engine: WorkflowEngine, workflow: str) -> WorkflowView | None:
    """The workflow as it is now; None if it is unknown. Raises Damaged, BrokerUnavailable."""
    root = engine.graphs.root(workflow)
    plan = None if root is None else engine.graphs.plan(workflow, root)
    if root is None or plan is None:
        return None
    viewer = _Viewer(engine, workflow, root, plan)
    return WorkflowView(workflow, root, viewer.nodes(), viewer.handler(plan.nodes[ROOT]))


def summaries(
    engine: WorkflowEngine, limit: int, state: str | None = None, owner: Owner = NO_OWNER
) -> Iterator[tuple[str, Root | Damaged | ForeignId]]:
    """Open workflows, then ended ones, the newest first: ids, and roots or what is wrong.

    Workflows of other owners are among them, unless a state is asked for: theirs is not read.
    owner: of the store, if it is known.
    """
    listed = engine.store.all_workflows(limit)
    ordered = sorted(listed, key=lambda one: (one.ended_at is not None, -(one.at)))
    known: dict[str, ListedWorkflow | None] = {}
    for each in ordered:  # one that is listed twice is being moved: its root decides
        known[each.workflow] = None if each.workflow in known else each
    names, count = list(known), 0
    for begin in range(0, len(names), ROOTS):
        some = names[begin : begin + ROOTS]
        shown: dict[str, Root | Damaged | ForeignId | None]
        shown = {name: _listed(known[name], owner) for name in some}
        unknown = [name for name, root in shown.items() if root is None]
        shown.update(zip(unknown, _roots(engine, unknown), strict=True))
        for name, root in shown.items():
            if count >= limit:
                return
            if root is None or (isinstance(root, Root) and state not in (None, root.state.value)):
                continue
            count += 1
            if state is None or not isinstance(root, ForeignId):
                yield name, root


def _listed(each: ListedWorkflow | None, owner: Owner) -> Root | ForeignId | None:
    """What the list itself says of a workflow; None if its root has to be read."""
    if each is None:
        return None
    if is_foreign(owner, each.broker):
        return foreign_id("workflow", each.workflow, each.broker, owner)
    try:
        return read_root(each.summary) if each.summary else None
    except Damaged:
        return None


def _roots(engine: WorkflowEngine, names: Sequence[str]) -> list[Root | Damaged | ForeignId | None]:
    """The roots of workflows, in bulk. One that cannot be read fails a whole question: then each
    half is asked for by itself."""
    if not names:
        return []
    try:
        return list(engine.graphs.roots(names))
    except (ForeignId, Damaged) as error:
        if len(names) == 1:
            return [error]
    middle = len(names) // 2
    return _roots(engine, names[:middle]) + _roots(engine, names[middle:])


@dataclass(slots=True)
class _Viewer:
    engine: WorkflowEngine
    workflow: str
    root: Root
    plan: GraphPlan
    rows: dict[tuple[int, int], JoinRow] = field(default_factory=dict)
    decisions: dict[int, Decision] = field(default_factory=dict)
    states: dict[int, State | None] = field(default_factory=dict)
    served: set[str] | None = None
    asked: dict[int, RunRecord | None] = field(init=False)

    def __post_init__(self) -> None:
        """Ask for the tasks in bulk. One whose id another owner uses is not shown."""
        tasks = [node.number for node in self.plan.nodes if node.task][:ASKED]
        ids = [task_id_of(self.workflow, number) for number in tasks]
        found = zip(tasks, self.engine.results.get_many(ids), strict=True)
        self.asked = {
            number: each if isinstance(each, RunRecord) else None for number, each in found
        }

    def nodes(self) -> tuple[NodeView, ...]:
        joins = [node for node in self.plan.nodes if not node.task and node.size]
        places = [(node, row) for node in joins for row in range(node.rows)]
        names = [(self.workflow, row_name(node.number, row)) for node, row in places]
        for (node, number), data in zip(places, self.engine.documents.read(names), strict=True):
            if data is not None:
                row = read_row(data, node.layout.row_size(number))
                self.rows[node.number, number] = row
                if row.decision is not None:
                    self.decisions[node.number] = row.decision
        several = [node for node in joins if node.rows > 1]
        names = [(self.workflow, join_name(node.number)) for node in several]
        for node, data in zip(several, self.engine.documents.read(names), strict=True):
            join = None if data is None else read_join(data, node.rows)
            if join is not None and join.decision is not None:
                self.decisions[node.number] = join.decision
        return self._slot(JoinSlot(ROOT, 0))

    def handler(self, join: Node) -> NodeView | None:
        """The task of a join's `on_error`."""
        if join.on_error is None:
            return None
        decision = self.decisions.get(join.number)
        failed = decision is not None and decision.state is not State.SUCCEEDED
        unsent = "not sent" if decision is None else "not needed"
        return self._node(self.plan.nodes[join.on_error], None, "" if failed else unsent)

    def _bit(self, slot: JoinSlot) -> Bit | None:
        number, index = self.plan.nodes[slot.join].layout.place(slot.member)
        row = self.rows.get((slot.join, number))
        return None if row is None else row.bit(index)

    def _slot(self, slot: JoinSlot) -> tuple[NodeView, ...]:
        bit = self._bit(slot)
        nodes = self.plan.in_slots[slot]
        return tuple(self._node(node, bit) for node in nodes)

    def _node(self, node: Node, bit: Bit | None, unsent: str | None = None) -> NodeView:
        """unsent: why a handler is not sent, "" if it is; None for other nodes."""
        state, failure = None, None
        generation, lost = 0 if bit is None else bit.generation, False
        if bit is not None and node.number < bit.node:
            state = State.SUCCEEDED
        elif bit is not None and node.number == bit.node:
            state = bit.state
            failure = bit.failures[0] if bit.failures and node.task else None
        elif not node.task and node.number in self.decisions:
            state = self.decisions[node.number].state
        task_id = task_id_of(self.workflow, node.number)
        started = ended = None
        if node.task and node.number in self.asked:
            record = self.asked[node.number]
            if record is not None:
                state, generation = record.state, record.key.generation
                started = record.started_at
                ended = record.outcome.at if record.outcome is not None else None
                why = record.outcome.error_type if record.outcome is not None else ""
                lost = state is State.FAILED and why in (MEMBER_LOST, LOST)
            self.states[node.number] = state
        members: tuple[tuple[NodeView, ...], ...] = ()
        if not node.task:
            slots = [JoinSlot(node.number, member) for member in range(node.size)]
            members = tuple(self._slot(each) for each in slots)
        waits = self._waits(node, unsent) if node.task and state is None else ""
        return NodeView(
            node.number, task_id, node.task, node.queue, state, started, ended, failure, members,
            waits, self.handler(node) if node.size else None, generation, lost,
        )  # fmt: skip

    def _waits(self, node: Node, unsent: str | None) -> str:
        """Why no worker has started a task; "" if that is not known."""
        if node.number not in self.states:
            return ""  # it was not asked for
        if unsent is None:
            unsent = "" if self._is_sent(node) else "not sent"
        if unsent:
            return unsent
        if self.served is None:
            now = time.time()
            alive = [each for each in self.engine.results.workers() if not each.damage]
            alive = [each for each in alive if each.state_at(now) == "alive"]
            self.served = {queue for each in alive for queue in each.queues}
        unserved = "" if node.queue in self.served else ", which no worker serves"
        return f"waiting in queue {node.queue}{unserved}"

    def _is_sent(self, node: Node) -> bool:
        number = self.plan.before.get(node.number)
        if number is None:
            return self.root.starting_until is None
        before = self.plan.nodes[number]
        if before.task:
            return self.states.get(number) is State.SUCCEEDED
        decision = self.decisions.get(number)
        return not before.size or (decision is not None and decision.state is State.SUCCEEDED)


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
    found = summaries(app.workflows.engine, limit, state, app.owner.of_broker)
    return [shown(each, root) for each, root in found]


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
    """Run the tasks of a workflow again that did not succeed. It goes on behind each that does now.

    Dead-lettered tasks are replayed. Those that were cancelled, that expired or whose message was
    lost have no dead letter: they are sent again as the workflow stored them, and the workflow is
    no longer cancelled. What a body was given before does not change. Raises as `workflow` does,
    and AztaskError if there is no such task.
    """
    found = workflow(app, workflow_id)
    queues: dict[str, set[str]] = defaultdict(set)
    again = []
    for node in found.all_nodes():
        if not node.task or node.state in (None, State.SUCCEEDED):
            continue
        task = app.tasks.get(node.task)
        once = task is not None and task.delivery == "at-most-once"
        without = node.lost or (once and node.state is State.FAILED)
        if without or node.state in (State.CANCELLED, State.EXPIRED):
            again.append(node)
        else:
            queues[node.queue].add(node.task_id)
    replayed = replay_by_id(app, queues)
    succeeded = found.root.state is State.SUCCEEDED
    count = replayed.count + len(again)
    return ResumeWorkflow(app, count, workflow_id, replayed, succeeded, tuple(again))


@dataclass(slots=True)
class ResumeWorkflow(Action[int]):
    """Runs tasks of a workflow again; `act` returns how many.

    * `succeeded`: the workflow had succeeded, so that only its tasks' own results change.
    * `again`: the tasks that have no dead letter.
    """

    name: ClassVar[str] = "workflow-resume"

    workflow: str
    replayed: ReplayLetters
    succeeded: bool
    again: tuple[NodeView, ...] = ()

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
        if self.again:
            self._send_again()
        if not self.done:
            raise AztaskError(
                f"workflow {visible(self.workflow)} has no task to run again; aztask workflow show "
                "lists its tasks"
            )
        return self.done

    def _send_again(self) -> None:
        """Send the tasks without a dead letter, each as a new generation.

        If the process dies on the way, act again: a task whose message was sent already runs once.
        """
        engine = self.app.workflows.engine
        edit = RootEdit(self.workflow, lambda root: replace(root, cancelled_at=None))
        engine.documents.change([edit])
        engine.graphs.forget(self.workflow)
        if edit.root is None:  # it was deleted in between
            return
        for node in self.again:
            engine.results.uncancel(node.task_id)
        nodes = [(node.number, node.generation + 1) for node in self.again]
        refused = engine.mailer.send(self.workflow, edit.root, nodes)
        self.done += len(nodes) - len(refused)
