"""``aztask top`` under textual's pilot, over a real embedded queue and its results."""

from __future__ import annotations

import asyncio
import time

import pytest
from click.testing import CliRunner
from textual.widgets import DataTable, Input, Static

from aztask import App
from aztask.errors import BrokerUnavailable
from aztask.operate.cli.main import cli
from aztask.operate.firstpage import OverviewFilter, OverviewReader
from aztask.operate.overview import FAILURES_EVERY, Reader
from aztask.operate.top.screen import TopApp
from aztask.settlement import DeadLetter
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
from aztask.stores.records.tallies import HOUR, Author, Hour, Tally, bucket_of

HOSTILE = "[red]x[/red]\x1b[2J"


@pytest.fixture
def app(tmp_path):
    made = App("shop", broker=f"local://{tmp_path}/q.db", results=f"local://{tmp_path}/q.db")
    made.task(name="shop.add")(lambda a, b: a + b)
    yield made
    made.close()


def beat(app, *, finished=0, at=None, name="w1", **more):
    now = time.time() if at is None else at
    running = (RunningTask("order-7", "shop.add", "default", now - 90, 2),)
    app.results.heartbeat(
        WorkerRecord(name, now - 100, now, ("default",), 1, finished, tasks=running, **more)
    )


def fail(app, task_id, error):
    key = RunKey(task_id, 0, 0)
    app.results.start([Start(key, "shop.add", "default", 1, "o", "w1", time.time())])
    outcome = Outcome(
        State.FAILED, DeadLetter("r"), error_type="OSError", error=error, at=time.time() - 5
    )
    assert app.results.record([Finish(key, "o", outcome)]) == [True]


def reader(app, *queues):
    return Reader(app, lambda: queues or app.broker.listing().queues)


def cells(screen, name):
    table = screen.query_one(f"#{name}", DataTable)
    return [[str(cell) for cell in table.get_row_at(n)] for n in range(table.row_count)]


def text(screen, name):
    return str(screen.query_one(f"#{name}", Static).render())


def piloted(app, check, *, interval=60.0, read=None, chosen=""):
    """Run the application, and `check` once the first figures are shown."""

    async def run():
        screen = TopApp(
            OverviewReader(read or reader(app)),
            address=app.address,
            interval=interval,
            chosen=OverviewFilter.parse(chosen),
        )
        async with screen.run_test(size=(140, 60)) as pilot:
            await shown(screen, pilot)
            await check(screen, pilot)

    asyncio.run(run())


async def shown(screen, pilot, after=0.0):
    for _ in range(200):
        await pilot.pause(0.02)
        if screen.overview.figures.at > after:
            return
    pytest.fail("no figures were shown")


def test_the_tables_show_queues_workers_tasks_and_failures(app):
    app.tasks["shop.add"].map([(1, 2)] * 3)
    beat(app)
    fail(app, "order-6", "no connection")

    async def check(screen, pilot):
        assert cells(screen, "queues") == [["default", "3", "3", "0", "0", "0", "0"]]
        assert cells(screen, "workers") == [["w1", "alive", "default", "1", "0", "0", "-"]]
        ((task, task_id, queue, retries, seconds, worker),) = cells(screen, "running")
        assert (task, task_id, queue, retries) == ("shop.add", "order-7", "default", "2")
        assert (seconds, worker) == ("90s", "w1")
        ((_, *failure),) = cells(screen, "failures")
        assert failure == ["shop.add", "order-6", "OSError: no connection"]
        assert "3 waiting" in text(screen, "summary")
        assert "1 workers" in text(screen, "summary")
        assert text(screen, "notices") == ""

    piloted(app, check)


