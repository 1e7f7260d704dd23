"""The result of a workflow: its state, its value, its members as they end."""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from aztask.context import blocks_its_worker
from aztask.errors import (
    CodecError,
    ConfigurationError,
    ResultDamaged,
    ResultTimeout,
    TaskCancelled,
    TaskFailed,
)
from aztask.result import AsyncResult, TypedTask
from aztask.stores.records.base import State
from aztask.stores.records.damage import Damaged
from aztask.stores.records.workflows import ListedWorkflow
from aztask.support import clock
from aztask.workflows.bits import Bit, Failure
from aztask.workflows.edits import RootEdit, row_name
from aztask.workflows.engine import WorkflowEngine
from aztask.workflows.graph import Root
from aztask.workflows.plan import ROOT, GraphPlan, Node, task_id_of
from aztask.workflows.rows import JoinRow, read_row

logger = logging.getLogger(__name__)

# -- deletes a workflow that has ended, with the results of its tasks ----------------------
#
# If the process dies in between, the workflow is still there, some of its tasks' results are not:
# call it again. Housekeeping deletes the rest a retention time later in any case.


THREADS: Final = 16
"""Requests at a time to a store that is reached over a network."""


def forget(engine: WorkflowEngine, workflow: str) -> bool:
    """Delete the workflow; False if it is unknown or has not ended.

    Raises Damaged and BrokerUnavailable.
    """
    root = engine.graphs.root(workflow)
    plan = None if root is None else engine.graphs.plan(workflow, root)
    if root is None or plan is None or root.ended_at is None:
        return False
    tasks = [task_id_of(workflow, node.number) for node in plan.nodes if node.task]
    if engine.results.remote:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(engine.results.forget, tasks))
    else:
        for task in tasks:
            engine.results.forget(task)
    engine.store.delete_workflow(ListedWorkflow(workflow, root.at, root.ended_at))
    engine.graphs.forget(workflow)
    return True


LONGEST_WAIT: Final = 1.0
ASKED_CHAINS: Final = 50
"""Chains that have not ended and whose tasks `WorkflowResult.progress` asks for."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a workflow is.

    * `done`: tasks that have ended, whatever their end; `failed`: those that did not succeed.
    * `total`: tasks that it runs if all goes well.
    """

    done: int
    failed: int
    total: int


