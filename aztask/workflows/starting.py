"""Starts a workflow: stores its plan and messages, commits it with the root, sends the first nodes.

Rules
1. The parts are written first, the root last. A sender that dies before the root has started
   nothing; housekeeping deletes the parts later.
2. A sender that dies after the root has started the workflow: the root's lease lapses, and any
   worker sends the first nodes. A slow sender renews that lease after each batch.
3. A known workflow id is started once: starting it again changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from aztask.message.codec import Codec
from aztask.message.envelope import Envelope
from aztask.message.message import MESSAGE_DEFAULTS, TaskMessage, build
from aztask.queues.base import Broker, shared_transaction
from aztask.stores.records.workflows import ROOT, DocumentChange
from aztask.support import chance
from aztask.support.clock import Clock
from aztask.support.failpoint import hit
from aztask.workflows.compiler import Compiled
from aztask.workflows.edits import RootEdit, row_name
from aztask.workflows.engine import WorkflowEngine
from aztask.workflows.graph import DELAY, EXPIRES, Root, part_documents, started
from aztask.workflows.graphs import Signature
from aztask.workflows.mailing import Posted, place_of
from aztask.workflows.place import NodePlace
from aztask.workflows.plan import RUN, GraphPlan, Node, task_id_of
from aztask.workflows.rows import empty_row

LEASE_SECONDS: Final = 30.0
"""How long a sender may be silent before a worker sends the first nodes in its place."""


class Origin(Protocol):
    """What a workflow's messages have in common, beside their places."""

    @property
    def name(self) -> str:
        """Which process starts it, as ``PID@HOST``."""
        ...

    @property
    def root_id(self) -> str | None:
        """The root of the task that starts the workflow."""
        ...

    @property
    def parent_id(self) -> str | None:
        """The task that starts the workflow."""
        ...

    def headers_of(self, node: int, /) -> dict[str, Any]:
        """The headers that hooks of the app have set for a node's message."""
        ...

    def session_of(self, signature: Signature, queue: str, /) -> tuple[str | None, bool]:
        """The session of a signature, and whether its order is kept."""
        ...

    def lease_of(self, queue: str, /) -> float | None:
        """The lease advice of a queue, in seconds."""
        ...


