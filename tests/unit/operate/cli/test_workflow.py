"""``aztask workflow``: workflows as a list and as a tree, cancelled and resumed."""

import json
import time
from dataclasses import replace

import pytest

from aztask import chain, chord, group
from aztask.settlement import Complete, DeadLetter
from aztask.stores.records.base import (
    Cancelled,
    Finish,
    Outcome,
    Owned,
    RunKey,
    Start,
    State,
    WorkerRecord,
)
from aztask.workflows.joins import TaskEnd
from aztask.workflows.place import NodePlace
from aztask.workflows.result import ASKED_CHAINS


@pytest.fixture
def shop(cli, monkeypatch):
    monkeypatch.setenv("AZTASK_BROKER", cli.address)
    monkeypatch.setenv("AZTASK_RESULTS", cli.address)
    app = cli.app()

    @app.task
    def page(number):
        return number

    @app.task
    def book(pages):
        return len(pages)

    app.pages = [page.s(number) for number in range(20)]
    app.book = book
    return app


def end(app, workflow, number, state=State.SUCCEEDED, generation=0):
    """The end of one task, as a worker reports it."""
    engine = app.workflows.engine
    plan = engine.graphs.plan(workflow)
    place = NodePlace.of(plan, plan.nodes[number])
    kind = "" if state is State.SUCCEEDED else "ValueError"
    engine.joins.ended([TaskEnd(workflow, place, generation, state, b"\x01", kind, "no paper")])


def test_the_list_has_open_ones_first(cli, shop):
    chord(shop.pages, shop.book.s()).delay(workflow_id="open")
    group().__or__(shop.book.s()).delay(workflow_id="done")
    end(shop, "done", 2)
    lines = cli("workflow", "list").out.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        ["open", "started", "21"],
        ["done", "succeeded", "1"],
    ]
    found = [json.loads(line) for line in cli("workflow", "list", "--json").out.splitlines()]
    assert [(each["id"], each["state"], each["cancelled"]) for each in found] == [
        ("open", "started", False),
        ("done", "succeeded", False),
    ]
    assert cli("workflow", "list", "--state", "succeeded", "--json").out.count("\n") == 1


def test_a_tree_shows_failed_members_first(cli, shop):
    members = [shop.pages[0].task.si(number) for number in range(20)]
    graph = chain(group(members[:1]), chord(members, shop.book.s()))
    graph.delay(workflow_id="w")
    end(shop, "w", 2)
    end(shop, "w", 4)
    end(shop, "w", 20, State.FAILED)
    shown = cli("workflow", "show", "w").out.splitlines()
    assert shown[0] == "w: started, 0s"
    assert shown[1:4] == ["chain", "├ group of 1  succeeded", "│ └ shop.page  w.2  succeeded"]
    assert shown[4] == "├ group of 20"
    assert shown[5] == "│ ├ shop.page  w.20  failed: ValueError: no paper"
    assert shown[6] == "│ ├ shop.page  w.4  succeeded"
    assert shown[-2:] == ["│ └ ... 12 more", "└ shop.book  w.24  not sent"]
    lines = [json.loads(line) for line in cli("workflow", "show", "w", "--json").out.splitlines()]
    assert len(lines) == 1 + 22
    failed = [each for each in lines if each.get("error_type")]
    assert [(each["task_id"], each["error"]) for each in failed] == [("w.20", "no paper")]


def test_cancelling_is_said_once(cli, shop):
    chord(shop.pages, shop.book.s()).delay(workflow_id="w")
    assert cli("workflow", "cancel", "w").out == "w is cancelled\n"
    assert shop.workflows.engine.graphs.root("w").cancelled_at is not None
    group().__or__(shop.book.s()).delay(workflow_id="done")
    end(shop, "done", 2)
    ended = cli("workflow", "cancel", "done")
    assert (ended.code, ended.error) == (1, "not cancelled, since already ended: done")


def test_nothing_to_resume_and_no_such_workflow(cli, shop):
    chord(shop.pages, shop.book.s()).delay(workflow_id="w")
    ended = cli("workflow", "resume", "w")
    assert ended.code == 1
    assert "has no task to run again" in ended.error
    for command in ("show", "cancel", "resume"):
        ended = cli("workflow", command, "unknown")
        assert (ended.code, ended.error) == (5, "no workflow has the id unknown")