class WorkflowResult:
    """A handle to one workflow: it keeps the id and asks the result store for the rest.

    ::

        result = chain(charge.s(42), ship.s()).delay()
        result.get(timeout=60)

    `id` is the workflow's id. The methods raise ConfigurationError if the app has no result store,
    BrokerUnavailable if the store is unreachable, ResultDamaged if what is stored of the workflow
    cannot be read, and ForeignId if another app on the same result store uses the id.
    """

    __slots__ = ("_decode", "_engine", "_tasks", "id")

    def __init__(
        self,
        workflow_id: str,
        engine: Callable[[], WorkflowEngine],
        decode: Callable[[bytes], Any],
        tasks: Mapping[str, TypedTask] = MappingProxyType({}),
    ) -> None:
        """tasks: those whose results are read by their return annotations, by their names."""
        self.id = workflow_id
        self._engine = engine
        self._decode = decode
        self._tasks = tasks

    def __repr__(self) -> str:
        return f"<WorkflowResult {self.id}>"

    @property
    def state(self) -> str:
        """The state as text: "pending", "started", "succeeded", "failed" or "cancelled".

        "pending" means that no workflow with this id is known.
        """
        root = self._root()
        return (State.PENDING if root is None else root.state).value

    @property
    def progress(self) -> Progress:
        """How many tasks have ended, how many of them failed, and how many there are.

        It reads each group's bits: one request for some hundred members. Of a chain that has not
        ended it asks for some of its tasks, and does so for up to 50 chains.
        """
        found = self._read()
        if found is None:
            return Progress(0, 0, 0)
        root, plan, rows = found
        done = failed = asked = 0
        for slot, nodes in plan.in_slots.items():
            bit = _bit(plan, rows, slot.join, slot.member)
            tasks = [node for node in nodes if node.task]
            if bit is None:
                if len(tasks) > 1 and asked < ASKED_CHAINS:
                    asked += 1
                    done += self._ended_of(tasks)
                continue
            ended = [node for node in tasks if node.number <= bit.node]
            done += len(ended)
            failed += bool(bit.state is not State.SUCCEEDED and ended[-1:] == _last(nodes, bit))
        return Progress(done, failed, root.tasks)

    def _ended_of(self, chain: Sequence[Node]) -> int:
        """How many tasks of a chain have ended: as they run in order, half are asked at a time."""
        results = self._engine().results

        def has_ended(node: Node) -> bool:
            record = results.get(task_id_of(self.id, node.number))
            return record is not None and record.state.final

        return bisect_left(chain, True, key=lambda node: not has_ended(node))

    def ready(self) -> bool:
        """True if the workflow has ended."""
        root = self._root()
        return root is not None and root.ended_at is not None

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the workflow to end and return its value.

        * `timeout`: seconds to wait. None, the default, waits without limit; 0 only looks once.

        Raises TaskFailed or TaskCancelled if the workflow ended that way, and ResultTimeout if it
        did not end in time.
        """
        store = self._engine().results
        give_up_at = None if timeout is None else clock.monotonic() + timeout
        version = 0
        while True:
            root = self._root()
            if root is not None and root.ended_at is not None:
                return self._value(root)
            remaining = LONGEST_WAIT if give_up_at is None else give_up_at - clock.monotonic()
            if version == 0 and blocks_its_worker():
                logger.warning(
                    "a task waits for workflow %s, but its worker runs one task at a time: only "
                    "another worker can run it; raise -c, or do not wait inside a task",
                    self.id,
                )
            if remaining <= 0:
                why = "it goes on; ask again" if root else "no workflow with this id is known"
                raise ResultTimeout(f"workflow {self.id} did not end within {timeout:g} s: {why}")
            version = store.wait_changed(version, min(remaining, LONGEST_WAIT))

    async def aget(self, timeout: float | None = None) -> Any:
        """`get` for use in a coroutine: it waits in a thread."""
        return await asyncio.to_thread(self.get, timeout)

    def members(self) -> Iterator[AsyncResult[Any]]:
        """The results of the workflow's tasks, each as soon as it has ended.

        The iteration ends when the workflow has ended. Tasks that never ran are not among them.
        """
        given: set[int] = set()
        version = 0
        store = self._engine().results
        while True:
            found = self._read()
            if found is None:
                return
            root, plan, rows = found
            for number in _ended_tasks(plan, rows):
                if number not in given:
                    given.add(number)
                    yield AsyncResult(
                        task_id_of(self.id, number),
                        lambda: self._engine().results,
                        self._decode,
                        self._tasks,
                    )
            if root.ended_at is not None:
                return
            version = store.wait_changed(version, LONGEST_WAIT)

    @property
    def failures(self) -> list[Failure]:
        """The first 20 failures of the workflow, in order; empty unless it has failed."""
        try:
            row = self._rows([(Node(ROOT, size=1), 0)])[ROOT, 0]
        except Damaged as damage:
            raise self._damaged(damage.reason) from None
        decision = row.decision if row is not None else None
        return [] if decision is None else list(decision.failures)

    def cancel(self) -> bool:
        """Cancel the workflow: no further task of it starts. Returns False if it has ended.

        Workers notice within two seconds. Tasks that run now run to their end; each task that is
        waiting in a queue ends as cancelled when a worker receives it.
        """
        at = clock.wall()

        def change(root: Root) -> Root:
            if root.ended_at is not None or root.cancelled_at is not None:
                return root
            return replace(root, cancelled_at=at)

        edit, engine = RootEdit(self.id, change), self._engine()
        try:
            engine.documents.change([edit])
        except Damaged as damage:
            raise self._damaged(damage.reason) from None
        engine.graphs.forget(self.id)
        root = edit.root
        if root is None or root.ended_at is not None:
            return False
        engine.store.describe(self.id, root.at, root.summary())
        return True

    def forget(self) -> bool:
        """Delete the workflow and the results of its tasks from the result store.

        Returns False, and deletes nothing, if it is unknown or has not ended: cancel it first.
        """
        try:
            return forget(self._engine(), self.id)
        except Damaged as damage:
            raise self._damaged(damage.reason) from None

    # -- inside ------------------------------------------------------------------------------

    def _root(self) -> Root | None:
        try:
            return self._engine().graphs.root(self.id)
        except Damaged as damage:
            raise self._damaged(damage.reason) from None

    def _read(self) -> tuple[Root, GraphPlan, dict[tuple[int, int], JoinRow | None]] | None:
        """The root, the plan and all rows; None if there is no such workflow."""
        engine = self._engine()
        try:
            root = engine.graphs.root(self.id)
            plan = None if root is None else engine.graphs.plan(self.id, root)
            if root is None or plan is None:
                return None
            joins = [node for node in plan.nodes if not node.task and node.size]
            return root, plan, self._rows([(n, row) for n in joins for row in range(n.rows)])
        except Damaged as damage:
            raise self._damaged(damage.reason) from None

    def _rows(self, places: Sequence[tuple[Node, int]]) -> dict[tuple[int, int], JoinRow | None]:
        """Rows of bits, each place being (join, row). Raises Damaged."""
        names = [(self.id, row_name(join.number, row)) for join, row in places]
        found = self._engine().documents.read(names)
        return {
            (join.number, row): None if data is None else read_row(data, join.layout.row_size(row))
            for (join, row), data in zip(places, found, strict=True)
        }

    def _value(self, root: Root) -> Any:
        if root.state is State.CANCELLED:
            raise TaskCancelled(f"workflow {self.id} was cancelled")
        if root.state is not State.SUCCEEDED:
            failures = self.failures
            first = failures[0] if failures else Failure(ROOT, State.FAILED, "Unknown")
            raise TaskFailed(
                first.error_type or first.state.value,
                f"{first.error} (task {task_id_of(self.id, first.node)} of workflow {self.id})",
            )
        try:
            value = self._decode(self._engine().inputs.value(self.id, ROOT).value)
            plan = self._engine().graphs.plan(self.id, root)
        except (Damaged, CodecError) as error:
            raise self._damaged(str(error)) from None
        return value if plan is None else _Members(plan, self._tasks).value(ROOT, value)

    def _damaged(self, reason: str) -> ResultDamaged:
        return ResultDamaged(
            f"workflow {self.id} cannot be read ({reason}); its tasks are listed under their ids, "
            f"{task_id_of(self.id, 1)} and so on"
        )


class _Members:
    """Reads the value of a workflow: each task's part by its return annotation.

    * `_ends`: of each join, the node that each member's value is of. All elements of a chain work
      for one member; its value is that of the last one.
    """

    def __init__(self, plan: GraphPlan, tasks: Mapping[str, TypedTask]) -> None:
        self._nodes, self._tasks = plan.nodes, tasks
        self._ends: dict[int, dict[int, int]] = {}
        for node in plan.nodes:
            if node.slot is not None and not node.next:
                self._ends.setdefault(node.slot.join, {})[node.slot.member] = node.number

    def value(self, number: int, value: Any) -> Any:
        """The value of a node; plain data where its task is not registered here."""
        node, ends = self._nodes[number], self._ends.get(number, {})
        if node.task:
            task = self._tasks.get(node.task)
            return value if task is None else task.conversion.result(value)
        if node.single:
            return self.value(ends[0], value) if 0 in ends else value
        if not isinstance(value, list):
            return value
        return [
            self.value(ends[member], each) if member in ends else each
            for member, each in enumerate(value)
        ]


class EmptyWorkflow(WorkflowResult):
    """The result of a graph without tasks, such as ``group([])``: it has ended from the start.

    No result store keeps it: an app that is asked for its id does not know it.
    """

    __slots__ = ("_empty",)

    def __init__(self, workflow_id: str, value: list[Any]) -> None:
        super().__init__(workflow_id, _no_engine, _no_value)
        self._empty = value

    @property
    def state(self) -> str:
        """Always "succeeded": no task of it can fail."""
        return State.SUCCEEDED.value

    @property
    def progress(self) -> Progress:
        """No task has ended, and there is none that could."""
        return Progress(0, 0, 0)

    def ready(self) -> bool:
        """Always True, because nothing is waited for."""
        return True

    def get(self, timeout: float | None = None) -> Any:
        """The value, at once, whatever the timeout."""
        return self._empty

    def members(self) -> Iterator[AsyncResult[Any]]:
        """An iterator that ends at once, because it has no tasks."""
        return iter(())

    @property
    def failures(self) -> list[Failure]:
        """Always empty: no task of it can fail."""
        return []

    def cancel(self) -> bool:
        """Always False, because it has ended."""
        return False

    def forget(self) -> bool:
        """Always False, because nothing is kept."""
        return False


def _no_engine() -> WorkflowEngine:
    raise ConfigurationError("a workflow without tasks is in no result store")


def _no_value(data: bytes) -> Any:
    raise CodecError("a workflow without tasks has no stored value")


def _bit(
    plan: GraphPlan, rows: dict[tuple[int, int], JoinRow | None], join: int, member: int
) -> Bit | None:
    number, index = plan.nodes[join].layout.place(member)
    row = rows.get((join, number))
    return None if row is None else row.bit(index)


def _last(nodes: Sequence[Node], bit: Bit) -> list[Node]:
    """The node that filled the slot, as a list; empty if none of these did."""
    return [node for node in nodes if node.number == bit.node]


def _ended_tasks(plan: GraphPlan, rows: dict[tuple[int, int], JoinRow | None]) -> list[int]:
    """The tasks that have ended, as far as the bits say so."""
    found: list[int] = []
    for slot, nodes in plan.in_slots.items():
        bit = _bit(plan, rows, slot.join, slot.member)
        if bit is not None:
            found += [node.number for node in nodes if node.task and node.number <= bit.node]
    return sorted(found)