class WorkflowLauncher:
    """Starts workflows through one engine."""

    def __init__(self, engine: WorkflowEngine, broker: Broker, codec: Codec, clock: Clock) -> None:
        self._engine = engine
        self._broker = broker
        self._codec = codec
        self._clock = clock

    def start(self, workflow: str, compiled: Compiled, origin: Origin) -> bool:
        """Start the workflow; False if it exists already.

        Raises ForeignId if it exists for another owner; EncodeError and MessageTooLarge before
        anything is stored; and BrokerUnavailable: if the root was stored before that, workers go on
        with the start.
        """
        plan, store = compiled.plan, self._engine.store
        token = chance.token()
        made = {
            node: (message, sent) for node, message, sent in self._made(workflow, compiled, origin)
        }
        envelopes = ((node, message.queue, sent) for node, (message, sent) in made.items())
        documents, parts = part_documents(workflow, token, plan, envelopes)
        if self._engine.graphs.root(workflow) is not None:
            return False
        with self._begun(workflow):
            now = self._clock.wall()
            store.announce(workflow, now, Root(now, token, plan.tasks).summary())
            store.write([*documents, *self._rows(workflow, plan)])
            hit("graph-parts")
            root = Root(now, token, plan.tasks, parts, now + LEASE_SECONDS)
            if store.write([DocumentChange(workflow, ROOT, root.pack())]) == [None]:
                self._engine.graphs.root(workflow)  # raises if another owner was faster
                return False
            hit("graph-root")
            self._engine.graphs.note(workflow, root, plan)
            self.send_first(workflow, plan, made)
        return True

    def _rows(self, workflow: str, plan: GraphPlan) -> list[DocumentChange]:
        """Empty rows of large joins in a remote store, so that their members never race for that.

        A member's process would have to look for the root before it makes a row, because a
        workflow that was deleted has none.
        """
        if not self._engine.results.remote:
            return []
        return [
            DocumentChange(
                workflow, row_name(node.number, row), empty_row(node.layout.row_size(row)).pack()
            )
            for node in plan.nodes
            if node.size >= RUN
            for row in range(node.rows)
        ]

    def send_first(
        self, workflow: str, plan: GraphPlan, made: Mapping[int, Posted] | None = None
    ) -> None:
        """Send the nodes that start at once, and note that in the root. Idempotent.

        * `made`: messages that this process has just made and stored.
        """
        renewal = _Renewal(self._engine, workflow, self._clock)
        self._engine.joins.start(workflow, plan.entries, renewal, made)
        hit("graph-sent")
        self._engine.documents.change([RootEdit(workflow, started)])

    @contextmanager
    def _begun(self, workflow: str) -> Iterator[None]:
        """One transaction if broker and store share a file; after a rollback nothing is known."""
        results, broker = self._engine.results, self._broker
        joint = shared_transaction(broker, results)
        try:
            with joint.transaction() if joint is not None else nullcontext():
                yield
        except BaseException:
            self._engine.graphs.forget(workflow)
            raise

    # -- messages ----------------------------------------------------------------------------

    def _made(
        self, workflow: str, compiled: Compiled, origin: Origin
    ) -> Iterator[tuple[int, TaskMessage, Envelope]]:
        """(node, message, signed envelope) of each task, checked by the broker."""
        parents = _parents(workflow, compiled.plan)
        alike: dict[tuple[str, str], dict[str, Any]] = {}
        for number, signature in sorted(compiled.signatures.items()):
            node = compiled.plan.nodes[number]
            common = None if signature.options else alike.get((node.task, node.queue))
            if common is None:
                common = self._common(workflow, node, signature, origin)
                if not signature.options:
                    alike[node.task, node.queue] = common
            parent = parents.get(number, origin.parent_id)
            message = self._message(common, workflow, compiled.plan, node, signature, parent)
            if headers := origin.headers_of(number):
                message = _with_headers(message, headers)
            envelope = self._codec.to_envelope(message, stored=place_of(workflow, number))
            self._broker.check(envelope)
            yield number, message, envelope

    def _common(
        self, workflow: str, node: Node, signature: Signature, origin: Origin
    ) -> dict[str, Any]:
        """The fields that the messages of all calls of a task without options have in common."""
        session, ordered = origin.session_of(signature, node.queue)
        options = signature.options
        counted = {DELAY: options.get("delay"), EXPIRES: options.get("expires")}
        return {
            **MESSAGE_DEFAULTS,
            "task": node.task,
            "queue": node.queue,
            "root_id": origin.root_id or workflow,
            "origin": origin.name,
            "session": session,
            "ordered": ordered,
            "lease_seconds": origin.lease_of(node.queue),
            "workflow": workflow,
            "extra": {name: float(value) for name, value in counted.items() if value is not None},
        }

    def _message(
        self,
        common: dict[str, Any],
        workflow: str,
        plan: GraphPlan,
        node: Node,
        signature: Signature,
        parent: str | None,
    ) -> TaskMessage:
        parts = signature.plain_arguments(int(node.takes is not None))
        body, content_type, encoding = self._codec.encode_arguments(*parts)
        fields = common.copy()
        fields["id"] = task_id_of(workflow, node.number)
        fields["body"] = body
        fields["content_type"] = content_type
        fields["content_encoding"] = encoding
        fields["parent_id"] = parent
        fields["group"] = None if node.slot is None else task_id_of(workflow, node.slot.join)
        fields["node"] = str(NodePlace.of(plan, node))
        return build(TaskMessage, fields)


def _with_headers(message: TaskMessage, headers: Mapping[str, Any]) -> TaskMessage:
    """The message with the headers that hooks have set for it."""
    extra = {name: value for name, value in headers.items() if name != "traceparent"}
    traceparent = headers.get("traceparent")
    return replace(message, extra={**extra, **message.extra}, traceparent=traceparent)


@dataclass(slots=True)
class _Renewal:
    """Renews the root's lease while its sender is slow; learns of each batch."""

    engine: WorkflowEngine
    workflow: str
    clock: Clock
    due: float = 0.0

    def sent(self) -> None:
        now = self.clock.wall()
        if not self.due:
            self.due = now + LEASE_SECONDS / 3
        elif now >= self.due:
            self.due = now + LEASE_SECONDS / 3
            self.engine.documents.change([RootEdit(self.workflow, self._renewed)])

    def _renewed(self, root: Root) -> Root:
        if root.starting_until is None:
            return root
        return replace(root, starting_until=self.clock.wall() + LEASE_SECONDS)


def _parents(workflow: str, plan: GraphPlan) -> dict[int, str]:
    """The task or group before each node that has one."""
    found = {
        number: task_id_of(workflow, node.number) for node in plan.nodes for number in node.next
    }
    handlers = [node for node in plan.nodes if node.on_error is not None]
    found.update({each.on_error or 0: task_id_of(workflow, each.number) for each in handlers})
    return found