def test_a_damaged_workflow_harms_no_other(cli, shop):
    for name in ("bad", "good"):
        chord(shop.pages, shop.book.s()).delay(workflow_id=name)
    database = shop.results._database
    with database.transaction() as connection:
        connection.execute(
            "UPDATE workflow_documents SET data = x'00' WHERE workflow = 'bad' AND name = 'root'"
        )
    lines = cli("workflow", "list").out.splitlines()
    assert sorted(line.split()[:2] for line in lines[1:]) == [
        ["bad", "unreadable"],
        ["good", "started"],
    ]
    ended = cli("workflow", "show", "bad")
    assert ended.code == 1
    assert "workflow bad cannot be read" in ended.error


def heartbeat(app, *queues):
    now = time.time()
    app.results.heartbeat(WorkerRecord("w", now, now, queues, 0, 0))


def ran(app, task_id, task, state, *, generation=0, queue="default", error_type=""):
    """A run that a worker has recorded, as its row says."""
    key, at = RunKey(task_id, generation), time.time()
    app.results.start([Start(key, task, queue, 1, f"{task_id}#{generation}", "w", at)])
    settlement = DeadLetter(error_type, "") if error_type == "lost" else Complete()
    outcome = Outcome(state, settlement, b"\x01", error_type, at=at)
    assert app.results.record([Finish(key, f"{task_id}#{generation}", outcome)]) == [True]


def test_a_task_that_no_worker_has_started_says_why(cli, shop):
    page, book = shop.pages[0].task, shop.book
    mail = shop.task(name="shop.mail", queue="mail")(lambda pages: None)
    graph = group(page.si(1), page.si(2).with_options(queue="slow")) | book.s() | mail.s()
    graph.delay(workflow_id="w")
    heartbeat(shop, "default", "mail")
    shown = cli("workflow", "show", "w").out
    assert "shop.page  w.2  waiting in queue default\n" in shown
    assert "shop.page  w.3  waiting in queue slow, which no worker serves\n" in shown
    assert "shop.book  w.4  not sent\n" in shown
    lines = [json.loads(line) for line in cli("workflow", "show", "w", "--json").out.splitlines()]
    assert [each["waits"] for each in lines[1:]] == [
        "waiting in queue default",
        "waiting in queue slow, which no worker serves",
        "not sent",
        "not sent",
    ]
    for number in (2, 3):
        ran(shop, f"w.{number}", "shop.page", State.SUCCEEDED)
        end(shop, "w", number)
    assert "shop.book  w.4  waiting in queue default\n" in cli("workflow", "show", "w").out


def test_handlers_of_errors_are_shown(cli, shop):
    page, book = shop.pages[0].task, shop.book
    inner = group([page.si(1), page.si(2)], on_error=book.s())
    chain(inner, book.s(), on_error=book.s()).delay(workflow_id="w")
    shown = cli("workflow", "show", "w").out.splitlines()
    handlers = [line.strip("│├└ ") for line in shown if "on error" in line]
    assert handlers == ["on error shop.book  w.5  not sent", "on error shop.book  w.7  not sent"]
    end(shop, "w", 3)
    end(shop, "w", 4, State.FAILED)
    shown = cli("workflow", "show", "w").out
    assert "on error shop.book  w.5  waiting in queue default, which no worker serves" in shown
    assert "on error shop.book  w.7  waiting in queue default" in shown
    chain(page.si(1), on_error=book.s()).delay(workflow_id="v")
    end(shop, "v", 1)
    assert "on error shop.book  v.2  not needed" in cli("workflow", "show", "v").out


def test_a_group_of_more_than_one_row_shows_its_decision(cli, shop):
    page = shop.pages[0].task
    (group(page.si(number) for number in range(600)) | shop.book.s()).delay(workflow_id="w")
    for number in range(2, 602):
        end(shop, "w", number)
    shown = cli("workflow", "show", "w").out.splitlines()
    assert shown[2].endswith("group of 600  succeeded")


