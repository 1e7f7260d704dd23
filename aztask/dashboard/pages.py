"""The pages that only show: each is a function of the site and of what is asked.

Each of them is one question to `aztask.operate`, or a few, and a template of the same name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from typing import Any, Final, TypeAlias

from aztask.dashboard import graph
from aztask.dashboard.site import PAGE_SIZE, SEARCH_REQUESTS, Ask, Making, Shown, Site
from aztask.errors import AztaskError, ConfigurationError, NotFound
from aztask.operate.action import audit, entry
from aztask.operate.controls import controls, limits
from aztask.operate.deadletters import Selection
from aztask.operate.deadletters.actions import groups
from aztask.operate.deadletters.actions import page as letters_page
from aztask.operate.deadletters.mutes import mutes
from aztask.operate.explain import explain
from aztask.operate.firstpage import HISTORY_EVERY, Done, OverviewFilter, done, overview
from aztask.operate.history import BY, WINDOW_NAMES
from aztask.operate.jobs import job, jobs
from aztask.operate.queues import arguments_of, oldest_waiting, peek, queues
from aztask.operate.requests import KINDS as ACTIONS
from aztask.operate.schedules import schedule, schedules
from aztask.operate.search import (
    Hits,
    NewestFigures,
    RunFilter,
    ended_at,
    find_runs,
    newest_figures,
    search,
)
from aztask.operate.tasks import STATES, registered, result, settlement_of
from aztask.operate.workers import running, workers
from aztask.operate.workflows import STATES as WORKFLOW_STATES
from aztask.operate.workflows import workflow, workflows
from aztask.support.display import mask, safe_str, visible

Page: TypeAlias = Callable[[Site, Ask], Shown]

MOST_WORKFLOWS: Final = 200
OCCURRENCES: Final = 20


def history_data(site: Site, ask: Ask) -> Shown:
    """What workers did in a window, for the charts and for the table below them."""
    return Shown("", "", {"done": done(site.app, OverviewFilter.parse(ask.query), site.kept)})


def charts(site: Site, ask: Ask) -> dict[str, Any]:
    """What the page draws, as plain data. Raises as `history` does."""
    did = _done(site, ask, OverviewFilter.parse(ask.query))
    view = did.view
    if view is None:
        raise ConfigurationError(did.why)
    shown = [
        {"at": each.at, "kind": each.kind, "text": visible(mask(each.text))} for each in did.marks
    ]
    return {"step": view.window.step, "times": view.times, "marks": shown, **view.chart()}


def _done(site: Site, ask: Ask, chosen: OverviewFilter) -> Done:
    """The same filter has one answer, for the page and for its charts, until workers write again.

    Raises as `history` does.
    """
    named = Ask("/history.json", chosen.query(), ask.visitor)
    # Half of the time: who asks for the overview is shown the rest of it then.
    half = site.patience / 2
    found: Done = site.answer(history_data, named, HISTORY_EVERY, half).values["done"]
    return found


def overview_page(site: Site, ask: Ask) -> Shown:
    """Rates, failures, backlog, what needs attention first, and what workers did."""
    chosen, counting = OverviewFilter(), False
    try:
        chosen = OverviewFilter.parse(ask.query)
        did = _done(site, ask, chosen)
    except AztaskError as error:
        did, counting = Done(why=safe_str(error)), isinstance(error, Making)
    found = overview(site.app, site.figures(), chosen, did)
    ages = [(each.queue, _age(site, each.queue)) for each in found.figures.queues[:20]]
    values = {"found": found, "windows": WINDOW_NAMES, "by_all": BY, "ages": ages}
    values["charted"] = counting or did.view is not None
    return Shown("overview", "Overview", {**values, "asked": asdict(chosen)})


def _newest(site: Site) -> NewestFigures:
    return NewestFigures((), 0) if site.app.results is None else newest_figures(site.app)


def _age(site: Site, queue: str) -> Any:
    try:
        return oldest_waiting(site.app, queue)
    except AztaskError:
        return None  # the queue's own line says what is wrong with it


def queue_list(site: Site, ask: Ask) -> Shown:
    """All queues with their counts, the age of their oldest message and their learned lease."""
    counts = queues(site.app)
    served: dict[str, int] = {}
    for each in site.figures().workers:
        for name in each.record.queues if each.state == "alive" else ():
            served[name] = served.get(name, 0) + 1
    paused = _paused(site)
    return Shown(
        "queues",
        "Queues",
        {
            "counts": counts,
            "rows": [
                (stats, _age(site, stats.queue), served.get(stats.queue, 0), stats.queue in paused)
                for stats in counts.queues
            ],
        },
    )


def _paused(site: Site) -> set[str]:
    try:
        found = controls(site.app)
    except AztaskError:
        return set()
    return {each.name for each in found.pauses if each.scope.value == "queue"}


def queue_messages(site: Site, ask: Ask) -> Shown:
    """The first messages of one queue, as far as its service shows them."""
    name = ask.needed("name")
    found = peek(site.app, name, PAGE_SIZE)
    rows = [
        (each, arguments_of(site.app, each.message, each.problem) if ask.sees_values else None)
        for each in found.found
    ]
    return Shown("queue", f"Queue {name}", {"name": name, "found": found, "rows": rows})


def task_list(site: Site, ask: Ask) -> Shown:
    """The tasks that the app registers, and the figures of the newest runs of each task."""
    figures = {each.task: each for each in _newest(site).tasks}
    known = registered(site.app)
    others = [each for name, each in figures.items() if name not in site.app.tasks]
    rows = [(each, figures.get(each.task.name)) for each in known]
    return Shown("tasks", "Tasks", {"rows": rows, "others": others})


def run_list(site: Site, ask: Ask) -> Shown:
    """Runs with conditions, page by page."""
    names = ("state", "task", "queue", "worker", "text")
    chosen = RunFilter(**{name: ask.text(name) for name in names})
    if chosen.state and chosen.state not in STATES:
        raise NotFound(f"there is no state {chosen.state!r}; the states are {', '.join(STATES)}")
    after = ask.text("after")
    found = find_runs(site.app, chosen, limit=PAGE_SIZE, after=after, requests=SEARCH_REQUESTS)
    rows = [(each, ended_at(each), settlement_of(each)) for each in found.runs]
    values = {"found": found, "rows": rows, "chosen": asdict(chosen), "states": STATES}
    values |= {"mine": site.app.owner.broker}
    return Shown("runs", "Runs", values)


def running_list(site: Site, ask: Ask) -> Shown:
    """What workers run now, the longest-running first."""
    queue, task = ask.text("queue"), ask.text("task")
    longer = ask.seconds("longer")
    chosen = {"queue": queue, "task": task, "longer": ask.text("longer")}
    found = running(site.app, queues=[queue] if queue else (), task=task or None, longer=longer)
    values = {"rows": found.rows[:500], "count": len(found.rows), "chosen": chosen}
    return Shown("running", "Running tasks", {**values, "sees_values": ask.sees_values})


def worker_list(site: Site, ask: Ask) -> Shown:
    """The workers of the last day."""
    found = workers(site.app)
    rates = {each.record.name: each.rate for each in site.figures().workers}
    chosen = ask.text("name")
    rows = [
        (each, found.state(each), found.failing(each), rates.get(each.name))
        for each in found.records
        if chosen in each.name
    ]
    values = {"rows": rows, "damaged": found.damaged, "at": found.at, "chosen": chosen}
    return Shown("workers", "Workers", values)


def task_story(site: Site, ask: Ask) -> Shown:
    """What happened to one task, as a timeline, and how it ended."""
    task_id = ask.needed("id")
    history = explain(site.app, task_id)
    try:
        ended = result(site.app, task_id) if site.app.results is not None else None
    except NotFound:
        ended = None
    first = next((each.at for each in history.entries if each.at is not None), None)
    values = {"history": history, "ended": ended, "first": first, "sees": ask.sees_values}
    return Shown("task", f"Task {task_id}", values)


def workflow_list(site: Site, ask: Ask) -> Shown:
    """Workflows of one state or of all: open ones first."""
    state = ask.text("state")
    if state and state not in WORKFLOW_STATES:
        raise NotFound(f"there is no state {state!r}; see {', '.join(WORKFLOW_STATES)}")
    found = workflows(site.app, MOST_WORKFLOWS, state or None)
    values = {"rows": found, "state": state, "states": WORKFLOW_STATES, "most": MOST_WORKFLOWS}
    return Shown("workflows", "Workflows", values)


def workflow_graph(site: Site, ask: Ask) -> Shown:
    """One workflow: its graph, and its tasks in a table."""
    name = ask.needed("id")
    view = workflow(site.app, name)
    nodes = list(islice((each for each in view.all_nodes() if each.task), 500))
    values = {"id": name, "view": view, "drawing": graph.drawn(view), "nodes": nodes}
    return Shown("workflow", f"Workflow {name}", values)


def schedule_list(site: Site, ask: Ask) -> Shown:
    """All schedules, and the coming times of the week in order."""
    workers = [each.record for each in site.figures().workers]
    found, aside = schedules(site.app, workers)
    coming = sorted(
        (each.utc, each.local, shown.name, shown.task) for shown in found for each in shown.next
    )
    return Shown("schedules", "Schedules", {"rows": found, "aside": aside, "coming": coming})


def schedule_story(site: Site, ask: Ask) -> Shown:
    """One schedule with its newest occurrences."""
    name = ask.needed("name")
    found = schedule(site.app, name, OCCURRENCES)
    return Shown("schedule", f"Schedule {name}", {"found": found})


def limit_list(site: Site, ask: Ask) -> Shown:
    """Limits with their use; pauses, scales and open breakers."""
    try:
        used = limits(site.app)
    except ConfigurationError:
        used = []
    return Shown("limits", "Limits and pauses", {"used": used, "held": controls(site.app)})


def dead_groups(site: Site, ask: Ask) -> Shown:
    """Dead letters, grouped by task, reason and the signature of their error."""
    queue = ask.text("queue")
    found = groups(site.app, [queue] if queue else list(site.queues), site.letters)
    muted = mutes(site.app)
    rows = [(name, group, muted.of(name, group)) for name, group in found.groups]
    rows.sort(key=lambda each: (each[2] is not None, -each[1].count))
    total = sum(group.count for _, group, _ in rows)
    values = {"rows": rows, "total": total, "queue": queue, "found": found}
    return Shown("dead", "Dead letters", values)


def dead_list(site: Site, ask: Ask) -> Shown:
    """The dead letters of one queue or group, page by page behind a position."""
    queue = ask.needed("queue")
    task, reason = ask.text("task"), ask.text("reason")
    # Not "signature": `mask` would take the rest of the address for a SAS token's signature.
    error = ask.text("error")
    chosen = Selection(
        task=task or None,
        reason=reason or None,
        signature=error or None,
        everything=not (task or reason or error),
    )
    found = letters_page(site.app, queue, chosen, limit=PAGE_SIZE, after=ask.query.get("after", ""))
    rows = [
        (each, arguments_of(site.app, each.message, each.problem) if ask.sees_values else None)
        for each in found.letters
    ]
    conditions = {"task": task, "reason": reason, "error": error}
    values = {"queue": queue, "rows": rows, "chosen": conditions, "next": found.next}
    return Shown("letters", f"Dead letters of {queue}", values)


def audit_list(site: Site, ask: Ask) -> Shown:
    """Who did what, the newest first; with an id, that entry above the list."""
    chosen = {name: ask.text(name) for name in ("by", "action", "text")}
    one = entry(site.app, ask.text("id")) if ask.text("id") else None
    found = audit(site.app, **chosen, limit=PAGE_SIZE, after=ask.text("after"))
    values = {"found": found, "one": one, "chosen": chosen, "actions": sorted(ACTIONS)}
    return Shown("audit", "Audit", values)


def job_list(site: Site, ask: Ask) -> Shown:
    """Actions over many items, the newest first; with an id, that job above the list."""
    one = job(site.app, ask.text("id")) if ask.text("id") else None
    found = jobs(site.app, limit=PAGE_SIZE, after=ask.text("after"))
    listed = [*found.jobs, *([one] if one else [])]
    states = {each.key: each.shown(found.at) for each in listed}
    return Shown("jobs", "Jobs", {"found": found, "one": one, "states": states})


def lease_list(site: Site, ask: Ask) -> Shown:
    """What workers learned about the lease of each queue."""
    return Shown("leases", "Leases", {"counts": queues(site.app)})


def search_page(site: Site, ask: Ask) -> Shown:
    """One field for any id, name, worker or error."""
    text = ask.text("q")
    hits = search(site.app, text, requests=SEARCH_REQUESTS) if text else Hits(())
    return Shown("search", "Search", {"text": text, "hits": hits.found, "runs": hits.runs})


PAGES: Final[dict[str, Page]] = {
    "/": overview_page,
    "/queues": queue_list,
    "/queue": queue_messages,
    "/tasks": task_list,
    "/runs": run_list,
    "/running": running_list,
    "/workers": worker_list,
    "/task": task_story,
    "/workflows": workflow_list,
    "/workflow": workflow_graph,
    "/schedules": schedule_list,
    "/schedule": schedule_story,
    "/limits": limit_list,
    "/dead": dead_groups,
    "/letters": dead_list,
    "/leases": lease_list,
    "/jobs": job_list,
    "/audit": audit_list,
    "/search": search_page,
}

MENU: Final = (
    ("/", "Overview"),
    ("/queues", "Queues"),
    ("/tasks", "Tasks"),
    ("/runs", "Runs"),
    ("/running", "Running"),
    ("/workers", "Workers"),
    ("/workflows", "Workflows"),
    ("/schedules", "Schedules"),
    ("/limits", "Limits and pauses"),
    ("/dead", "Dead letters"),
    ("/leases", "Leases"),
    ("/jobs", "Jobs"),
    ("/audit", "Audit"),
    ("/search", "Search"),
)


def failed(error: Exception) -> tuple[int, Shown]:
    """The status and the page for an error."""
    if isinstance(error, Making):
        values = {"seconds": error.seconds, "text": safe_str(error)}
        return 503, Shown("making", "One moment", values)
    if isinstance(error, NotFound):
        return 404, Shown("failed", "Not found", {"text": safe_str(error, 600)})
    title = "This cannot be shown now"
    status = 500 if not isinstance(error, AztaskError) else 503
    return status, Shown("failed", title, {"text": safe_str(error, 600), "at": time.time()})
