"""The dashboard's first page and `aztask top` show one overview, with one filter."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient
from textual.widgets import DataTable

from aztask import App
from aztask.dashboard.access import Logins
from aztask.dashboard.render import span as page_span
from aztask.dashboard.server import Dashboard
from aztask.dashboard.site import Site
from aztask.errors import BrokerUnavailable, ConfigurationError
from aztask.operate import firstpage
from aztask.operate.cli.main import cli
from aztask.operate.firstpage import OverviewFilter, OverviewReader
from aztask.operate.history import KeptHours
from aztask.operate.overview import Reader
from aztask.operate.requests import Role
from aztask.operate.top.screen import TopApp
from aztask.stores.records.base import WorkerRecord
from aztask.stores.records.history import history_of
from aztask.stores.records.tallies import HOUR, Author, Hour, Tally, bucket_of
from aztask.support import clock
from aztask.support.durations import fine_span

FILTERS = [
    "",
    "by=queue",
    "by=worker&queue=orders",
    "task=pay",
    "worker=b&by=queue",
    "window=day&queue=orders&by=task",
    "window=day&by=worker",
    "window=30d&by=queue",
    "queue=nothing",
]


# -- the filter ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("", OverviewFilter()),
        ("  ", OverviewFilter()),
        ("?", OverviewFilter()),
        ("queue=mail", OverviewFilter(queue="mail")),
        ("?queue=mail&window=day", OverviewFilter("day", queue="mail")),
        ("queue=mail  by=worker", OverviewFilter(by="worker", queue="mail")),
        ("/?task=shop.add#did", OverviewFilter(task="shop.add")),
        ("https://ops.example:9467/?worker=a%26b", OverviewFilter(worker="a&b")),
        ("https://ops.example", OverviewFilter()),
        ("task=a+b", OverviewFilter(task="a b")),
        ("task=what%3F", OverviewFilter(task="what?")),
        ("task=a?b", OverviewFilter(task="a?b")),
        ("task=&window=", OverviewFilter()),
        ("task=" + "x" * 900, OverviewFilter(task="x" * 500)),
        ({"queue": " mail ", "by": ""}, OverviewFilter(queue="mail")),
    ],
)
def test_a_filter_is_the_query_of_the_pages_address(given, found):
    assert OverviewFilter.parse(given) == found
    assert OverviewFilter.parse(str(found)) == found
    assert OverviewFilter.parse(f"https://ops.example/?{found}#did") == found
    assert OverviewFilter.parse(found.query()) == found


@pytest.mark.parametrize("given", ["queu=mail", {"queu": "mail"}, "https://x/?queu=mail"])
def test_an_unknown_name_is_refused_with_the_known_ones(given):
    with pytest.raises(ConfigurationError, match=r"give window=, .*Did you mean 'queue'\?"):
        OverviewFilter.parse(given)


def test_a_word_alone_is_no_filter():
    with pytest.raises(ConfigurationError, match=r"no filter 'mail\\x1b'; give"):
        OverviewFilter.parse("mail\x1b")


# -- one store, three views ------------------------------------------------------------------


def done(app: App, worker: str, at: float, queue: str, task: str, **counts: int) -> None:
    """Write what a worker did in one slot."""
    begins = int(at // HOUR) * HOUR
    runs = {bucket_of(0.3): counts["succeeded"], bucket_of(7.0): 1}
    tally = Tally(**counts, runs=runs, waits={bucket_of(2.0): 3, bucket_of(95.0): 1})
    hour = Hour(Author(worker, begins, "1.0"), {(queue, task): {int(at // 10) * 10: tally}})
    kept = history_of(app.results)
    assert kept is not None
    kept.write(f"{worker} {queue} {task} {begins}", begins, hour, at)


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    place = f"local://{tmp_path}/q.db"
    made = App("shop", broker=place, results=place)
    now = time.time()
    for queue in ("orders", "mail", "lonely"):
        made.broker.declare(queue)
    made.task(name="shop.add", queue="lonely")(lambda: None)
    made.send("shop.add", [])
    done(made, "a", now - 100, "orders", "pay", succeeded=6, failed=1, retried=2, lost=1)
    done(made, "b", now - 200, "orders", "ship", succeeded=3, failed=0)
    done(made, "b", now - 300, "mail", "send", succeeded=1, failed=4)
    done(made, "a", now - 5 * HOUR, "mail", "send", succeeded=10)
    done(made, "a", now - 3 * 24 * HOUR, "orders", "pay", succeeded=100)
    kept = history_of(made.results)
    assert kept is not None
    kept.merge("m", now)
    record = WorkerRecord("a", now - 100, now, ("orders", "mail"), 0, 5)
    made.results.heartbeat(record)
    yield made
    made.close()


def by_stats(app: App, chosen: OverviewFilter) -> list[dict[str, object]]:
    """The figures of ``aztask stats --json``."""
    given = {"window": chosen.window, "by": chosen.by, **chosen.conditions}
    options = [text for name, value in given.items() for text in (f"--{name}", value)]
    place = app.address.split(" ")[0]
    env = {"AZTASK_BROKER": place, "AZTASK_RESULTS": place}
    ran = CliRunner().invoke(cli, ["stats", "--json", *options], env=env, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return [json.loads(line) for line in ran.output.splitlines()]


def cells_of(
    figures: list[dict[str, object]], by: str, span: object, first: str
) -> list[list[str]]:
    """Those figures as a table writes them."""
    counts = ("ended", "failed", "retried", "lost")
    times = ("wait_median", "wait_95", "run_median", "run_95")
    return [
        [
            str(each[by] or first),
            *(str(each[name]) for name in counts),
            *("" if each[name] is None else span(each[name]) for name in times),
        ]
        for each in figures
    ]


class Rows(HTMLParser):
    """The cells of each row of the tables of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        self.inside = tag in ("td", "th") or (self.inside and tag == "a")
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def by_page(app: App, query: str) -> tuple[str, list[list[str]]]:
    """The first page, and the rows of its table about what workers did."""
    access = Logins(link_role=Role.READ)
    application = Dashboard(Site(app), access).application(["testserver"])
    with TestClient(application) as client:
        key = access.link_key.reveal()
        text = client.get("/login", params={"key": key, "next": f"/?{query}"}).text
    part = re.search(r'aria-label="What workers did".*?</table>', text, re.DOTALL)
    assert part is not None, text
    return text, Rows(part[0]).rows[1:]


