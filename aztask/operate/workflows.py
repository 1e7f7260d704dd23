"""Workflows: list and show them; cancel them, and resume them after their tasks failed."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar, Final

from aztask.app import App
from aztask.errors import AztaskError, ForeignId, NotFound, ResultDamaged
from aztask.operate.action import Action, Progress, Subject, results_of
from aztask.operate.deadletters.actions import ReplayLetters, replay_by_id
from aztask.stores.records.base import State
from aztask.stores.records.damage import Damaged
from aztask.support.display import visible
from aztask.workflows.graph import Root
from aztask.workflows.views import NodeView, WorkflowView, summaries, view

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
