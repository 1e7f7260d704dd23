"""Starting graphs: checks a graph against the app, compiles it, and starts the workflow."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol, cast

from aztask.app.sending import DeclaredQueues
from aztask.context import current_context
from aztask.errors import ConfigurationError
from aztask.hooks import Hooks, Sending
from aztask.leaseadvice.advisor import LeaseAdvisor
from aztask.message.codec import Codec
from aztask.queues.base import EnvelopeSender
from aztask.result import TypedTask
from aztask.sending.send import Sender
from aztask.sending.sessionrules import check_session
from aztask.stores.connections import Connections
from aztask.support import clock
from aztask.support.chance import new_id
from aztask.task import SendOptions, Task
from aztask.workflows.compiler import compile_graph
from aztask.workflows.engine import WorkflowEngine, engine_for
from aztask.workflows.graphs import Graph, Signature
from aztask.workflows.mailing import Posted
from aztask.workflows.plan import task_id_of
from aztask.workflows.result import WorkflowResult
from aztask.workflows.starting import WorkflowLauncher

NO_RESULTS: Final = (
    "a workflow needs a result store, which keeps the graph and counts its members: give the App "
    'results="local://" or another'
)
ID_CHARACTERS: Final = 900
"""A node's task id is the workflow's id with a number, and a task id has at most 1,024."""


class GraphWatcher(Protocol):
    """Learns of the workflows of one process; see `WorkflowStarter.watch`."""

    def posted(self, posted: Sequence[Posted]) -> None:
        """Messages were sent, perhaps in a transaction that is still open."""
        ...

    def started(self) -> None:
        """A workflow was started; no transaction is open."""
        ...


class WorkflowStarter:
    """The part of an app that starts workflows. Any thread may call; a forked child reconnects."""

    def __init__(
        self,
        connections: Connections,
        codec: Codec,
        leases: LeaseAdvisor,
        hooks: Hooks,
        queues: DeclaredQueues,
        sender: Sender,
        tasks: Mapping[str, TypedTask],
    ) -> None:
        """tasks: those of the app, by their names; they say what their values become."""
        self._tasks = tasks
        self._watcher: GraphWatcher | None = None
        self._connections = connections
        self._codec = codec
        self.leases = leases
        self._hooks = hooks
        self._queues = queues
        self._sender = sender
        self._engine: WorkflowEngine | None = None

    @property
    def engine(self) -> WorkflowEngine:
        """The engine on this process's connections.

        Raises ConfigurationError without a result store that keeps workflows.
        """
        results = self._connections.results()
        if self._engine is None or self._engine.results is not results:
            self._engine = engine_for(results, self, self._codec, clock.current())
        if self._engine is None:
            raise ConfigurationError(NO_RESULTS)
        return self._engine

    def watch(self, watcher: GraphWatcher | None) -> None:
        """Report sends and starts of workflows in this process to `watcher`; None ends that."""
        self._watcher = watcher

    def sender(self) -> EnvelopeSender:
        """The broker of this process."""
        return self._connections.broker()

    def posted(self, posted: Sequence[Posted]) -> None:
        """Report messages that a workflow of this process has sent. Any thread may call."""
        self._sender.enqueued([message for message, _ in posted])
        if self._watcher is not None:
            self._watcher.posted(posted)

    def result(self, workflow_id: str) -> WorkflowResult:
        """The `WorkflowResult` of a workflow's id. Asks no server."""
        return WorkflowResult(
            workflow_id, lambda: self.engine, self._codec.decode_value, self._tasks
        )

    def check(self, graph: Graph) -> None:
        """Raise TypeError for arguments that do not match, ConfigurationError for its size."""
        compile_graph(graph, lambda signature: "")

    def start_occurrence(self, graph: Graph, workflow: str, headers: Mapping[str, Any]) -> None:
        """Start the workflow of a schedule's occurrence, with these headers on its messages."""
        self.start(graph, workflow, headers)

    def start(
        self,
        graph: Graph,
        workflow_id: str | None = None,
        headers: Mapping[str, Any] = MappingProxyType({}),
    ) -> WorkflowResult:
        """Start a workflow; one whose id is known is not started again.

        * `headers`: of all its messages, beside those that hooks set.

        Raises TypeError for wrong arguments, EncodeError, MessageTooLarge, ConfigurationError, and
        BrokerUnavailable: then start it again under the same id.
        """
        engine = self.engine
        parent = current_context()
        step = parent.steps.current if parent is not None and workflow_id is None else None
        if step is not None:  # if the step runs again, it starts nothing twice
            workflow_id = step.next_id()
        workflow = new_id() if workflow_id is None else _checked_id(workflow_id)
        compiled = compile_graph(graph, self._queue_of, blocked=not engine.results.remote)
        ids = [task_id_of(workflow, node) for node in compiled.signatures]
        first = next((node for node in compiled.plan.nodes if node.task), None)
        task, queue = (first.task, first.queue) if first else ("", "")
        sent = Sending(task, queue, ids, workflow=workflow)
        with self._hooks.send.around(sent) if self._hooks.send else nullcontext():
            origin = _Origin(
                self,
                f"{os.getpid()}@{socket.gethostname()}",
                (parent.message.root_id or parent.task_id) if parent else None,
                parent.task_id if parent else None,
                sent.headers,
                {} if sent.each is None else dict(zip(compiled.signatures, sent.each, strict=True)),
                headers,
            )
            starter = WorkflowLauncher(
                engine, self._connections.broker(), self._codec, clock.current()
            )
            starter.start(workflow, compiled, origin)
        if self._watcher is not None:
            self._watcher.started()
        return self.result(workflow)

    def _queue_of(self, signature: Signature) -> str:
        return self._queues.route(cast("Task[..., Any]", signature.task), signature.options)

    def session_of(self, signature: Signature, queue: str) -> tuple[str | None, bool]:
        """The session of a signature that is sent to `queue`, and whether its order is kept."""
        return check_session(
            signature.task.name,
            cast("Task[..., Any]", signature.task),
            queue,
            cast("SendOptions", signature.options),
            sessions=self._queues.has_sessions(queue),
            can=self._connections.broker().capabilities,
        )


@dataclass(frozen=True, slots=True)
class _Origin:
    """What the messages of one start have in common.

    * `headers`, `each`: what hooks have set for all messages, and for those of single nodes.
    * `given`: headers that come with the start itself.
    """

    starter: WorkflowStarter
    name: str
    root_id: str | None
    parent_id: str | None
    headers: Mapping[str, Any]
    each: Mapping[int, Mapping[str, Any]]
    given: Mapping[str, Any]

    def headers_of(self, node: int) -> dict[str, Any]:
        """The headers of a node's message."""
        return {**self.headers, **self.each.get(node, {}), **self.given}

    def session_of(self, signature: Signature, queue: str) -> tuple[str | None, bool]:
        """As the app decides it."""
        return self.starter.session_of(signature, queue)

    def lease_of(self, queue: str) -> float | None:
        """As the app advises it."""
        return self.starter.leases.lease_seconds(queue)


def _checked_id(workflow_id: object) -> str:
    if (
        not isinstance(workflow_id, str)
        or not 0 < len(workflow_id) <= ID_CHARACTERS
        or not workflow_id.isprintable()
    ):
        raise ConfigurationError(
            f"workflow_id takes a text of 1 to {ID_CHARACTERS} printable characters, not "
            f"{workflow_id!r:.80}"
        )
    return workflow_id
