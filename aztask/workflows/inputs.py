"""Values by reference: what a task of a workflow gets as its first argument.

A message names the node whose value it takes. The worker reads that value before the run: of a task
from its recorded outcome, of a join from its rows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from aztask.errors import ResultError, TaskCancelled, TaskExpired, TaskFailed
from aztask.message.codec import Codec
from aztask.message.serializer import pack
from aztask.stores.records.base import ResultStore, State
from aztask.stores.records.damage import Damaged
from aztask.workflows.bits import (
    NIL,
    Decision,
    Failure,
    OfJoin,
    ParkedValue,
    Value,
)
from aztask.workflows.documents import Documents
from aztask.workflows.edits import join_name, row_name
from aztask.workflows.graph import Graphs
from aztask.workflows.packing import read_join, read_values
from aztask.workflows.place import NodePlace
from aztask.workflows.plan import ROOT, GraphPlan, Node, task_id_of
from aztask.workflows.rows import read_row

DEPTH: Final = 200

Member = tuple[bytes, Failure | None]
"""An encoded value, or nil and the failure in its place."""


@dataclass(frozen=True, slots=True)
class Input:
    """The first argument of a task.

    * `value`: encoded as `Codec.decode_value` reads it.
    * `failures`: [index, node, state, error type, error] of each failed member in its list.
    """

    value: bytes
    failures: tuple[tuple[int, int, str, str, str], ...] = ()

    def packet(self) -> list[Any]:
        """Plain data, for a pool process."""
        return [self.value, [list(each) for each in self.failures]]


class Inputs:
    """Reads inputs. Any thread may call."""

    def __init__(self, documents: Documents, graphs: Graphs, results: ResultStore) -> None:
        self._documents = documents
        self._graphs = graphs
        self._results = results

    def load(self, workflow: str, place: NodePlace) -> Input | None:
        """The input of the task at `place`; None if it takes none.

        Raises Damaged if it is missing or cannot be read, and BrokerUnavailable.
        """
        if place.takes is None:
            return None
        plan = self._graphs.plan(workflow)
        if plan is None or place.takes >= len(plan.nodes):
            raise Damaged(f"workflow {workflow} no longer exists")
        node = plan.nodes[place.takes]
        if place.takes_errors:
            return Input(_failures_value(workflow, self._decision(workflow, node)))
        if node.task:
            return Input(self._task_value(workflow, node.number))
        members = self._members(workflow, node, 0)
        if node.single:
            return Input(members[0][0])
        failures = tuple(
            (index, each.node, each.state.value, each.error_type, each.error)
            for index, (_, each) in enumerate(members)
            if each is not None
        )
        return Input(_array([value for value, _ in members]), failures)

    def value(self, workflow: str, join: int) -> Input:
        """The value of a join that has succeeded. Raises as `load` does."""
        return self.load(workflow, NodePlace(0, takes=join)) or Input(NIL)

    def begun(self, workflow: str, plan: GraphPlan, number: int) -> bool:
        """Whether what a node follows has ended as it has to for the node to start.

        For a task of `on_error` that is the failure of its join. Raises Damaged, BrokerUnavailable.
        """
        if plan.nodes[number].slot is None and number != ROOT:
            failed = next((each for each in plan.nodes if each.on_error == number), None)
            return failed is not None and self._ended(workflow, failed) not in (
                None, State.SUCCEEDED,
            )  # fmt: skip
        before = plan.before.get(number)
        if before is None:
            return True
        node = plan.nodes[before]
        if node.task:
            runs = self._results.history(task_id_of(workflow, before))
            return any(each.state is State.SUCCEEDED for each in runs)
        if not node.size:  # an empty group is decided where it starts, and nothing is written
            return self.begun(workflow, plan, before)
        return self._ended(workflow, node) is State.SUCCEEDED

    def _ended(self, workflow: str, node: Node) -> State | None:
        """How a join has ended; None if it has not."""
        try:
            return self._decision(workflow, node).state
        except Damaged:
            return None

    def _task_value(self, workflow: str, number: int) -> bytes:
        """The value of a task: that of its first success, so that a replay changes nothing."""
        task_id = task_id_of(workflow, number)
        for record in self._results.history(task_id):
            if record.state is State.SUCCEEDED and record.outcome is not None:
                if record.damage:
                    raise Damaged(f"the value of task {task_id} cannot be read: {record.damage}")
                return record.outcome.value or NIL
        raise Damaged(f"the value of task {task_id} is no longer in the result store")

    def _decision(self, workflow: str, node: Node) -> Decision:
        name = row_name(node.number, 0) if node.rows == 1 else join_name(node.number)
        (data,) = self._documents.read([(workflow, name)])
        if data is None:
            decision = None
        elif node.rows == 1:
            decision = read_row(data, node.size).decision
        else:
            decision = read_join(data, node.rows).decision
        if decision is None:
            raise Damaged(f"node {node.number} of workflow {workflow} has not ended")
        return decision

    def _members(self, workflow: str, node: Node, depth: int) -> list[Member]:
        """The members' values of a join that has succeeded, in order."""
        if depth > DEPTH:
            raise Damaged(f"the values of workflow {workflow} refer to each other in a circle")
        if not node.size:
            return []
        if node.rows == 1:
            (data,) = self._documents.read([(workflow, row_name(node.number, 0))])
            row = read_row(data or b"", node.size)
            found = [
                (bit.value, bit.failures[0] if bit.failures else None) if bit else (None, None)
                for bit in row.bits
            ]
            return self._resolved(workflow, found, depth)
        names = self._decision(workflow, node).values
        if len(names) != node.rows:
            raise Damaged(f"node {node.number} of workflow {workflow} names no values")
        documents = self._documents.read([(workflow, name) for name in names])
        members: list[Member] = [(NIL, None)] * node.size
        for number, data in enumerate(documents):
            values = read_values(data or b"")
            if len(values) != node.layout.row_size(number):
                raise Damaged("a document of values holds too few")
            resolved = self._resolved(workflow, values, depth)
            for place, value in zip(node.layout.members(number), resolved, strict=True):
                members[place] = value
        return members

    def _resolved(
        self,
        workflow: str,
        values: Sequence[tuple[Value | None, Failure | None]],
        depth: int,
    ) -> list[Member]:
        """These values with all references replaced by what they refer to."""
        names = sorted({value.document for value, _ in values if isinstance(value, ParkedValue)})
        read = self._documents.read([(workflow, name) for name in names]) if names else []
        parked = {name: read_values(data or b"") for name, data in zip(names, read, strict=True)}
        found: list[Member] = []
        for each, failure in values:
            value: Value | None = each
            if isinstance(value, ParkedValue):
                rows = parked[value.document]
                if value.index >= len(rows):
                    raise Damaged("a document of values holds too few")
                value = rows[value.index][0]
            if isinstance(value, OfJoin):
                found.append((self._join_value(workflow, value.join, depth + 1), failure))
            else:
                found.append((value if isinstance(value, bytes) else NIL, failure))
        return found

    def _join_value(self, workflow: str, number: int, depth: int) -> bytes:
        plan = self._graphs.plan(workflow)
        if plan is None or number >= len(plan.nodes):
            raise Damaged(f"workflow {workflow} no longer exists")
        node = plan.nodes[number]
        values = [value for value, _ in self._members(workflow, node, depth)]
        return values[0] if node.single else _array(values)


