"""What an end sets off: the documents it writes, and how long it waits for other writers."""

from contextlib import closing
from types import SimpleNamespace

import pytest
from still import Still

from aztask import App, chain, chord, group
from aztask.settlement import Complete
from aztask.stores.records.base import Finish, Outcome, RunKey, Start, State
from aztask.stores.records.damage import Damaged
from aztask.stores.records.workflows import DocumentChange
from aztask.support.clock import Clock
from aztask.workflows import graph
from aztask.workflows.bits import Decision, Failure, Join
from aztask.workflows.compiler import compile_graph
from aztask.workflows.documents import Documents, Pace
from aztask.workflows.edits import NEARLY_FULL, join_name, row_name, values_name
from aztask.workflows.engine import engine_for
from aztask.workflows.graph import Graphs
from aztask.workflows.joins import TaskEnd
from aztask.workflows.packing import pack_join, read_values
from aztask.workflows.place import NodePlace
from aztask.workflows.plan import RUN, Layout
from aztask.workflows.result import forget
from aztask.workflows.rows import read_row
from aztask.workflows.starting import WorkflowLauncher


@pytest.fixture
def app():
    with closing(App("shop", broker="local://:memory:", results="local://:memory:")) as made:
        made.work = made.task(name="shop.work")(lambda x=0: x)
        yield made


def end(app, number, value=b"\x05"):
    engine = app.workflows.engine
    plan = engine.graphs.plan("w")
    place = NodePlace.of(plan, plan.nodes[number])
    engine.joins.ended([TaskEnd("w", place, 0, State.SUCCEEDED, value)])


def test_a_join_of_one_row_has_no_document_beside_it(app):
    chord([app.work.s(1), app.work.s(2)], app.work.s()).delay(workflow_id="w")
    end(app, 2)
    end(app, 3)
    store = app.workflows.engine.store
    found = store.read([("w", row_name(1, 0)), ("w", join_name(1)), ("w", "row-1-0-0")])
    assert [each is None for each in found] == [False, True, True]


def test_the_first_ends_of_a_large_group_wait_for_other_writers_and_the_last_do_not(app):
    size = NEARLY_FULL + 4
    group(*(app.work.s(n) for n in range(size))).delay(workflow_id="w")
    engine, slept = app.workflows.engine, []
    pace = Pace(Still())
    engine.joins.documents = Documents(
        engine.store, remote=True, clock=Clock(sleep=slept.append), pace=pace
    )
    waited = []
    tasks = [node.number for node in engine.graphs.plan("w").nodes if node.task]
    for number in tasks:
        pace.met()
        slept.clear()
        end(app, number)
        waited.append(bool(slept))
    assert waited == [True] * 4 + [False] * NEARLY_FULL


def test_an_input_that_no_node_makes_is_damaged(app):
    group(app.work.s(1), app.work.s(2)).delay(workflow_id="w")
    engine = app.workflows.engine
    assert engine.inputs.load("w", NodePlace(1)) is None
    for takes in (len(engine.graphs.plan("w").nodes), 999):
        with pytest.raises(Damaged, match="no longer exists"):
            engine.inputs.load("w", NodePlace(1, takes=takes))
    with pytest.raises(Damaged, match="no longer exists"):
        engine.inputs.load("unknown", NodePlace(1, takes=0))


def test_a_group_that_has_not_ended_has_no_value(app):
    group(app.work.s(1), app.work.s(2)).delay(workflow_id="w")
    with pytest.raises(Damaged):
        app.workflows.engine.inputs.value("w", 0)


def test_messages_are_stored_in_parts_of_bounded_size(app, monkeypatch):
    monkeypatch.setattr(graph, "PART_BYTES", 3_000)
    pair = app.task(name="shop.pair")(lambda one, two: one)
    calls = [pair.s("x" * 1_000) for _ in range(6)]
    chain(app.work.s(1), group(*calls), app.work.s()).delay(workflow_id="w")
    engine = app.workflows.engine
    root = engine.graphs.root("w")
    assert len(root.parts) >= 3
    nodes = [node.number for node in engine.graphs.plan("w").nodes if node.task]
    assert sorted(engine.graphs.messages("w", root, nodes)) == nodes
    for nothing in ([999], [0]):
        with pytest.raises(Damaged, match="are missing"):
            engine.graphs.messages("w", root, nothing)


