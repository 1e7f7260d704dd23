"""Answers about the present: queues, messages, runs, one task, and workers."""

from __future__ import annotations

from dataclasses import asdict

from aztask.agents.answers import (
    FEW,
    MOST,
    MOST_OLDEST,
    Answer,
    Question,
    data,
    fields,
    listed,
    name,
    short,
    trace,
    value,
    when,
)
from aztask.app import App
from aztask.errors import AztaskError, ConfigurationError, NotFound
from aztask.operate.attention import attention, backlog
from aztask.operate.explain import explain
from aztask.operate.history import CONDITIONS, Figure, history, marks
from aztask.operate.overview import Figures, Reader
from aztask.operate.queues import arguments_of, oldest_waiting, peek
from aztask.operate.queues import queues as counted_queues
from aztask.operate.search import RunFilter, RunsPage, ended_at, find_runs, newest_figures
from aztask.operate.tasks import STATES, result, settlement_of
from aztask.operate.workers import running as running_tasks
from aztask.operate.workers import workers as shown_workers
from aztask.stores.records.base import RunRecord
from aztask.version import shown_release

# -- what is going on --------------------------------------------------------------------------


def overview_answer(asked: Question) -> Answer:
    """Backlog, workers, dead letters, run times, and notices."""
    app = asked.app
    figures = Reader(app, lambda: app.broker.listing().queues).read()
    states = [each.state for each in figures.workers]
    notices = attention(app, figures)
    return {
        "backlog": backlog(figures.queues),
        "dead_letters": sum(each.dead or 0 for each in figures.queues),
        "workers": {state: states.count(state) for state in sorted(set(states))},
        "running": len(figures.running),
        **_tasks_of(app, figures),
        "needs_attention": [
            fields(
                level=each.level.value, about=each.about, name=name(each.name), text=data(each.text)
            )
            for each in notices[:FEW]
        ],
        **fields(more_notices=max(0, len(notices) - FEW) or None),
    }


def _tasks_of(app: App, figures: Figures) -> Answer:
    if app.results is None:
        return {}
    newest = newest_figures(app)
    tasks = [
        fields(
            task=name(each.task),
            runs=each.runs,
            failed=each.failed,
            retried=each.retried,
            median_seconds=short(each.median),
            p95_seconds=short(each.p95),
        )
        for each in newest.tasks[:FEW]
    ]
    return {"newest_runs": newest.runs, "tasks": tasks}


def history_answer(asked: Question) -> Answer:
    """What workers did in a window, the busiest first, and the marks beside it."""
    conditions = {each: asked.text(each) for each in CONDITIONS}
    by = asked.text("by") or "task"
    view = history(asked.app, asked.text("window") or "hour", by, conditions)
    items = [{by: name(each), **_figure(figure)} for each, figure in view.figures()]
    beside = [
        fields(at=when(each.at), kind=each.kind, text=data(each.text))
        for each in marks(asked.app, view)[-FEW:]
    ]
    waited = view.waited
    waiting = waited and fields(
        most=waited.most, most_at=when(waited.most_at), last=waited.last, at=when(waited.last_at)
    )
    return listed(
        items[: asked.limit],
        count=len(items),
        total=_figure(view.figure),
        waiting=waiting,
        marks=beside or None,
    )


def _figure(figure: Figure) -> Answer:
    return {
        each: short(value) if isinstance(value, float) else value
        for each, value in asdict(figure).items()
    }


def queues_answer(asked: Question) -> Answer:
    """The counts of all queues, and their oldest messages."""
    counts = counted_queues(asked.app)
    items: list[Answer] = []
    for each in counts.queues[:MOST]:
        oldest = None
        if len(items) < MOST_OLDEST:
            try:
                oldest = short(oldest_waiting(asked.app, each.queue).seconds)
            except AztaskError:
                oldest = None
        items.append(
            fields(
                queue=name(each.queue),
                waiting=each.active,
                leased=each.leased,
                scheduled=each.scheduled,
                deferred=each.deferred,
                dead=each.dead,
                total=each.total,
                oldest_seconds=oldest,
            )
        )
    refused = {queue: data(why) for queue, why in counts.left_out.refused.items()}
    return listed(items, count=len(counts.queues), refused=refused or None)


