"""The queries as tools: each asks `aztask.operate`, and says what came back in a few words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from aztask.agents.answers import FEW, MOST, Answer, Question
from aztask.agents.kept import (
    audit_answer,
    groups_answer,
    jobs_answer,
    letters_answer,
    limits_answer,
    schedules_answer,
    search_answer,
    workflow_answer,
    workflows_answer,
)
from aztask.agents.present import (
    history_answer,
    messages_answer,
    overview_answer,
    queues_answer,
    running_answer,
    runs_answer,
    task_answer,
    workers_answer,
)
from aztask.app import App
from aztask.errors import ConfigurationError, did_you_mean
from aztask.operate.history import BY, WINDOWS
from aztask.operate.tasks import STATES
from aztask.operate.workflows import STATES as WORKFLOW_STATES
from aztask.support.display import printable


@dataclass(frozen=True, slots=True)
class Query:
    """A query as a tool.

    * `about`: what it answers, for the model. `fields`: its values, and what each one is.
    """

    name: str
    about: str
    ask: Callable[[Question], Answer]
    fields: Mapping[str, str] = field(default_factory=dict)
    needed: tuple[str, ...] = ()


_LIMIT: Final = {"limit": f"how many items, 1 to {MOST}; {FEW} if it is not given"}
_AFTER: Final = {"after": "the value of next from the page before"}


def ask(app: App, query: str, values: Mapping[str, str], *, sees: bool = False) -> Answer:
    """The answer of a query. Raises ConfigurationError, and what the query raises."""
    kind = QUERIES[query]
    for each in values:
        if each not in kind.fields:
            hint = did_you_mean(each, list(kind.fields))
            raise ConfigurationError(f"{query} takes no {printable(each, 40)}.{hint}")
    for each in kind.needed:
        if not values.get(each):
            raise ConfigurationError(f"{query} needs {each}: {kind.fields[each]}")
    return kind.ask(Question(app, values, sees))


QUERIES: Final[Mapping[str, Query]] = {
    each.name: each
    for each in (
        Query(
            "overview",
            "Backlog, workers, dead letters, run times, and what needs attention "
            "first. Begin here.",
            overview_answer,
        ),
        Query(
            "history",
            "What workers did in a window: runs, failures, retries, waits, by queue, task or "
            "worker, and what happened beside: deploys, pauses, outages.",
            history_answer,
            {
                "window": f"how far back: {', '.join(WINDOWS)}; hour if it is not given",
                "by": f"what the items are: {', '.join(BY)}; task if it is not given",
                "queue": "only of this queue",
                "task": "only of this task",
                "worker": "only of this worker",
                **_LIMIT,
            },
        ),
        Query(
            "queues",
            "All queues with their counts and the age of the oldest waiting message.",
            queues_answer,
        ),
        Query(
            "messages",
            "The first messages that wait in one queue.",
            messages_answer,
            {"queue": "the queue", **_LIMIT},
            ("queue",),
        ),
        Query(
            "runs",
            "Runs of tasks, the newest first.",
            runs_answer,
            {
                "state": f"only in this state: {', '.join(STATES)}",
                "task": "only of this task",
                "queue": "only of this queue",
                "worker": "only on this worker",
                "text": "a part of the id or of the error",
                **_LIMIT,
                **_AFTER,
            },
        ),
        Query(
            "task",
            "What happened to one task, in order, its error and how it ended.",
            task_answer,
            {"id": "the task's id"},
            ("id",),
        ),
        Query(
            "running",
            "The tasks that run now, the longest-running first.",
            running_answer,
            {"queue": "only of this queue", "task": "only of this task", **_LIMIT},
        ),
        Query(
            "workers",
            "The workers of the last day: running, silent and stopped ones.",
            workers_answer,
            _LIMIT,
        ),
        Query(
            "workflows",
            "Workflows: open ones first.",
            workflows_answer,
            {"state": f"only in this state: {', '.join(WORKFLOW_STATES)}", **_LIMIT},
        ),
        Query(
            "workflow",
            "One workflow with its tasks: what failed and what is open first.",
            workflow_answer,
            {"id": "the workflow's id", **_LIMIT},
            ("id",),
        ),
        Query(
            "schedules", "Schedules: their state, and when each is next.", schedules_answer, _LIMIT
        ),
        Query(
            "limits",
            "Limits and how far each is used; what is paused; open circuit breakers.",
            limits_answer,
        ),
        Query(
            "dead_letter_groups",
            "Dead letters by task, reason and error, the largest first.",
            groups_answer,
            {"queue": "only of this queue", **_LIMIT},
        ),
        Query(
            "dead_letters",
            "The dead letters of one queue, or of one of its groups.",
            letters_answer,
            {
                "queue": "the queue",
                "task": "only of this task",
                "reason": "only with this reason",
                "error": "only with this error, as dead_letter_groups shows it",
                **_LIMIT,
                **_AFTER,
            },
            ("queue",),
        ),
        Query(
            "jobs",
            "Actions over many items, the newest first: how far each is, and how it ended.",
            jobs_answer,
            {**_LIMIT, **_AFTER},
        ),
        Query(
            "audit",
            "Who did what, the newest first: replays, pauses, cancellations and others.",
            audit_answer,
            {
                "by": "only by this person or program",
                "action": "only this action",
                "text": "a part of the text",
                **_LIMIT,
                **_AFTER,
            },
        ),
        Query(
            "search",
            "Anything with this id, name, or text of an error.",
            search_answer,
            {"text": "the id, name or text", **_LIMIT},
            ("text",),
        ),
    )
}
