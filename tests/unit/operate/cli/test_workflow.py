"""``aztask workflow``: workflows as a list and as a tree, cancelled and resumed."""

import json

import pytest

from aztask import chain, chord, group
from aztask.stores.records.base import State
from aztask.workflows.joins import TaskEnd
from aztask.workflows.place import Place


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
    place = Place.of(plan, plan.nodes[number])
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
    assert shown[-2:] == ["│ └ ... 12 more", "└ shop.book  w.24"]
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
    assert "no task among the dead letters" in ended.error
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
