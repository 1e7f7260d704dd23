"""Turns ends into bits, full rows into decisions, and decisions into what follows.

Each call works off a list: an end may fill a row, the row may decide its join, and the decision is
an end of the member above, up to the root. Rows that are changed together are written together.

Crash windows. A process may die between any two steps. The message whose end began this is not
settled then; its redelivery repeats the end, finds the row as it is, and continues from there:

* before the bit: nothing happened.
* row full, its values not written, or the bit above not set: both are done again.
* decided, nothing sent: the repeated end of a full row acts on the decision again. An end that is
  not repeated leaves that to the process that has decided: several may find the same row full.
* sent, not settled: the nodes are sent again under the same ids; a node that was recorded already
  is not.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Final, NamedTuple

from aztask.stores.records.base import ResultStore, State
from aztask.stores.records.workflows import DocumentChange
from aztask.support.clock import Clock
from aztask.support.failpoint import hit
from aztask.workflows.bits import (
    NIL,
    Decision,
    Failure,
    FullRow,
    MemberEnd,
    OfJoin,
    ParkedValue,
    Value,
)
from aztask.workflows.documents import Documents
from aztask.workflows.edits import JoinEdit, RootEdit, RowEdit, values_name
from aztask.workflows.graph import Graphs, Root
from aztask.workflows.mailing import BatchWatch, Mailer, Posted
from aztask.workflows.packing import pack_values, read_values
from aztask.workflows.place import NodePlace
from aztask.workflows.plan import ROOT, GraphPlan, JoinSlot, Node, task_id_of
from aztask.workflows.rows import JoinRow

logger = logging.getLogger(__name__)

REMEMBERED: Final = 500
"""Rows of which it is known how full they are."""


class TaskEnd(NamedTuple):
    """The recorded end of a task of a workflow.

    * `value`: the encoded value of a success.
    * `repeated`: the end was recorded before, so that its follow-ups may be sent already.
    """

    workflow: str
    place: NodePlace
    generation: int
    state: State
    value: bytes | None = None
    error_type: str = ""
    error: str = ""
    repeated: bool = False

    def end(self, state: State | None = None) -> MemberEnd | None:
        """The end of its slot; None for a task of `on_error`, which has no slot."""
        place, final = self.place, state or self.state
        if place.slot is None:
            return None
        failures: tuple[Failure, ...] = ()
        if final is not State.SUCCEEDED:
            failures = (Failure(place.node, final, self.error_type, self.error),)
        return MemberEnd(
            place.slot,
            place.size,
            place.node,
            self.generation,
            final,
            self.value or NIL,
            failures,
            place.passes_errors,
            place.blocked,
            first=not self.repeated,
        )


class Joins:
    """Ends of members in, bits, decisions and messages out. Any thread may call."""

    def __init__(
        self,
        documents: Documents,
        graphs: Graphs,
        mailer: Mailer,
        results: ResultStore,
        clock: Clock,
    ) -> None:
        self.documents = documents
        self.graphs = graphs
        self.mailer = mailer
        self.results = results
        self.clock = clock
        self.left: dict[tuple[str, int, int], int] = {}
        self._lock = Lock()

    def note_left(self, row: tuple[str, int, int], now: JoinRow | None) -> None:
        """Remember how many members of a row have not ended."""
        with self._lock:
            if now is None:
                self.left.pop(row, None)
                return
            self.left[row] = now.left
            while len(self.left) > REMEMBERED:
                del self.left[next(iter(self.left))]

    def ended(self, ends: Sequence[TaskEnd]) -> None:
        """Set the bits of these ends, and send what follows. Idempotent.

        Raises BrokerUnavailable, SendUnconfirmed (nothing is lost: call again) and Damaged.
        """
        work = _Work(self)
        for end in ends:
            work.task_ended(end)
        work.run()

    def start(
        self,
        workflow: str,
        nodes: Sequence[int],
        watch: BatchWatch | None = None,
        made: Mapping[int, Posted] | None = None,
    ) -> None:
        """Send the first nodes of a workflow; empty groups among them end at once.

        * `made`: messages that this process has just made and stored.
        """
        work = _Work(self, watch, made)
        work.go(workflow, nodes, repeated=False)
        work.run()

    def decided(self, workflow: str, join: int, decision: Decision) -> None:
        """Act on a decision again, for housekeeping."""
        work = _Work(self)
        work.decided(workflow, join, decision, repeated=True)
        work.run()

    def filled(self, workflow: str, join: int, rows: dict[int, JoinRow]) -> None:
        """Note full rows of a join with several rows again, for housekeeping."""
        work = _Work(self)
        work.fill_rows({(workflow, join): rows}, {(workflow, join)}, self.clock.wall())
        work.run()

    def decide(self, workflow: str, join: int) -> None:
        """Decide a join whose only row is full, and act on that, for housekeeping."""
        work = _Work(self)
        work.decide(workflow, join)
        work.run()

    def finish(self, workflow: str, decision: Decision) -> None:
        """End the workflow as its root has decided. Idempotent.

        If the process dies after the root is written, the workflow stays in the index of open ones;
        housekeeping repeats this.
        """

        def end(root: Root) -> Root:
            stopped = root.cancelled_at is not None and decision.state is not State.SUCCEEDED
            state = State.CANCELLED if stopped else decision.state
            return replace(root, ended_at=decision.at, state=state)

        edit = RootEdit(workflow, end)
        self.documents.change([edit])
        before, root = edit.before, edit.root
        if before is None or root is None or root.ended_at is None:
            return
        hit("ended")
        store = self.documents.store
        if before.ended_at is not None and before.ended_at != root.ended_at:
            store.reopen_workflow(workflow, root.at, before.ended_at)
        store.close_workflow(workflow, root.at, root.ended_at, root.summary())
        self.graphs.forget(workflow)


@dataclass(slots=True)
class _Due:
    """A node to send. repeated: it may have been sent before."""

    node: int
    generation: int
    repeated: bool


@dataclass(slots=True)
class _Work:
    """The list that one call works off: ends to set, then nodes to send."""

    joins: Joins
    watch: BatchWatch | None = None
    made: Mapping[int, Posted] | None = None
    ends: list[tuple[str, MemberEnd]] = field(default_factory=list)
    due: dict[str, list[_Due]] = field(default_factory=dict)

    def run(self) -> None:
        while self.ends or self.due:
            while self.ends:
                ends, self.ends = self.ends, []
                self._set(ends)
            due, self.due = self.due, {}
            for workflow, nodes in due.items():
                self._send(workflow, nodes)

    def task_ended(self, end: TaskEnd) -> None:
        """A success with successors starts them; any other end fills the slot."""
        if end.state is not State.SUCCEEDED or not end.place.continues:
            self._fill(end.workflow, end.end())
            return
        plan = self.joins.graphs.plan(end.workflow)
        if plan is None:
            logger.info("workflow %s was deleted, nothing follows its task", end.workflow)
        elif self.joins.graphs.cancelled(end.workflow):
            self._fill(end.workflow, end.end(State.CANCELLED))
        else:
            self.go(end.workflow, plan.nodes[end.place.node].next, repeated=end.repeated)

    def go(self, workflow: str, nodes: Iterable[int], *, repeated: bool) -> None:
        """Note nodes to send; an empty group among them is decided at once."""
        plan = self.joins.graphs.plan(workflow)
        if plan is None:
            return
        for number in nodes:
            if plan.nodes[number].task:
                self.due.setdefault(workflow, []).append(_Due(number, 0, repeated))
            else:
                empty = Decision(State.SUCCEEDED, 0, self.joins.clock.wall())
                self.decided(workflow, number, empty, repeated=repeated)

    def decided(self, workflow: str, number: int, decision: Decision, *, repeated: bool) -> None:
        """Start what follows a join, or fill the slot that it works for."""
        plan = self.joins.graphs.plan(workflow)
        if plan is None:
            return
        node = plan.nodes[number]
        state, failures = decision.state, decision.failures
        if state is State.SUCCEEDED and node.next:
            if not self.joins.graphs.cancelled(workflow):
                self.go(workflow, node.next, repeated=repeated)
                return
            state, failures = State.CANCELLED, (Failure(number, State.CANCELLED),)
        handler = None if state is State.SUCCEEDED else node.on_error
        if handler is not None and not self.joins.graphs.cancelled(workflow):
            due = _Due(handler, decision.generation, repeated)
            self.due.setdefault(workflow, []).append(due)
        if node.slot is not None:
            self._fill(workflow, _end_of(plan, node, decision.generation, state, failures))
        elif number == ROOT:
            self.joins.finish(workflow, decision)

    def _fill(self, workflow: str, end: MemberEnd | None) -> None:
        if end is not None:
            self.ends.append((workflow, end))

    # -- bits --------------------------------------------------------------------------------

    def _set(self, ends: Sequence[tuple[str, MemberEnd]]) -> None:
        """Set bits, those of one row in one write, and act on what becomes full."""
        now = self.joins.clock.wall()
        edits: dict[tuple[str, int, int], RowEdit] = {}
        for workflow, end in ends:
            layout = end.layout
            key = (workflow, end.slot.join, layout.place(end.slot.member)[0])
            edit = edits.get(key)
            if edit is None:
                left = self.joins.left.get(key, layout.row_size(key[2]))
                edit = RowEdit(*key, layout, [], now, end.passes_errors, left=left)
                edits[key] = edit
            edit.ends.append(end)
        self.joins.documents.change(list(edits.values()))
        hit("bit-set", len(ends))
        full: dict[tuple[str, int], dict[int, JoinRow]] = {}
        acting: set[tuple[str, int]] = set()
        for key, edit in edits.items():
            row = edit.row
            if row is None or not row.full:
                self.joins.note_left(key, row)
                continue
            if edit.layout.rows > 1:
                full.setdefault((edit.workflow, edit.join), {})[edit.number] = row
                if not edit.fresh:
                    acting.add((edit.workflow, edit.join))
            elif row.decision is not None and (edit.decides or not edit.fresh):
                self.decided(edit.workflow, edit.join, row.decision, repeated=not edit.decides)
        if full:
            self.fill_rows(full, acting, now)

    def decide(self, workflow: str, number: int) -> None:
        """Decide a join with one full row, to which its last bit was only appended."""
        plan = self.joins.graphs.plan(workflow)
        if plan is None:
            return
        node = plan.nodes[number]
        now = self.joins.clock.wall()
        edit = RowEdit(workflow, number, 0, node.layout, [], now, node.passes_errors)
        self.joins.documents.change([edit])
        if edit.row is not None and edit.row.decision is not None:
            self.decided(workflow, number, edit.row.decision, repeated=True)

    def fill_rows(
        self,
        full: dict[tuple[str, int], dict[int, JoinRow]],
        acting: Container[tuple[str, int]],
        now: float,
    ) -> None:
        """Write the values of full rows, each as one document, then their bits in their joins.

        * `acting`: joins on whose decision this acts, even if another process has made it.
        """
        edits = []
        changes: list[DocumentChange] = []
        for (workflow, number), rows in full.items():
            plan = self.joins.graphs.plan(workflow)
            if plan is None:
                continue
            found: dict[int, FullRow] = {}
            for index, row in rows.items():
                whole = row.as_full("")
                whole.values = values_name(number, index, whole.revision)
                changes.append(
                    DocumentChange(workflow, whole.values, self._gathered(workflow, row))
                )
                found[index] = whole
            edits.append(JoinEdit(workflow, plan.nodes[number], found, now))
        self.joins.documents.store.write(changes)
        hit("row-filled", len(changes))
        self.joins.documents.change(edits)
        for edit in edits:
            decision = None if edit.join is None else edit.join.decision
            acts = edit.decides or (edit.workflow, edit.node.number) in acting
            if decision is not None and acts:
                self.decided(edit.workflow, edit.node.number, decision, repeated=not edit.decides)

    def _gathered(self, workflow: str, row: JoinRow) -> bytes:
        """The values of a row as one document; parked ones are read and copied."""
        plain = row.plain_values()
        if plain is not None:
            return plain
        bits = [bit for bit in row.bits if bit is not None]
        names = sorted({bit.value.document for bit in bits if isinstance(bit.value, ParkedValue)})
        read = self.joins.documents.read([(workflow, name) for name in names])
        parked = {
            name: read_values(data or b"\x90") for name, data in zip(names, read, strict=True)
        }
        found: list[tuple[Value | None, Failure | None]] = []
        for bit in bits:
            value = bit.value
            if isinstance(value, ParkedValue) and value.index < len(parked[value.document]):
                value = parked[value.document][value.index][0]
            found.append((value, bit.failures[0] if bit.failures else None))
        return pack_values(found)

    # -- sending -----------------------------------------------------------------------------

    def _send(self, workflow: str, due: Sequence[_Due]) -> None:
        """Send nodes, unless they were sent before and are known; refused ones fail."""
        plan, root = self.joins.graphs.plan(workflow), self.joins.graphs.recent_root(workflow)
        nodes = [(each.node, each.generation) for each in due if self._missing(workflow, each)]
        if plan is None or root is None or not nodes:
            return
        for number, reason in self.joins.mailer.send(workflow, root, nodes, self.watch, self.made):
            node = plan.nodes[number]
            failure = Failure(number, State.FAILED, "ContentRefused", reason)
            if node.slot is not None:
                self._fill(workflow, _end_of(plan, node, 0, State.FAILED, (failure,)))

    def _missing(self, workflow: str, due: _Due) -> bool:
        if not due.repeated:
            return True
        known = self.joins.results.get(task_id_of(workflow, due.node))
        return known is None or known.key.generation < due.generation


def _end_of(
    plan: GraphPlan, node: Node, generation: int, state: State, failures: tuple[Failure, ...]
) -> MemberEnd:
    """The end of the slot that a node of the plan works for."""
    slot = node.slot or JoinSlot(ROOT, 0)
    join = plan.nodes[slot.join]
    return MemberEnd(
        slot,
        join.size,
        node.number,
        generation,
        state,
        OfJoin(node.number) if state is State.SUCCEEDED else NIL,
        failures,
        join.passes_errors,
        join.blocked,
    )
