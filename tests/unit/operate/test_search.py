"""Runs are searched in bulk, within bounds: `aztask.operate.search` on files and on Tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from services import Blobs, Tables, tables_results
from simulated import line

from aztask import App
from aztask.address.owner import Owner
from aztask.errors import BrokerUnavailable, ConfigurationError
from aztask.operate import search
from aztask.operate.search import RunFilter, RunsPage, find_runs, newest_figures
from aztask.settlement import Complete
from aztask.stores.records.base import (
    Finish,
    Outcome,
    RunKey,
    RunLine,
    RunRecord,
    Start,
    State,
)
from aztask.stores.records.tables import runlines
from aztask.stores.records.tables.index import COPY, SUMMARY
from aztask.stores.records.tables.store import TablesResults
from aztask.stores.tables.client import TableRequests, TimeBudget
from aztask.support import clock
from aztask.support.clock import SYSTEM_CLOCK, Clock

RUNS = 600


@pytest.fixture(params=["local", "tables"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    place = f"local://{tmp_path}/queues.db"
    made = App("shop", broker=place, results=place if request.param == "local" else None)
    if request.param == "tables":
        service, blobs = Tables(SYSTEM_CLOCK), Blobs(SYSTEM_CLOCK)
        store = tables_results(service, blobs, line(), owner=Owner(made.broker.identity, "shop"))
        store.create()
        made = App("shop", broker=made.broker, results=store)
    yield made
    made.close()


def fill(app: App, count: int = RUNS) -> None:
    """Runs of which every tenth failed; every fiftieth ran on worker-7."""
    assert app.results is not None
    starts, finishes = [], []
    for number in range(count):
        key, at = RunKey(f"run-{number:05}"), 1e9 + number
        worker = "worker-7" if number % 50 == 0 else "worker-1"
        starts.append(Start(key, f"shop.{number % 2}", "mail", number, key.task_id, worker, at))
        error = ("CardError", f"no answer for {number}") if number % 10 == 0 else ("", "")
        state = State.FAILED if error[0] else State.SUCCEEDED
        outcome = Outcome(state, Complete(), b"\x01", *error, "", at + 1, 0.5)
        finishes.append(Finish(key, key.task_id, outcome))
    app.results.start(starts)
    assert all(app.results.record(finishes))


def ids(runs: Sequence[RunRecord]) -> list[str]:
    return [run.key.task_id for run in runs]


def pages(app: App, chosen: RunFilter, limit: int = 50) -> list[RunsPage]:
    """All pages of a list, each behind the one before."""
    found = [find_runs(app, chosen, limit=limit)]
    while found[-1].next:
        found.append(find_runs(app, chosen, limit=limit, after=found[-1].next))
    return found


def wanted(step: int, count: int = RUNS) -> list[str]:
    return [f"run-{number:05}" for number in range(count - 1, -1, -1) if number % step == 0]


FILTERS = {
    "by text of an error": (RunFilter(text="CARDerror"), 10),
    "by worker": (RunFilter(worker="worker-7"), 50),
    "by task": (RunFilter(task="shop.0"), 2),
    "by state": (RunFilter(state="failed"), 10),
    "by several": (RunFilter(task="shop.0", text="no answer", worker="worker-7"), 50),
    "by an id": (RunFilter(text="RUN-00100"), 1000),
    "all": (RunFilter(), 1),
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("bound", [10_000, 130])
def test_all_pages_together_have_every_run_once(
    app: App, name: str, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if pages end at their bound, empty or not."""
    monkeypatch.setattr(search, "MOST_LOOKED", bound)
    fill(app)
    chosen, step = FILTERS[name]
    found = pages(app, chosen, 7)
    right = ["run-00100"] if step == 1000 else wanted(step)
    assert [each for page in found for each in ids(page.runs)] == right
    for page in found[:-1]:
        assert page.stopped is (len(page.runs) < 7)
    assert (found[-1].next, found[-1].stopped, found[-1].damaged) == ("", False, [])