def _array(values: Sequence[bytes]) -> bytes:
    """The encoded list of encoded values (the msgpack specification, formats array 16 and 32)."""
    count = len(values)
    head = struct.pack(">BH", 0xDC, count) if count < 1 << 16 else struct.pack(">BI", 0xDD, count)
    return head + b"".join(values)


def _failures_value(workflow: str, decision: Decision) -> bytes:
    """What `on_error` gets: a list of maps, one for each failure that the decision lists."""
    return pack(
        [
            {
                "task_id": task_id_of(workflow, each.node),
                "state": each.state.value,
                "error_type": each.error_type,
                "error": each.error,
            }
            for each in decision.failures
        ]
    )


def first_argument(codec: Codec, value: bytes, failures: Sequence[Sequence[Any]]) -> Any:
    """The argument in an `Input.packet`, with an error in the place of each failure.

    Raises DecodeError or ContentRefused.
    """
    found = codec.decode_value(value)
    for index, _, state, error_type, error in failures:
        found[index] = _error(State(state), error_type, error)
    return found


def _error(state: State, error_type: str, error: str) -> ResultError:
    if state is State.CANCELLED:
        return TaskCancelled("the member was cancelled before it ran")
    if state is State.EXPIRED:
        return TaskExpired("the member was not run: it had expired")
    return TaskFailed(error_type, error)