def test_a_plan_that_cannot_be_read_is_damaged(app):
    result = group(app.work.s(1), app.work.s(2)).delay(workflow_id="w")
    engine = app.workflows.engine
    root = engine.graphs.root("w")
    name = f"plan-{root.token}"
    (found,) = engine.store.read([("w", name)])
    assert engine.store.write([DocumentChange("w", name, b"damaged", found.tag)]) != [None]
    other = Graphs(engine.store, Clock())
    with pytest.raises(Damaged, match="the plan of workflow w cannot be read"):
        other.plan("w")
    assert other.plan("unknown") is None
    assert result.state == "started"


class Remote:
    """A result store, as it is where it is reached over a network."""

    remote = True

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)


@pytest.mark.parametrize("remote", [False, True])
def test_forget_deletes_the_results_of_all_tasks(app, remote):
    chord([app.work.s(1), app.work.s(2)], app.work.s()).delay(workflow_id="w")
    for number in (2, 3, 4):
        run = RunKey(f"w.{number}")
        app.results.start([Start(run, "shop.work", "default", number, "o", "w", 1.0)])
        app.results.record(
            [Finish(run, "o", Outcome(State.SUCCEEDED, Complete(), b"\x05", at=2.0))]
        )
        end(app, number)
    engine = app.workflows.engine
    if remote:
        engine.results = Remote(engine.results)
    assert forget(engine, "w")
    assert [app.results.get(f"w.{number}") for number in (2, 3, 4)] == [None] * 3
    assert not forget(engine, "w")


@pytest.mark.parametrize(("size", "made"), [(RUN, True), (RUN - 1, False)])
def test_in_a_remote_store_the_rows_of_a_large_group_are_made_with_it(app, size, made):
    engine = app.workflows.engine
    engine.results = Remote(engine.results)
    calls = group(*(app.work.s(n) for n in range(size)))
    compiled = compile_graph(calls, lambda signature: "default", blocked=False)
    sender = SimpleNamespace(
        name="me",
        root_id=None,
        parent_id=None,
        headers_of=lambda node: {},
        session_of=lambda *_: (None, True),
        lease_of=lambda queue: None,
    )
    starter = WorkflowLauncher(engine, app.broker, app.codec, Clock())
    assert starter.start("w", compiled, sender)
    rows = [("w", row_name(node.number, 0)) for node in compiled.plan.nodes if node.size == size]
    found = [each for each in engine.store.read(rows) if each is not None]
    assert bool(found) == made
    assert [read_row(each.data, size).ended for each in found] == [0] * len(found)


def test_a_store_that_keeps_no_workflows_has_no_engine(app):
    assert engine_for(None, app.workflows, app.codec) is None
    assert engine_for(object(), app.workflows, app.codec) is None
    assert engine_for(app.results, app.workflows, app.codec) is not None


@pytest.fixture
def large(app):
    """A group whose bits need two rows: its engine, its join, and the members of its first row."""
    size = next(n for n in range(1, 100_000) if Layout(n, True).rows > 1)
    group(*(app.work.s(n) for n in range(size))).delay(workflow_id="w")
    engine = app.workflows.engine
    (join,) = [node for node in engine.graphs.plan("w").nodes if node.size == size]
    assert join.rows == 2
    return engine, join, list(join.layout.members(0))


def test_a_full_row_leaves_one_document_with_all_values_and_failures(large, app):
    engine, join, members = large
    plan = engine.graphs.plan("w")
    tasks = {node.slot.member: node for node in plan.nodes if node.task and node.slot}
    long = b"\xc5\xff\xff" + bytes(65_535)
    values = [b"\x05"] * len(members)
    values[1] = long
    ends = [
        TaskEnd("w", NodePlace.of(plan, tasks[member]), 0, State.SUCCEEDED, value)
        for member, value in zip(members, values, strict=True)
    ]
    ends[2] = ends[2]._replace(state=State.FAILED, error_type="OSError", error="disk")
    engine.joins.ended(ends)
    (document,) = engine.store.read([("w", values_name(join.number, 0, 0))])
    found = read_values(document.data)
    assert found[1] == (long, None)
    failure = Failure(tasks[members[2]].number, State.FAILED, "OSError", "disk")
    assert found[2] == (None, failure)
    assert found[3:] == [(b"\x05", None)] * (len(members) - 3)


def test_a_large_group_whose_decision_names_too_few_documents_is_damaged(large):
    engine, join, _ = large
    for names in ((), ("row-1-0-0",), ("a", "b", "c")):
        made = Join([None] * join.rows, Decision(State.SUCCEEDED, 0, 5.0, values=names))
        name = join_name(join.number)
        (known,) = engine.store.read([("w", name)])
        tag = None if known is None else known.tag
        assert engine.store.write([DocumentChange("w", name, pack_join(made), tag)]) != [None]
        with pytest.raises(Damaged, match="names no values"):
            engine.inputs.value("w", join.number)