def test_explain_takes_the_id_of_a_workflow(cli, shop):
    page, book = shop.pages[0].task, shop.book
    (page.si(1) | book.s() | page.s()).delay(workflow_id="w")
    ran(shop, "w.1", "shop.page", State.SUCCEEDED)
    end(shop, "w", 1)
    ended = cli("explain", "w")
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert lines[0] == "workflow  w  started"
    texts = [line[20:].strip() for line in lines[1:]]
    assert [text.removeprefix("gap: ") for text in texts if text.startswith("gap")] == [
        "shop.book w.2: waiting in queue default, which no worker serves",
        "shop.page w.3: not sent",
    ]
    assert sum("the workflow starts, of 3 tasks" in line for line in lines) == 1
    assert any(line.endswith("shop.page w.1 succeeded") for line in lines)
    assert shop.workflows.result("w").cancel()
    assert "the workflow is cancelled" in cli("explain", "w").out
    assert cli("explain", "neither").code == 5


@pytest.mark.parametrize("state", [State.EXPIRED, State.CANCELLED])
def test_members_without_a_dead_letter_are_resumed(cli, shop, state):
    page, book = shop.pages[0].task, shop.book
    (page.si(1).with_options(expires=3600) | book.s()).delay(workflow_id="w")
    (first,) = shop.broker.receiver("default", lease=60.0).receive(1, 0.0)
    shop.broker.receiver("default", lease=60.0).settle([(first, Complete())])
    ran(shop, "w.1", "shop.page", state)
    end(shop, "w", 1, state)
    assert shop.workflows.result("w").ready()
    assert cli("workflow", "resume", "w").out == "resumed 1 task of w\n"
    (again,) = shop.broker.peek("default")
    message = shop.codec.from_envelope(again.envelope, "default")
    assert (message.id, message.generation) == ("w.1", 1)
    assert message.expires > time.time() + 3000
    ran(shop, "w.1", "shop.page", State.SUCCEEDED, generation=1)
    end(shop, "w", 1, generation=1)
    assert "shop.book  w.2  waiting" in cli("workflow", "show", "w").out
    ran(shop, "w.2", "shop.book", State.SUCCEEDED)
    end(shop, "w", 2)
    assert shop.workflows.result("w").state == "succeeded"


def test_a_cancelled_workflow_goes_on(cli, shop):
    page, book = shop.pages[0].task, shop.book
    (page.si(1) | book.s()).delay(workflow_id="w")
    assert cli("workflow", "cancel", "w").code == 0
    shop.result("w.1").cancel()
    key = RunKey("w.1")
    start = Start(key, "shop.page", "default", 1, "one#1", "w", time.time())
    assert isinstance(shop.results.start([start])[0], Cancelled)
    shop.results.record([Finish(key, "one#1", Outcome(State.CANCELLED, Complete(), at=1.0))])
    end(shop, "w", 1, State.CANCELLED)
    assert shop.workflows.result("w").state == "cancelled"
    assert cli("workflow", "resume", "w").code == 0
    assert shop.workflows.engine.graphs.root("w").cancelled_at is None
    again = replace(start, key=RunKey("w.1", 1), position=2, owner="two#1")
    assert shop.results.start([again]) == [Owned(1)], "the mark of the cancellation is gone"


def test_a_member_that_was_lost_with_its_worker_is_resumed(cli, shop):
    page = shop.pages[0].task
    (page.si(1) | shop.book.s()).delay(workflow_id="w")
    ran(shop, "w.1", "shop.page", State.FAILED, error_type="lost")
    end(shop, "w", 1, State.FAILED)
    assert cli("workflow", "resume", "w").out == "resumed 1 task of w\n"


def test_the_progress_of_a_chain_counts_its_tasks(cli, shop):
    page = shop.pages[0].task
    result = chain(*(page.si(number) for number in range(5))).delay(workflow_id="w")
    many = group(chain(page.si(1), page.si(2)) for _ in range(ASKED_CHAINS + 5)).delay()
    for number in range(1, 6):
        assert (result.progress.done, result.progress.total) == (number - 1, 5)
        ran(shop, f"w.{number}", "shop.page", State.SUCCEEDED)
        end(shop, "w", number)
    assert (result.progress.done, result.state) == (5, "succeeded")
    assert many.progress.done == 0
