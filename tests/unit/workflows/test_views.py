"""A workflow as people see it: its tree with states, and the list of workflows."""

from contextlib import closing

import pytest

from aztask import App, chain, chord, group
from aztask.errors import ForeignId
from aztask.operate import workflows as views
from aztask.settlement import Complete
from aztask.stores.records.base import Finish, Outcome, RunKey, Start, State
from aztask.stores.records.damage import Damaged
from aztask.stores.records.workflows import ROOT, DocumentChange
from aztask.workflows.joins import TaskEnd
from aztask.workflows.place import NodePlace


@pytest.fixture
def app():
    with closing(App("shop", broker="local://:memory:", results="local://:memory:")) as made:
        made.work = made.task(name="shop.work", queue="jobs")(lambda x=0: x)
        yield made


def end(app, number, state=State.SUCCEEDED, workflow="w"):
    engine = app.workflows.engine
    plan = engine.graphs.plan(workflow)
    place = NodePlace.of(plan, plan.nodes[number])
    engine.joins.ended([TaskEnd(workflow, place, 0, state, b"\x05", "OSError", "disk")])


def shown(app, workflow="w"):
    """{number: state} of all nodes."""
    found = views.view(app.workflows.engine, workflow)
    return {each.number: each.state and each.state.value for each in found.all_nodes()}


def test_an_unknown_workflow_is_none(app):
    assert views.view(app.workflows.engine, "unknown") is None


def test_a_chord_is_a_group_with_its_members_and_a_body(app):
    chord([app.work.s(1), app.work.s(2)], app.work.s()).delay(workflow_id="w")
    found = views.view(app.workflows.engine, "w")
    assert (found.workflow, found.root.state) == ("w", State.STARTED)
    group_node, body = found.nodes
    assert (group_node.task, body.task, body.queue) == ("", "shop.work", "jobs")
    assert [[each.task_id for each in member] for member in group_node.members] == [
        ["w.2"], ["w.3"],
    ]  # fmt: skip
    assert body.members == ()
    numbers = [each.number for each in found.all_nodes()]
    assert numbers == [group_node.number, 2, 3, body.number], "a group comes before its members"


def test_states_come_from_the_bits_where_the_tasks_have_no_results(app):
    chord([app.work.s(1), app.work.s(2)], app.work.s()).delay(workflow_id="w")
    assert set(shown(app).values()) == {None}
    end(app, 2)
    assert shown(app) == {1: None, 2: "succeeded", 3: None, 4: None}
    end(app, 3)
    assert shown(app) == {1: "succeeded", 2: "succeeded", 3: "succeeded", 4: None}
    end(app, 4)
    assert shown(app)[4] == "succeeded"


def test_a_failed_member_says_why_and_its_group_has_failed(app):
    chord([app.work.s(1), app.work.s(2)], app.work.s()).delay(workflow_id="w")
    end(app, 2, State.FAILED)
    end(app, 3)
    nodes = {each.number: each for each in views.view(app.workflows.engine, "w").all_nodes()}
    assert (nodes[2].state, nodes[2].failure.error) == (State.FAILED, "disk")
    assert nodes[3].failure is None
    assert (nodes[1].state, nodes[1].failure) == (State.FAILED, None)


def test_the_steps_of_a_chain_before_the_last_that_ended_have_succeeded(app):
    chain(app.work.s(1), app.work.s(), app.work.s()).delay(workflow_id="w")
    first, second, third = sorted(shown(app))
    end(app, first)
    end(app, second, State.FAILED)
    assert shown(app) == {first: "succeeded", second: "failed", third: None}


def test_the_result_of_a_task_says_more_than_its_bit(app):
    group(app.work.s(1), app.work.s(2)).delay(workflow_id="w")
    number = min(
        each.number for each in views.view(app.workflows.engine, "w").all_nodes() if each.task
    )
    run = RunKey(f"w.{number}")
    app.results.start([Start(run, "shop.work", "jobs", 1, "o", "worker", 50.0)])
    nodes = {each.number: each for each in views.view(app.workflows.engine, "w").all_nodes()}
    assert (nodes[number].state, nodes[number].started_at) == (State.STARTED, 50.0)
    assert nodes[number].ended_at is None
    outcome = Outcome(State.SUCCEEDED, Complete(), at=60.0)
    app.results.record([Finish(run, "o", outcome)])
    nodes = {each.number: each for each in views.view(app.workflows.engine, "w").all_nodes()}
    assert (nodes[number].state, nodes[number].ended_at) == (State.SUCCEEDED, 60.0)


def test_of_a_large_workflow_few_results_are_asked_for(app, monkeypatch):
    monkeypatch.setattr(views, "ASKED", 2)
    group(*(app.work.s(n) for n in range(5))).delay(workflow_id="w")
    asked = []
    get_many = app.results.get_many
    monkeypatch.setattr(
        app.results, "get_many", lambda task_ids: (asked.extend(task_ids), get_many(task_ids))[1]
    )
    shown(app)
    assert len(asked) == 2


# -- the list --------------------------------------------------------------------------------------


def listed(app, limit=10, state=None):
    return [name for name, _ in views.summaries(app.workflows.engine, limit, state)]


