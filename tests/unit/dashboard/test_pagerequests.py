"""What each page of the dashboard asks of Azure Tables, with a fleet of 500 workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from services import Blobs, Tables, tables_results
from simulated import line

from aztask import App, chain
from aztask.address.owner import Owner
from aztask.dashboard import pages
from aztask.dashboard.access import Visitor
from aztask.dashboard.site import Ask, Site
from aztask.errors import NotFound
from aztask.operate.requests import Role
from aztask.operate.workflows import workflows
from aztask.settlement import Complete, Resubmit
from aztask.stores.records.base import (
    Finish,
    Outcome,
    RunKey,
    RunningTask,
    Start,
    State,
    WorkerRecord,
)
from aztask.stores.records.history import history_of
from aztask.stores.records.tallies import HOUR, SLOT, Author, Hour, Tally, bucket_of
from aztask.support.clock import SYSTEM_CLOCK

MOST_REQUESTS = 20
WORKERS = 500
TASKS = 10
RUNS = 1500
ANN = Visitor("ann", Role.READ)


class Counted(Tables):
    """The service, and the names of the requests that it answered."""

    def __init__(self) -> None:
        super().__init__(SYSTEM_CLOCK)
        self.asked: list[str] = []

    def get(self, *given: Any) -> Any:
        self.asked.append("get")
        return super().get(*given)

    def query(self, *given: Any, **named: Any) -> Any:
        self.asked.append("query")
        return super().query(*given, **named)

    def change(self, *given: Any) -> Any:
        self.asked.append("change")
        return super().change(*given)

    def together(self, *given: Any) -> Any:
        self.asked.append("together")
        return super().together(*given)


@pytest.fixture(scope="module")
def service() -> Counted:
    return Counted()


@pytest.fixture(scope="module")
def app(service: Counted, tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    broker = App("shop", broker=f"local://{tmp_path_factory.mktemp('pages')}/queues.db").broker
    store = tables_results(
        service, Blobs(SYSTEM_CLOCK), line(), owner=Owner(broker.identity, "shop")
    )
    store.create()
    made = App("shop", broker=broker, results=store)
    for number in range(TASKS):
        made.task(lambda value=None: value, name=f"shop.task{number}", queue=f"queue{number % 4}")
    made.schedule("nightly", made.tasks["shop.task0"].s(), every=3600)
    made.limit("api", rate="10/s", concurrency=3)
    fill(made, time.time())
    yield made
    made.close()


def fill(app: App, now: float) -> None:
    """Workers with their history, runs of every end, open workflows, and a dead letter."""
    assert app.results is not None
    history = history_of(app.results)
    assert history is not None
    for number in range(WORKERS):
        name = f"worker-{number}"
        running = tuple(
            RunningTask(f"busy-{number}-{each}", "shop.task1", "queue1", now) for each in range(4)
        )
        # Seen in an hour: on a slow machine, they would be silent before the last page was asked.
        seen_at = now + 3600
        worker = WorkerRecord(name, now - 7200, seen_at, ("queue1",), 4, 9, tasks=running)
        app.results.heartbeat(worker)
        for begins in (int(now / HOUR) * HOUR - HOUR, int(now / HOUR) * HOUR):
            hour = Hour(Author(name, int(now - 7200), "1.0"))
            slots = hour.series.setdefault(("queue1", f"shop.task{number % TASKS}"), {})
            for at in range(begins, min(begins + HOUR, int(now)), SLOT):
                slots[at] = Tally(4, waits={bucket_of(0.1): 4}, runs={bucket_of(0.2): 4})
            history.write(name, begins, hour, now)
    ends = [State.FAILED, State.RETRYING, State.CANCELLED, *[State.SUCCEEDED] * 7]
    for number in range(RUNS):
        key, state = RunKey(f"run-{number}"), ends[number % len(ends)]
        at = now - RUNS + number
        app.results.start([Start(key, "shop.task1", "queue1", number, "one", "worker-7", at)])
        kind = "" if state is State.SUCCEEDED else "PaymentError"
        how = Complete() if state.final else Resubmit(due=at + 60.0)
        outcome = Outcome(state, how, b"\x01", kind, kind and "declined", "", at + 0.5, 0.5)
        app.results.record([Finish(key, "one", outcome)])
    first, second = app.tasks["shop.task1"], app.tasks["shop.task2"]
    for number in range(60):
        chain(first.s(), second.s()).delay(workflow_id=f"flow-{number}")


FILTERS: dict[str, list[dict[str, str]]] = {
    "/": [
        {},
        {"window": "day"},
        {"window": "week"},
        {"window": "30d", "by": "task"},
        {"by": "worker"},
    ],
    "/queue": [{"name": "queue1"}],
    "/runs": [{}, {"state": "failed"}, {"state": "retrying"}, {"state": "unreadable"}],
    "/task": [{"id": "run-700"}],
    "/workers": [{}, {"name": "worker-7"}],
    "/workflow": [{"id": "flow-7"}],
    "/schedule": [{"name": "nightly"}],
    "/letters": [{"queue": "queue1"}],
}
"""{path: its filters}; of all other pages, the page without one."""
SEARCHES: dict[str, list[dict[str, str]]] = {
    "/runs": [
        {"task": "shop.task1"},
        {"worker": "worker-8"},
        {"text": "declined"},
        {"text": "nothing has this"},
    ],
    "/search": [{"q": each} for each in ("run-700", "worker-7", "declined", "nothing has this")],
}


def spent(app: App, service: Counted, path: str, values: dict[str, str]) -> int:
    del service.asked[:]
    site = Site(app, patience=30.0)
    with suppress(NotFound):  # the schedule, which no worker has started
        site.answer(pages.PAGES[path], Ask(path, values, ANN), 0.0)
    return len(service.asked)


@pytest.mark.parametrize("path", pages.PAGES)
def test_a_page_costs_at_most_twenty_requests(app: App, service: Counted, path: str) -> None:
    for values in FILTERS.get(path, [{}]):
        count = spent(app, service, path, values)
        assert count <= MOST_REQUESTS, f"{values}: {count} requests, {sorted(service.asked)}"


@pytest.mark.parametrize("path", SEARCHES)
def test_a_search_costs_no_more_however_far_it_has_to_look(
    app: App, service: Counted, path: str
) -> None:
    for values in SEARCHES[path]:
        count = spent(app, service, path, values)
        assert count <= MOST_REQUESTS, f"{values}: {count} requests"


def test_the_list_of_workflows_says_what_their_roots_say(app: App, service: Counted) -> None:
    graphs = app.workflows.engine.graphs
    assert app.workflows.result("flow-59").cancel()
    del service.asked[:]
    found = {each.id: each.root for each in workflows(app, 50)}
    assert len(found) == 50 and len(service.asked) <= MOST_REQUESTS
    for name, shown in found.items():
        root = graphs.root(name)
        assert root is not None and shown is not None
        assert shown.summary() == root.summary()
    assert app.workflows.result("flow-59").id in found
    cancelled = [name for name, shown in found.items() if shown and shown.cancelled_at]
    assert cancelled == ["flow-59"]


def test_an_older_page_of_runs_costs_no_more(app: App, service: Counted) -> None:
    site = Site(app, patience=30.0)
    found = pages.run_list(site, Ask("/runs", {}, ANN)).values["found"]
    count = spent(app, service, "/runs", {"after": found.next})
    assert count <= MOST_REQUESTS