def messages_answer(asked: Question) -> Answer:
    """The first messages of one queue."""
    found = peek(asked.app, asked.needed("queue"), asked.limit)
    items = []
    for each in found.found:
        shown = None
        if asked.sees:
            shown = arguments_of(asked.app, each.message, each.problem)
        items.append(
            fields(
                id=name(each.id),
                task=name(each.message.task if each.message else None),
                due=when(each.due),
                problem=data(each.problem),
                arguments=None
                if shown is None or shown.args is None
                else value([list(shown.args), shown.kwargs]),
            )
        )
    return listed(items, held=found.held, hidden=found.hidden)


# -- runs ----------------------------------------------------------------------------------------


def _run(run: RunRecord) -> Answer:
    outcome = run.outcome
    return fields(
        id=name(run.key.task_id),
        task=name(run.task),
        queue=name(run.queue),
        state=run.shown_state,
        worker=name(run.worker),
        at=when(ended_at(run)),
        seconds=None if outcome is None else short(outcome.duration),
        error=None
        if outcome is None or not outcome.error_type
        else data(f"{outcome.error_type}: {outcome.error}"),
        then=settlement_of(run),
        generation=run.key.generation or None,
        hop=run.key.hop or None,
        damage=data(run.damage),
    )


def runs_answer(asked: Question) -> Answer:
    """Runs with conditions, the newest first."""
    chosen = RunFilter(
        **{each: asked.text(each) for each in ("state", "task", "queue", "worker", "text")}
    )
    if chosen.state and chosen.state not in STATES:
        raise ConfigurationError(f"state is one of {', '.join(STATES)}")
    found = find_runs(asked.app, chosen, limit=asked.limit, after=asked.text("after"))
    return listed([_run(each) for each in found.runs], found.next, note=how_far(found))


def how_far(found: RunsPage) -> str | None:
    """How far back a search looked that came to a bound; None for one that did not."""
    if not found.stopped:
        return None
    back = "" if found.back is None else f", back to {when(found.back)}"
    return f"{found.searched} runs were looked at{back}; tool runs goes on with after={found.next}"


def task_answer(asked: Question) -> Answer:
    """What happened to one task, and how it ended."""
    task_id = asked.needed("id")
    history = explain(asked.app, task_id)
    try:
        ended = result(asked.app, task_id) if asked.app.results is not None else None
    except NotFound:
        ended = None
    outcome = None if ended is None else ended.latest.outcome
    entries = history.entries[-FEW:]
    return fields(
        id=name(task_id),
        task=name(history.task),
        queue=name(history.queue),
        state=history.shown or "unknown",
        workflow=name(history.workflow),
        sent_by=name(history.parent),
        error=None
        if outcome is None or not outcome.error_type
        else data(f"{outcome.error_type}: {outcome.error}"),
        traceback=None if outcome is None else trace(outcome.traceback),
        result=value(ended.value)
        if asked.sees and ended and outcome and outcome.value is not None
        else None,
        progress=value(ended.progress)
        if asked.sees and ended and ended.progress is not None
        else None,
        earlier_entries=max(0, len(history.entries) - FEW) or None,
        items=[
            fields(at=when(each.at), what=each.kind, text=data(each.text), worker=name(each.worker))
            for each in entries
        ],
    )


def running_answer(asked: Question) -> Answer:
    """What workers run now, the longest first."""
    queue, task = asked.text("queue"), asked.text("task")
    found = running_tasks(asked.app, queues=[queue] if queue else (), task=task or None)
    items = [
        fields(
            id=name(each.task.task_id),
            task=name(each.task.task),
            queue=name(each.task.queue),
            worker=name(each.worker.name),
            worker_state=each.state,
            seconds=short(each.seconds),
            progress=value(each.progress) if asked.sees and each.progress is not None else None,
        )
        for each in found.rows[: asked.limit]
    ]
    return listed(items, count=len(found.rows))


def workers_answer(asked: Question) -> Answer:
    """The workers of the last day."""
    found = shown_workers(asked.app)
    items = [
        fields(
            worker=name(each.name),
            state=found.state(each),
            seen=when(each.seen_at),
            started=when(each.started_at),
            queues=[name(queue) for queue in each.queues],
            running=each.running,
            finished=each.finished,
            version=data(shown_release(each.release)) if each.release else None,
            failing=[data(f"{part.part}: {part.reason}") for part in found.failing(each)],
        )
        for each in found.records[: asked.limit]
    ]
    return listed(items, count=len(found.records), damaged=len(found.damaged) or None)
