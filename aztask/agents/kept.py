"""Answers about what is kept: workflows, schedules, limits, dead letters, the audit; search."""

from __future__ import annotations

from aztask.agents.answers import (
    MOST,
    Answer,
    Question,
    data,
    fields,
    listed,
    name,
    short,
    value,
    when,
)
from aztask.agents.present import how_far
from aztask.errors import ConfigurationError
from aztask.operate.action import audit as audit_page
from aztask.operate.controls import controls
from aztask.operate.controls import limits as used_limits
from aztask.operate.deadletters import Selection
from aztask.operate.deadletters.actions import groups, page
from aztask.operate.deadletters.mutes import mutes
from aztask.operate.jobs import jobs as job_list
from aztask.operate.queues import arguments_of
from aztask.operate.schedules import schedules as shown_schedules
from aztask.operate.search import search as find_all
from aztask.operate.workflows import STATES as WORKFLOW_STATES
from aztask.operate.workflows import workflow as shown_workflow
from aztask.operate.workflows import workflows as shown_workflows

# -- workflows, schedules, limits ----------------------------------------------------------------


def workflows_answer(asked: Question) -> Answer:
    """Workflows of one state or of all, open ones first."""
    state = asked.text("state")
    if state and state not in WORKFLOW_STATES:
        raise ConfigurationError(f"state is one of {', '.join(WORKFLOW_STATES)}")
    found = shown_workflows(asked.app, asked.limit, state or None)
    return listed(
        [
            fields(
                id=name(each.id),
                state=each.state,
                tasks=None if each.root is None else each.root.tasks,
                owner=name(each.owner),
                damage=data(each.damage),
            )
            for each in found
        ]
    )


def workflow_answer(asked: Question) -> Answer:
    """One workflow: what failed and what is open first."""
    view = shown_workflow(asked.app, asked.needed("id"))
    nodes = [each for each in view.all_nodes() if each.task]
    # First what failed, then what is open: a model reads the beginning.
    nodes.sort(key=lambda each: (each.failure is None, each.ended_at is not None))
    items = [
        fields(
            id=name(each.task_id),
            task=name(each.task),
            queue=name(each.queue),
            state=None if each.state is None else each.state.value,
            waits=data(each.waits),
            started=when(each.started_at),
            ended=when(each.ended_at),
            error=None if each.failure is None else data(each.failure),
            lost=each.lost or None,
        )
        for each in nodes[: asked.limit]
    ]
    return listed(items, id=name(view.workflow), state=view.root.state.value, count=len(nodes))


def schedules_answer(asked: Question) -> Answer:
    """Schedules with their next times."""
    found, aside = shown_schedules(asked.app)
    items = [
        fields(
            schedule=name(each.name),
            state=each.state,
            owner=name(each.owner),
            when=each.when,
            task=name(each.task),
            next=each.next[0].utc if each.next else None,
            put_aside=data(aside[each.name].reason) if each.name in aside else None,
            damage=data(each.damage),
        )
        for each in found[: asked.limit]
    ]
    return listed(items, count=len(found))


def limits_answer(asked: Question) -> Answer:
    """Limits, pauses, breakers and scales."""
    held = controls(asked.app)
    try:
        used = used_limits(asked.app)
    except ConfigurationError:
        used = []
    return {
        "limits": [
            fields(
                limit=name(each.limit.name),
                changed=None if each.change is None else data(each.change.numbers),
                wait_seconds=None if each.usage is None else short(each.usage.wait_seconds),
                held=None
                if each.usage is None or each.usage.held is None
                else sum(each.usage.held.values()),
            )
            for each in used[:MOST]
        ],
        "paused": [
            fields(
                what=each.scope.value, name=name(each.name), since=when(each.at), by=data(each.by)
            )
            for each in held.pauses[:MOST]
        ],
        "open_breakers": [
            fields(task=name(each.task), app=name(app), since=when(each.at), why=data(each.why))
            for app, each in held.breakers[:MOST]
        ],
        "scales": [data(str(each)) for each in held.scales[:MOST]],
    }


# -- dead letters, audit, search -----------------------------------------------------------------


def groups_answer(asked: Question) -> Answer:
    """Dead letters by task, reason and error."""
    queue = asked.text("queue")
    found = groups(asked.app, [queue] if queue else [])
    muted = mutes(asked.app)
    rows = sorted(found.groups, key=lambda each: -each[1].count)
    items = [
        fields(
            queue=name(where),
            task=name(each.task),
            reason=name(each.reason),
            error=data(each.signature),
            count=each.count,
            first=when(each.first_at),
            last=when(each.last_at),
            muted=True if muted.of(where, each) else None,
        )
        for where, each in rows[: asked.limit]
    ]
    return listed(items, groups=len(rows), total=sum(each.count for _, each in rows))


def letters_answer(asked: Question) -> Answer:
    """The dead letters of a queue or a group."""
    task, reason, error = (asked.text(each) for each in ("task", "reason", "error"))
    chosen = Selection(
        task=task or None,
        reason=reason or None,
        signature=error or None,
        everything=not (task or reason or error),
    )
    queue = asked.needed("queue")
    found = page(asked.app, queue, chosen, limit=asked.limit, after=asked.text("after"))
    items = []
    for each in found.letters:
        shown = None
        if asked.sees:
            shown = arguments_of(asked.app, each.message, each.problem)
        items.append(
            fields(
                id=name(each.id),
                task=name(each.task),
                reason=name(each.reason),
                description=data(each.description),
                at=when(each.at),
                deliveries=each.delivery_count,
                problem=data(each.problem),
                arguments=None
                if shown is None or shown.args is None
                else value([list(shown.args), shown.kwargs]),
            )
        )
    return listed(items, found.next)


def audit_answer(asked: Question) -> Answer:
    """Who did what, the newest first."""
    chosen = {each: asked.text(each) for each in ("by", "action", "text")}
    found = audit_page(asked.app, **chosen, limit=asked.limit, after=asked.text("after"))
    items = [
        fields(
            at=when(each.at),
            by=data(each.by),
            via=each.via,
            action=each.action,
            text=data(each.text),
            selected=each.selected,
            done=each.done,
            error=data(each.error),
            subject=name(each.subject),
        )
        for each in found.entries
    ]
    return listed(items, found.next)


def jobs_answer(asked: Question) -> Answer:
    """Actions over many items, and how far they are."""
    found = job_list(asked.app, limit=asked.limit, after=asked.text("after"))
    items = [
        fields(
            id=each.key,
            action=each.kind,
            state=each.shown(found.at),
            done=each.done,
            of=each.count,
            text=data(each.text),
            by=data(each.by),
            via=data(each.via),
            created=when(each.created),
            error=data(each.error),
        )
        for each in found.jobs
    ]
    return listed(items, found.next, damaged=found.damaged or None)


def search_answer(asked: Question) -> Answer:
    """Anything with this id, name or error."""
    hits = find_all(asked.app, asked.needed("text"), limit=asked.limit)
    items = [
        fields(kind=each.kind, name=name(each.name), text=data(each.text)) for each in hits.found
    ]
    return listed(items, note=None if hits.runs is None else how_far(hits.runs))