def test_it_reads_again_and_can_be_paused_and_slowed(app):
    app.send("shop.add", [1, 2])

    async def check(screen, pilot):
        before = screen.overview.figures.at
        app.send("shop.add", [1, 2])
        await pilot.press("r")
        await shown(screen, pilot, before)
        assert cells(screen, "queues")[0][1] == "2"
        await pilot.press("p")
        assert screen.paused
        assert "paused" in text(screen, "summary")
        await pilot.press("p", "minus")
        assert screen.interval == 60.0, "it is the slowest"
        await pilot.press("plus", "plus")
        assert screen.interval == 10.0
        assert "every 10 s" in text(screen, "summary")
        await pilot.press("q")

    piloted(app, check)


def test_hostile_texts_are_shown_as_they_are(app):
    beat(app, name=HOSTILE)
    fail(app, HOSTILE, HOSTILE)

    async def check(screen, pilot):
        ((_, _, task_id, error),) = cells(screen, "failures")
        assert task_id == "[red]x[/red]\\x1b[2J"
        assert error == "OSError: [red]x[/red]\\x1b[2J"
        assert cells(screen, "workers")[0][0] == "[red]x[/red]\\x1b[2J"

    piloted(app, check)


def test_the_cursor_stays_while_rows_change(app):
    for number in range(5):
        app.broker.declare(f"queue-{number}")

    async def check(screen, pilot):
        table = screen.query_one("#queues", DataTable)
        table.focus()
        await pilot.press("down", "down")
        assert table.cursor_row == 2
        before = screen.overview.figures.at
        await pilot.press("r")
        await shown(screen, pilot, before)
        assert table.cursor_row == 2

    piloted(app, check)


