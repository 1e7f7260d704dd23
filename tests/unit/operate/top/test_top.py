"""``aztask top`` under textual's pilot, over a real embedded queue and its results."""

from __future__ import annotations

import asyncio
import time

import pytest
from click.testing import CliRunner
from textual.widgets import DataTable, Static

from aztask import App
from aztask.errors import BrokerUnavailable
from aztask.operate.cli.main import cli
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


def piloted(app, check, *, interval=60.0, read=None):
    """Run the application, and `check` once the first figures are shown."""

    async def run():
        screen = TopApp(read or reader(app), address=app.address, interval=interval)
        async with screen.run_test(size=(140, 60)) as pilot:
            await shown(screen, pilot)
            await check(screen, pilot)

    asyncio.run(run())


async def shown(screen, pilot, after=0.0):
    for _ in range(200):
        await pilot.pause(0.02)
        if screen.figures.at > after:
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
        assert "3 messages" in text(screen, "summary")
        assert "1 workers" in text(screen, "summary")
        assert text(screen, "problems") == ""

    piloted(app, check)


def test_it_reads_again_and_can_be_paused_and_slowed(app):
    app.send("shop.add", [1, 2])

    async def check(screen, pilot):
        before = screen.figures.at
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
        before = screen.figures.at
        await pilot.press("r")
        await shown(screen, pilot, before)
        assert table.cursor_row == 2

    piloted(app, check)


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