def test_a_page_at_its_bound_says_how_far_back_it_looked(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MOST_LOOKED", 100)
    count = 2500  # more than a window of a file has
    fill(app, count)
    page = find_runs(app, RunFilter(text="nowhere"))
    assert page.stopped and page.next and not page.runs
    assert 100 <= page.searched < count and page.back is not None
    # The times of lines count whole milliseconds.
    assert page.back == pytest.approx(1e9 + count - page.searched + 1, abs=0.002)


def test_what_ends_between_two_pages_is_in_neither(app: App) -> None:
    fill(app, 60)
    first = find_runs(app, RunFilter(), limit=20)
    assert app.results is not None
    key = RunKey("later")
    app.results.start([Start(key, "shop.0", "mail", 1, "o", "w", 2e9)])
    app.results.record([Finish(key, "o", Outcome(State.FAILED, Complete(), at=2e9))])
    rest = find_runs(app, RunFilter(), limit=1000, after=first.next)
    assert ids(first.runs) + ids(rest.runs) == wanted(1, 60)


def test_a_place_that_no_page_has_is_refused(app: App) -> None:
    for state in ("", "failed", "unreadable"):
        with pytest.raises(ConfigurationError, match="first page of the list"):
            find_runs(app, RunFilter(state=state), after="nothing")


def test_figures_are_those_of_the_lines(app: App) -> None:
    fill(app)
    found = newest_figures(app)
    assert found.runs == RUNS
    assert [(each.task, each.runs, each.failed) for each in found.tasks] == [
        ("shop.0", 300, 60),
        ("shop.1", 300, 0),
    ]
    assert found.tasks[0].median == 0.5


# -- when the store does not answer, or takes long -------------------------------------------


class Slow:
    """Lines that come a hundred at a time, each time after some seconds, and then no more."""

    def __init__(self, inner: object, seconds: float, answers: int) -> None:
        self._inner, self._seconds, self._answers = inner, seconds, answers
        self.now = 0.0
        self.given: list[float] = []

    def lines(self, **options: object) -> Slow:
        self._lines = self._inner.lines(**options)  # type: ignore[attr-defined]
        self._rest: list[RunLine] = []
        return self

    remote = False
    requests = 0
    place = ""

    @property
    def ended(self) -> bool:
        return bool(self._lines.ended and not self._rest)

    def more(self, seconds: float) -> Sequence[RunLine]:
        if self._answers == 0:
            raise BrokerUnavailable("the service does not answer in time")
        self._answers -= 1
        self.now += self._seconds
        if not self._rest:
            self._rest = list(self._lines.more(seconds))
            self.last = self._rest
        some, self._rest = self._rest[:100], self._rest[100:]
        self.place = some[-1].place if some else self.place
        return some

    def read(self, lines: Sequence[RunLine], seconds: float) -> list[RunRecord | None]:
        assert seconds >= search.LEAST_SECONDS
        self.given.append(seconds)
        return self._lines.read(lines, seconds)  # type: ignore[no-any-return]


def slow(app: App, seconds: float, answers: int, monkeypatch: pytest.MonkeyPatch) -> Slow:
    fill(app)
    monkeypatch.setattr(runlines, "FIRST_PAGE", 1000)  # all lines at once, which `Slow` divides
    found = Slow(app.results, seconds, answers)
    monkeypatch.setattr(search, "results_of", lambda app: found)
    return found


def test_after_its_seconds_a_page_shows_what_it_has(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = slow(app, 2.0, 100, monkeypatch)
    with clock.replaced(Clock(monotonic=lambda: store.now)):
        page = find_runs(app, RunFilter(worker="worker-7"))
    assert (page.searched, page.stopped) == (300, True), "3 answers of 2 s, for 5 s"
    assert ids(page.runs) == wanted(50)[:6]


def test_the_first_rows_have_as_long_as_the_first_lines(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow store shows a page late, and not an error instead."""
    store = slow(app, 6.0, 1, monkeypatch)
    with clock.replaced(Clock(monotonic=lambda: store.now)):
        page = find_runs(app, RunFilter(worker="worker-7"))
    assert store.given == [search.FIRST_SECONDS]
    assert (page.searched, page.stopped, ids(page.runs)) == (100, True, wanted(50)[:2])


def test_a_service_that_stops_answering_costs_nothing_that_was_found(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(app, 0.0, 2, monkeypatch)
    page = find_runs(app, RunFilter(text="carderror"))
    assert (page.searched, page.stopped, ids(page.runs)) == (200, True, wanted(10)[:20])


def test_a_service_that_answers_nothing_is_an_error(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(app, 0.0, 0, monkeypatch)
    with pytest.raises(BrokerUnavailable):
        find_runs(app, RunFilter(text="carderror"))


# -- what it costs on Azure Tables -----------------------------------------------------------


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of each request to a table."""
    found: list[str] = []

    def counted(name: str) -> None:
        plain = getattr(TableRequests, name)

        def call(self: object, *given: object, **options: object) -> object:
            found.append(name)
            return plain(self, *given, **options)

        monkeypatch.setattr(TableRequests, name, call)

    for name in ("read", "query", "page"):
        counted(name)
    return found


HEADS, HEADS_BEHIND = 3 * 4, 5 * 4
"""A page of each range, from the newest run on and behind a place."""
BESIDE = 3
"""Who owns rows, whether some have no owner, and which rows are damaged."""
MOST_REQUESTS = 20
"""What a page of a list costs at most; a search reads on, page by page."""


@pytest.mark.parametrize("app", ["tables"], indirect=True)
@pytest.mark.parametrize("name", FILTERS)
def test_a_page_costs_its_ranges_and_no_rows(app: App, name: str, spent: list[str]) -> None:
    fill(app, 3000)
    chosen, _ = FILTERS[name]
    searches = chosen not in (RunFilter(), RunFilter(state=chosen.state))
    further = 2 * 4 if searches else 0  # of 675 that succeeded in a shard, and of 75 that failed
    after = ""
    for heads in (HEADS + BESIDE, HEADS_BEHIND):
        del spent[:]
        page = find_runs(app, chosen, after=after)
        assert page.runs and not page.stopped
        assert spent.count("read") == 0
        assert len(spent) <= (4 + BESIDE if chosen.state else heads) + further
        assert searches or len(spent) <= MOST_REQUESTS
        if not (after := page.next):
            break


@pytest.mark.parametrize("app", ["tables"], indirect=True)
def test_rows_of_an_older_release_are_read_within_a_bound(
    app: App, spent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(app)
    store = app.results
    assert isinstance(store, TablesResults)
    text = "PartitionKey ge 'im-' and PartitionKey lt 'im.'"
    for row in store._requests.query(TimeBudget(), text, {}, 10_000):
        store._requests.put(
            TimeBudget(), {k: v for k, v in row.items() if k not in (*SUMMARY, COPY)}
        )
    monkeypatch.setattr(search, "MOST_ROWS", 100)
    del spent[:]
    first = find_runs(app, RunFilter(text="nowhere"))
    assert first.stopped and 100 <= spent.count("read") <= 250
    found = pages(app, RunFilter(worker="worker-7"))
    assert [each for page in found for each in ids(page.runs)] == wanted(50)
    del spent[:]
    assert newest_figures(app).runs == 100 == spent.count("read")