def did(app, worker, queue, task, **counts):
    """Write what a worker did just now."""
    now = time.time()
    begins = int(now // HOUR) * HOUR
    tally = Tally(**counts, runs={bucket_of(0.5): counts["succeeded"]}, waits={bucket_of(2.0): 1})
    hour = Hour(Author(worker, begins, "1.0"), {(queue, task): {int(now // 10) * 10: tally}})
    history_of(app.results).write(worker, begins, hour, now)


async def until(pilot, holds):
    for _ in range(200):
        await pilot.pause(0.02)
        if holds():
            return
    pytest.fail("it did not come so far")


def test_it_shows_what_workers_did_and_what_needs_attention(app):
    did(app, "w1", "default", "shop.add", succeeded=8, failed=2, retried=1, lost=1)
    app.broker.declare("lonely")
    app.send("shop.add", [1, 2], queue="lonely")
    beat(app)

    async def check(screen, pilot):
        assert cells(screen, "done") == [
            [name, "11", "2", "1", "1", "1.9s", "2.0s", "470ms", "508ms"]
            for name in ("(all)", "shop.add")
        ], cells(screen, "done")
        assert "the last hour, by task" in text(screen, "title-done")
        assert text(screen, "notices").splitlines() == [
            "problem: queue lonely has 1 message and no running worker"
        ]

    piloted(app, check)


def test_a_slash_asks_for_a_filter_as_in_the_address_of_the_page(app):
    did(app, "w1", "mail", "shop.send", succeeded=1)
    did(app, "w2", "default", "shop.add", succeeded=2)
    app.broker.declare("default")
    app.broker.declare("mail")
    beat(app)
    fail(app, "order-6", "no connection")

    async def check(screen, pilot):
        field = screen.query_one("#filter", Input)
        assert not field.display
        await pilot.press("slash")
        assert field.display and field.has_focus and field.value == ""
        await pilot.press(*"queu=mail", "enter")
        assert "Did you mean 'queue'?" in text(screen, "wrong")
        assert field.display and screen.chosen == OverviewFilter()
        field.value = "https://ops.example/?queue=mail&by=worker#did"
        await pilot.press("enter")
        await until(pilot, lambda: screen.overview.chosen.queue == "mail")
        assert not field.display and text(screen, "wrong") == ""
        assert [row[:2] for row in cells(screen, "done")] == [["(all)", "1"], ["w1", "1"]]
        assert [row[0] for row in cells(screen, "queues")] == ["mail"]
        assert cells(screen, "workers") == cells(screen, "running") == []
        assert cells(screen, "failures") == []
        assert "by worker; only queue mail" in text(screen, "title-done")
        assert "1 workers" in text(screen, "summary"), "the sums are of everything"
        await pilot.press("slash")
        assert field.value == "by=worker queue=mail"
        await pilot.press("escape")
        assert not field.display and screen.chosen.queue == "mail"
        await pilot.press("slash", "ctrl+u", "enter")
        await until(pilot, lambda: screen.overview.chosen == OverviewFilter())
        assert len(cells(screen, "queues")) == 2

    piloted(app, check)


def test_a_window_that_the_history_does_not_have_is_named(app):
    async def check(screen, pilot):
        assert "window hour, or leave out the worker" in text(screen, "title-done")
        assert cells(screen, "done") == []

    piloted(app, check, chosen="window=week worker=w1")


def test_hostile_filters_and_names_of_the_history_are_text(app):
    did(app, HOSTILE, HOSTILE, HOSTILE, succeeded=1)

    async def check(screen, pilot):
        shown = "[red]x[/red]\\x1b[2J"
        assert [row[0] for row in cells(screen, "done")] == ["(all)", shown]
        assert f"only queue {shown}" in text(screen, "title-done")

    piloted(app, check, chosen=str(OverviewFilter(queue=HOSTILE)))


def test_a_filter_is_read_before_anything_is_shown(tmp_path):
    place = f"local://{tmp_path}/q.db"
    done = CliRunner().invoke(
        cli, ["top", "--filter", "que=x"], env={"AZTASK_BROKER": place, "AZTASK_RESULTS": place}
    )
    assert done.exit_code != 0


# -- the figures -----------------------------------------------------------------------------


def test_a_rate_is_that_between_two_reports(app):
    read = reader(app, "default")
    app.broker.declare("default")
    now = time.time()
    beat(app, finished=100, at=now - 10)
    assert read.read().rate is None
    beat(app, finished=150, at=now - 5)
    assert read.read().rate == pytest.approx(10.0)
    assert read.read().rate == pytest.approx(10.0), "without a new report it stays"
    beat(app, finished=0, at=now)
    assert read.read().rate == 0, "a worker of the same name that started again"


def test_old_workers_disappear_and_silent_ones_run_nothing(app):
    now = time.time()
    beat(app, name="old", at=now - 7200)
    beat(app, name="silent", at=now - 60)
    beat(app, name="ended", at=now - 5, stopped=True)
    beat(app, name="new")
    found = reader(app).read()
    assert [(each.record.name, each.state) for each in found.workers] == [
        ("new", "alive"),
        ("ended", "stopped"),
        ("silent", "silent"),
    ]
    assert {each.worker.name for each in found.running} == {"new"}


def test_what_cannot_be_read_is_named_and_the_rest_is_shown(app):
    app.broker.declare("default")
    found = reader(app, "default", "missing").read()
    assert [each.queue for each in found.queues] == ["default"]
    (problem,) = found.problems
    assert problem.startswith("queue missing: ")


def test_services_that_do_not_answer_are_named():
    class Away:
        results = property(lambda self: self)

        def __getattr__(self, name):
            raise BrokerUnavailable("no route to host")

        def workers(self):
            raise BrokerUnavailable("no route to host")

        def recent(self, **_):
            raise BrokerUnavailable("no route to host")

    away = Away()

    def queues():
        return away.broker.queues()

    found = Reader(away, queues).read()
    assert [problem.partition(":")[0] for problem in found.problems] == [
        "queues",
        "workers",
        "failures",
    ]


def test_failures_are_asked_for_less_often(app):
    read = reader(app)
    read.read()
    fail(app, "order-6", "no connection")
    counts = [len(read.read().failures) for _ in range(FAILURES_EVERY)]
    assert counts == [0] * (FAILURES_EVERY - 1) + [1]


def test_without_a_terminal_it_names_the_other_commands(tmp_path):
    done = CliRunner().invoke(cli, ["top"], env={"AZTASK_BROKER": f"local://{tmp_path}/q.db"})
    assert "aztask queues --json" in str(done.exception)