def test_open_workflows_come_first_the_newest_before_older_ones(app, monkeypatch):
    store = app.workflows.engine.store
    for name in ("a", "b", "c"):
        group(app.work.s(1), app.work.s(2)).delay(workflow_id=name)
    for number in (2, 3):
        end(app, number, workflow="c")
    ages = {"a": 1.0, "b": 2.0, "c": 3.0}
    all_workflows = store.all_workflows
    monkeypatch.setattr(
        store,
        "all_workflows",
        lambda limit: [_aged(each, ages) for each in [*all_workflows(limit)] * 2],
    )
    assert listed(app) == ["b", "a", "c"], "each of them once"
    assert listed(app, 2) == ["b", "a"]
    assert listed(app, state="started") == ["b", "a"]
    assert listed(app, state="succeeded") == ["c"]
    assert listed(app, state="failed") == []


def _aged(each, ages):
    return type(each)(each.workflow, ages[each.workflow], each.ended_at)


def test_a_workflow_that_cannot_be_read_is_in_the_list(app):
    group(app.work.s(1), app.work.s(2)).delay(workflow_id="a")
    store = app.workflows.engine.store
    (found,) = store.read([("a", ROOT)])
    assert store.write([DocumentChange("a", ROOT, b"\xc1", found.tag)]) != [None]
    for state in (None, "failed"):
        ((name, what),) = views.summaries(app.workflows.engine, 10, state)
        assert name == "a"
        assert isinstance(what, Damaged)


# -- large workflows, and what other owners have ---------------------------------------------------


def test_a_group_of_several_rows_shows_the_bits_of_each(app, monkeypatch):
    monkeypatch.setattr("aztask.workflows.plan.BLOCK", 2)
    chord([app.work.s(n) for n in range(4)], app.work.s()).delay(workflow_id="w")
    for number in (3, 4):
        end(app, number)
    assert shown(app) == {1: None, 2: None, 3: "succeeded", 4: "succeeded", 5: None, 6: None}


def test_steps_of_members_come_in_the_order_in_which_they_run(app):
    group(chain(app.work.s(1), app.work.s()), app.work.s(2)).delay(workflow_id="w")
    found = views.view(app.workflows.engine, "w")
    (outer,) = found.nodes
    numbers = [[each.number for each in member] for member in outer.members]
    assert [len(member) for member in numbers] == [2, 1]
    assert numbers[0] == sorted(numbers[0])
    assert [each.number for each in found.all_nodes()] == [outer.number, *numbers[0], *numbers[1]]


def test_a_failed_step_says_why_and_the_group_behind_it_nothing(app):
    chain(app.work.s(1), group(app.work.s(), app.work.s())).delay(workflow_id="w")
    end(app, 1, State.FAILED)
    first, *rest = views.view(app.workflows.engine, "w").all_nodes()
    assert (first.state, first.failure.error_type) == (State.FAILED, "OSError")
    assert {(each.state, each.failure) for each in rest} == {(None, None)}


def test_a_task_without_an_outcome_has_no_end(app):
    group(app.work.s(1), app.work.s(2)).delay(workflow_id="w")
    nodes = {each.number: each for each in views.view(app.workflows.engine, "w").all_nodes()}
    assert [(each.started_at, each.ended_at) for each in nodes.values()] == [(None, None)] * 3
    assert [nodes[number].task_id for number in (2, 3)] == ["w.2", "w.3"]


def test_two_hundred_tasks_are_asked_for(app):
    group(*(app.work.s(n) for n in range(202))).delay(workflow_id="w")
    asked = []
    get_many = app.results.get_many
    app.results.get_many = lambda task_ids: (asked.extend(task_ids), get_many(task_ids))[1]
    shown(app)
    assert len(asked) == 200
    assert "w.1" not in asked, "a group has no result"


def test_the_list_is_as_long_as_it_is_asked_for(app):
    for name in ("a", "b", "c"):
        group(app.work.s(1), app.work.s(2)).delay(workflow_id=name)
    assert len(listed(app, 2)) == 2
    assert len(listed(app, 3)) == len(listed(app, 9)) == 3
    assert listed(app, 0) == []


def test_those_of_other_owners_and_damaged_ones_take_their_places_once(app, monkeypatch):
    for name in ("a", "b", "c"):
        group(app.work.s(1), app.work.s(2)).delay(workflow_id=name)
    engine = app.workflows.engine
    (found,) = engine.store.read([("b", ROOT)])
    assert engine.store.write([DocumentChange("b", ROOT, b"\xc1", found.tag)]) != [None]
    roots = engine.graphs.roots

    def foreign(names):
        if "a" in names:
            raise ForeignId("workflow a belongs to another app")
        return roots(names)

    monkeypatch.setattr(engine.graphs, "roots", foreign)
    once = engine.store.all_workflows
    monkeypatch.setattr(engine.store, "all_workflows", lambda limit: [*once(limit)] * 2)
    found = dict(views.summaries(engine, 9))
    assert {name: type(what).__name__ for name, what in found.items()} == {
        "a": "ForeignId", "b": "Damaged", "c": "Root",
    }  # fmt: skip
    assert len(list(views.summaries(engine, 9))) == 3
    assert sorted(name for name, _ in views.summaries(engine, 9, "started")) == ["b", "c"]
    assert [name for name, _ in views.summaries(engine, 9, "failed")] == ["b"]
    assert len(list(views.summaries(engine, 2))) == 2


def test_a_workflow_that_is_deleted_while_the_list_is_made_is_not_in_it(app, monkeypatch):
    group(app.work.s(1), app.work.s(2)).delay(workflow_id="a")
    engine = app.workflows.engine
    monkeypatch.setattr(engine.graphs, "root", lambda name: None)
    monkeypatch.setattr(engine.graphs, "roots", lambda names: [None for _ in names])
    assert listed(app) == []
    assert views.view(engine, "a") is None