def by_top(app: App, chosen: OverviewFilter) -> tuple[TopApp, list[list[str]]]:
    """`aztask top` after its first reading, and its table about what workers did."""
    reader = Reader(app, lambda: app.broker.listing().queues)
    found: list[list[str]] = []

    async def run() -> TopApp:
        screen = TopApp(OverviewReader(reader), address=app.address, interval=60.0, chosen=chosen)
        async with screen.run_test(size=(160, 80)) as pilot:
            for _ in range(300):
                await pilot.pause(0.02)
                if screen.overview.figures.at:
                    break
            table = screen.query_one("#done", DataTable)
            rows = (table.get_row_at(number) for number in range(table.row_count))
            found.extend([str(cell) for cell in row] for row in rows)
        return screen

    return asyncio.run(run()), found


@pytest.mark.parametrize("query", FILTERS)
def test_top_page_and_stats_give_the_same_figures(app, query):
    chosen = OverviewFilter.parse(query)
    figures = by_stats(app, chosen)
    if query != "queue=nothing":
        assert figures[0]["ended"] > 0
    text, page = by_page(app, query)
    wanted = cells_of(figures, chosen.by, page_span, "All")
    assert [[each or "–" for each in row] for row in wanted] == page
    screen, top = by_top(app, chosen)
    wanted = cells_of(figures, chosen.by, fine_span, "(all)")
    assert [[each or "-" for each in row] for row in wanted] == top
    # The sums of the first line and what needs attention, too; no filter hides them.
    found = screen.overview
    assert (found.backlog, found.dead, found.alive) == (1, 0, 1)
    assert [each.text for each in found.notices] == [
        "queue lonely has 1 message and no running worker"
    ]
    assert all(each.text in text for each in found.notices)
    assert "<dt>Waiting messages</dt><dd>1</dd>" in text
    queues = {each.queue for each in found.figures.queues}
    assert queues == ({chosen.queue} & {"orders"} if chosen.queue else {"orders", "mail", "lonely"})
    for name in ("orders", "mail", "lonely"):
        assert (f'"/queue?name={name}">{name}</a>' in text) == (name in queues)


def test_a_wrong_filter_is_said_on_the_page_and_the_rest_is_shown(app):
    access = Logins(link_role=Role.READ)
    application = Dashboard(Site(app), access).application(["testserver"])
    with TestClient(application) as client:
        client.get("/login", params={"key": access.link_key.reveal()})
        for query, why in (
            ("queu=mail", "Did you mean &#39;queue&#39;?"),
            ("window=year", "the history has no &#39;year&#39;"),
            ("window=week&by=worker", "workers are kept for a day"),
        ):
            answer = client.get(f"/?{query}")
            assert answer.status_code == 200 and why in answer.text
            assert "queue lonely has 1 message" in answer.text
            assert client.get(f"/history.json?{query}").status_code == 503


# -- reading again ---------------------------------------------------------------------------


def test_the_history_is_read_as_often_as_workers_write(app, monkeypatch):
    read, counted = firstpage.done, []

    def counts(app: App, chosen: OverviewFilter, kept: KeptHours) -> firstpage.Done:
        counted.append(chosen.queue)
        return read(app, chosen, kept)

    monkeypatch.setattr(firstpage, "done", counts)
    reader = OverviewReader(Reader(app, lambda: ["orders"]))
    mail = OverviewFilter(queue="mail")
    for chosen in (OverviewFilter(), OverviewFilter(), mail, mail):
        reader.read(chosen)
    assert counted == ["", "mail"]
    now = clock.monotonic()
    monkeypatch.setattr(firstpage.clock, "monotonic", lambda: now + firstpage.HISTORY_EVERY + 1)
    reader.read(mail)
    assert counted == ["", "mail", "mail"]


def test_a_store_that_is_away_is_said_and_the_rest_is_shown(app, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise BrokerUnavailable("no route to host")

    monkeypatch.setattr(firstpage, "history", fails)
    found = OverviewReader(Reader(app, lambda: ["orders"])).read(OverviewFilter())
    assert found.done.why == "no route to host" and found.done.view is None
    assert [each.queue for each in found.figures.queues] == ["orders"]
