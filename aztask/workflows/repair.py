"""Housekeeping of open workflows: it does what no delivery will do.

Rules
1. Parts without a root, left behind by a sender that died, are deleted after `SWEEP_SECONDS`, if
   no root has come for `ROOTLESS_SECONDS`: the wall clock of the sender may be wrong.
2. If a sender dies after the root, its lease on the root lapses. One worker takes the lease over
   and sends the first nodes.
3. A workflow whose bits did not change since the last look is compared with the recorded outcomes:
   unset bits of ended tasks are set, and decisions are acted on again. Everything is idempotent, so
   several workers may do this at once.
4. A task that has not ended, and whose message is gone, fails as ``member-lost``: after
   `EMPTY_SECONDS` if its queue is empty, and after `LOST_SECONDS` otherwise. A task that waits, for
   a retry or inside its code, is not looked for before its time. One whose message was removed
   before it ran is left to `aztask.worker.upkeep.heartbeat` while it runs. A message that turns up
   later becomes a dead letter, which you can replay.
5. What a release before 0.2 has stored of it is signed anew, once by each worker that looks.
6. A workflow is deleted a retention time after it has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from aztask.errors import AztaskError, CodecError, ForeignId
from aztask.message.encryption import Locked
from aztask.queues.base import Broker
from aztask.settlement import DeadLetter, Resubmit
from aztask.stores.records.base import Outcome, RunKey, RunRecord, State
from aztask.stores.records.damage import Damaged
from aztask.stores.records.onceruns import once_runs_of
from aztask.stores.records.workflows import ListedWorkflow
from aztask.support.clock import Clock
from aztask.workflows.bits import Decision
from aztask.workflows.edits import RootEdit, join_name, row_name
from aztask.workflows.engine import WorkflowEngine
from aztask.workflows.graph import Root
from aztask.workflows.joins import TaskEnd
from aztask.workflows.packing import read_join
from aztask.workflows.place import NodePlace
from aztask.workflows.plan import GraphPlan, JoinSlot, Node, task_id_of
from aztask.workflows.rows import JoinRow, read_row
from aztask.workflows.starting import LEASE_SECONDS, WorkflowLauncher

logger = logging.getLogger(__name__)

PAGE: Final = 50
CHECKED: Final = 500
"""Tasks whose outcomes one look compares; the next look continues behind them."""

SWEEP_SECONDS: Final = 600.0
ROOTLESS_SECONDS: Final = 60.0
EMPTY_SECONDS: Final = 60.0
LOST_SECONDS: Final = 86400.0
MEMBER_LOST: Final = "member-lost"
OLD: Final = 100


@dataclass(slots=True)
class _Watched:
    """An open workflow as the last look saw it.

    * `seen`: how many bits were set; `next`: the slot at which the next look continues.
    * `missing`: since when each task is missing, on the clock of the deadlines, and whether its
      queue was empty all the time.
    * `resent`: nodes that were sent again.
    * `rootless`: since when it has parts and no root, on the same clock.
    * `signed`: all of it is signed, or some of it is refused, and this worker signs nothing of it.
    """

    seen: int = -1
    next: int = 0
    missing: dict[int, tuple[float, bool]] = field(default_factory=dict)
    resent: set[int] = field(default_factory=set)
    rootless: float | None = None
    signed: bool = False


@dataclass(slots=True)
class _Look:
    """One workflow in one look, with its bits and decisions."""

    workflow: str
    root: Root
    plan: GraphPlan
    watched: _Watched
    rows: dict[tuple[int, int], JoinRow] = field(default_factory=dict)
    decisions: dict[int, Decision] = field(default_factory=dict)

    def is_set(self, slot: JoinSlot) -> bool:
        """True if the bit of the slot is set."""
        number, index = self.plan.nodes[slot.join].layout.place(slot.member)
        row = self.rows.get((slot.join, number))
        return row is not None and row.bit(index) is not None


class DeliveredTask(Protocol):
    """A task, of which one asks whether its messages are removed before it runs."""

    @property
    def delivery(self) -> str:
        """As `App.task` takes it; "at-most-once" removes them first."""
        ...


class Repair:
    """Looks after open workflows, one page at each call of `look`. One thread calls it."""

    def __init__(
        self,
        engine: WorkflowEngine,
        starter: WorkflowLauncher,
        broker: Broker,
        clock: Clock,
        tasks: Mapping[str, DeliveredTask],
    ) -> None:
        """tasks: those of the app, by their names."""
        self._engine = engine
        self._starter = starter
        self._broker = broker
        self._clock = clock
        self._tasks = tasks
        self._after = ""
        self._watched: dict[str, _Watched] = {}

    def look(self) -> int:
        """Look at one page of open workflows; returns how many there were.

        A workflow that cannot be read is logged, and does not stop the others. Raises
        BrokerUnavailable.
        """
        page = self._engine.store.open_workflows(PAGE, self._after)
        self._after = page[-1].workflow if len(page) == PAGE else ""
        if not page and len(self._watched) > PAGE:
            self._watched.clear()
        for listed in page:
            try:
                self._one(listed)
            except (Damaged, ForeignId, Locked, LookupError, ValueError) as error:
                logger.error(
                    "workflow %s cannot be checked, the next look tries again: %s",
                    listed.workflow,
                    error,
                )
        return len(page)

    def purge(self, before: float) -> None:
        """Delete workflows that ended before a time, UTC epoch seconds."""
        for listed in self._engine.store.ended_workflows(OLD, before):
            self._engine.store.delete_workflow(listed)
            self._engine.graphs.forget(listed.workflow)

    def _one(self, listed: ListedWorkflow) -> None:
        now, workflow = self._clock.wall(), listed.workflow
        root = self._engine.graphs.root(workflow)
        if root is None:
            watched, looked_at = (
                self._watched.setdefault(workflow, _Watched()),
                self._clock.monotonic(),
            )
            if watched.rootless is None:
                watched.rootless = looked_at
            old = now - listed.at > SWEEP_SECONDS
            if old and looked_at - watched.rootless > ROOTLESS_SECONDS:
                logger.warning("workflow %s was never started, its parts are deleted", workflow)
                self._engine.store.delete_workflow(listed)
            return
        if root.ended_at is not None:
            self._engine.store.close_workflow(workflow, root.at, root.ended_at, root.summary())
            self._watched.pop(workflow, None)
            return
        plan = self._engine.graphs.plan(workflow, root)
        if plan is None:
            return
        self._sign_anew(workflow)
        if root.starting_until is not None:
            if now > root.starting_until and self._take_over(workflow, root):
                logger.warning("workflow %s: its sender died, its tasks are sent now", workflow)
                self._starter.send_first(workflow, plan)
            return
        watched = self._watched.setdefault(workflow, _Watched())
        look = _Look(workflow, root, plan, watched)
        self._read_bits(look)
        seen = sum(row.ended for row in look.rows.values())
        if seen != watched.seen:
            watched.seen = seen
            watched.missing.clear()
            return
        self._decide(look)
        self._compare(look)

    def _sign_anew(self, workflow: str) -> None:
        watched = self._watched.setdefault(workflow, _Watched())
        if watched.signed:
            return
        try:
            watched.signed = self._engine.mailer.sign_anew(workflow)
        except (CodecError, Damaged) as error:
            watched.signed = True  # no key comes while this worker runs
            logger.error("workflow %s is not signed anew: %s", workflow, error)

    def _take_over(self, workflow: str, root: Root) -> bool:
        """Take the lease of a sender that is silent; False if another process was faster."""
        until = self._clock.wall() + LEASE_SECONDS

        def take(now: Root) -> Root:
            return replace(now, starting_until=until) if now == root else now

        edit = RootEdit(workflow, take)
        self._engine.documents.change([edit])
        return edit.root is not None and edit.root.starting_until == until

    # -- bits and decisions ------------------------------------------------------------------

    def _read_bits(self, look: _Look) -> None:
        joins = [node for node in look.plan.nodes if not node.task and node.size]
        places = [(node, row) for node in joins for row in range(node.rows)]
        several = [node for node in joins if node.rows > 1]
        names = [row_name(node.number, row) for node, row in places]
        names += [join_name(node.number) for node in several]
        found = self._engine.documents.read([(look.workflow, name) for name in names])
        for (node, number), data in zip(places, found, strict=False):
            if data is not None:
                row = read_row(data, node.layout.row_size(number))
                look.rows[node.number, number] = row
                if row.decision is not None:
                    look.decisions[node.number] = row.decision
        for node, data in zip(several, found[len(places) :], strict=True):
            join = None if data is None else read_join(data, node.rows)
            if join is not None and join.decision is not None:
                look.decisions[node.number] = join.decision

    def _decide(self, look: _Look) -> None:
        """Act on full rows whose bit above is unset, and on decisions that nothing follows yet."""
        for node in look.plan.nodes:
            if node.task:
                continue
            only = look.rows.get((node.number, 0)) if node.rows == 1 else None
            if only is not None and only.full and (only.decision is None or only.outdated):
                self._engine.joins.decide(look.workflow, node.number)
                look.decisions.pop(node.number, None)
                continue
            if node.number in look.decisions:
                continue
            full = {
                number: row
                for number in range(node.rows)
                if (row := look.rows.get((node.number, number))) is not None and row.full
            }
            if node.rows > 1 and full:
                self._engine.joins.filled(look.workflow, node.number, full)
        for number, decision in look.decisions.items():
            node = look.plan.nodes[number]
            unset = node.slot is None or not look.is_set(node.slot)
            if unset and (not node.next or decision.state is not State.SUCCEEDED):
                self._engine.joins.decided(look.workflow, number, decision)

    # -- tasks -------------------------------------------------------------------------------

    def _compare(self, look: _Look) -> None:
        """Compare unset bits with recorded outcomes, some of them at each look."""
        unset = [slot for slot in look.plan.in_slots if not look.is_set(slot)]
        first = look.watched.next if look.watched.next < len(unset) else 0
        some = unset[first : first + CHECKED]
        look.watched.next = first + len(some)
        before = look.plan.before
        ends: list[TaskEnd] = []
        for slot in some:
            ends += self._slot(look, look.plan.in_slots[slot], before)
        if ends:
            self._engine.joins.ended(ends)

    def _slot(
        self, look: _Look, nodes: tuple[Node, ...], before: dict[int, int]
    ) -> Iterator[TaskEnd]:
        """The end that a slot's bit lacks, if its tasks have ended or one of them is lost."""
        for node in nodes:
            if not self._begun(look, before.get(node.number)):
                return
            if not node.task:
                decision = look.decisions.get(node.number)
                if node.size and (decision is None or decision.state is not State.SUCCEEDED):
                    return
                continue
            record = self._engine.results.get(task_id_of(look.workflow, node.number))
            if record is None or not record.state.final:
                lost = self._lost(look, node, record, before.get(node.number))
                if lost is not None:
                    yield lost
                return
            if record.state is not State.SUCCEEDED or not node.next:
                yield _end_of(look, node, record)
                return

    def _begun(self, look: _Look, before: int | None) -> bool:
        """True if the node behind `before` was sent, or should have been."""
        if before is None:
            return True
        node = look.plan.nodes[before]
        if not node.task:
            decision = look.decisions.get(before)
            return not node.size or (decision is not None and decision.state is State.SUCCEEDED)
        record = self._engine.results.get(task_id_of(look.workflow, before))
        return record is not None and record.state is State.SUCCEEDED

    def _lost(
        self, look: _Look, node: Node, record: RunRecord | None, before: int | None
    ) -> TaskEnd | None:
        """The failure of a task whose message is gone (rule 4); None as long as it may come."""
        due = None if record is None else record.due_again
        if due is not None and due > self._clock.wall():
            look.watched.missing.pop(node.number, None)  # the queue may hide what it holds
            return None
        now, empty = self._clock.monotonic(), self._empty(node.queue)
        since, was_empty = look.watched.missing.get(node.number, (now, empty))
        if empty and not was_empty:
            since = now
        look.watched.missing[node.number] = (since, empty)
        if now - since < (EMPTY_SECONDS if empty else LOST_SECONDS):
            return None
        if record is None and before is not None and node.number not in look.watched.resent:
            task = self._tasks.get(look.plan.nodes[before].task)
            if task is not None and task.delivery == "at-most-once":
                # Its message was removed before it ran: no redelivery sends what follows.
                look.watched.resent.add(node.number)
                look.watched.missing.pop(node.number)
                self._engine.joins.start(look.workflow, [node.number])
                return None
        return self._fail(look, node, record)

    def _fail(self, look: _Look, node: Node, record: RunRecord | None) -> TaskEnd | None:
        """Record the task as failed, so that a late message of it does not run."""
        key, read = RunKey(task_id_of(look.workflow, node.number)), record
        if record is not None:
            moved = record.outcome is not None and isinstance(record.outcome.settlement, Resubmit)
            key = replace(record.key, hop=record.key.hop + moved)
            read = None if moved else record
        if self._runs_without_message(key):
            look.watched.missing.pop(node.number, None)
            return None
        text = f"its message is no longer in queue {node.queue}; was the queue purged?"
        dead = DeadLetter(MEMBER_LOST, text)
        outcome = Outcome(State.FAILED, dead, None, MEMBER_LOST, text, at=self._clock.wall())
        run = RunRecord(key, node.task, node.queue, State.FAILED, outcome=outcome)
        if not self._engine.results.bury([run], [read])[0]:
            return None  # it has ended, or it has started by now
        logger.warning("task %s %s is lost, it fails: %s", node.task, key.task_id, text)
        return _end_of(look, node, run)

    def _runs_without_message(self, key: RunKey) -> bool:
        """Whether a worker noted that it removed the message before it runs the task."""
        notes = once_runs_of(self._engine.results)
        return notes is not None and any(run.key == key for run in notes.all())

    def _empty(self, queue: str) -> bool:
        """True if the queue certainly holds no message, delayed ones included."""
        try:
            stats = self._broker.stats(queue)
        except AztaskError as error:
            logger.info("queue %s: its messages cannot be counted: %s", queue, error)
            return False
        counts = (stats.active, stats.leased, stats.scheduled, stats.deferred, stats.total)
        known = [count for count in counts if count is not None]
        return bool(known) and not any(known)


def _end_of(look: _Look, node: Node, record: RunRecord) -> TaskEnd:
    outcome = record.outcome
    state = State.FAILED if record.state is State.UNREADABLE else record.state
    return TaskEnd(
        look.workflow,
        NodePlace.of(look.plan, node),
        record.key.generation,
        state,
        outcome.value if outcome is not None else None,
        outcome.error_type if outcome is not None else record.state.value,
        outcome.error if outcome is not None else record.damage,
        repeated=True,
    )
