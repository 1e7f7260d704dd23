"""What a task of a workflow gets as its first argument, whatever is stored."""

from contextlib import closing

import msgpack
import pytest

from aztask import App, TaskCancelled, TaskExpired, TaskFailed, chain, chord, group
from aztask.message.codec import Codec
from aztask.settlement import Complete
from aztask.stores.records.base import Finish, Outcome, RunKey, Start, State
from aztask.stores.records.damage import Damaged
from aztask.stores.records.workflows import DocumentChange
from aztask.workflows.bits import NIL, Decision, Failure, Join, OfJoin, ParkedValue
from aztask.workflows.edits import join_name, row_name
from aztask.workflows.inputs import Input, first_argument
from aztask.workflows.joins import TaskEnd
from aztask.workflows.packing import pack_join, pack_values
from aztask.workflows.place import NodePlace
from aztask.workflows.rows import empty_row


@pytest.fixture
def app():
    with closing(App("shop", broker="local://:memory:", results="local://:memory:")) as made:
        made.work = made.task(name="shop.work")(lambda x=0: x)
        yield made


def end(app, number, state=State.SUCCEEDED, value=b"\x05", error="disk"):
    engine = app.workflows.engine
    plan = engine.graphs.plan("w")
    place = NodePlace.of(plan, plan.nodes[number])
    engine.joins.ended([TaskEnd("w", place, 0, state, value, "OSError", error)])


def record(app, number, state=State.SUCCEEDED, value=b"\x05", generation=0):
    key = RunKey(f"w.{number}", generation)
    owner = f"o{generation}"
    app.results.start([Start(key, "shop.work", "default", number, owner, "w", 1.0)])
    app.results.record([Finish(key, owner, Outcome(state, Complete(), value, at=2.0))])


def given(app, number):
    """The input of a node, by its place."""
    engine = app.workflows.engine
    plan = engine.graphs.plan("w")
    return engine.inputs.load("w", NodePlace.of(plan, plan.nodes[number]))


def put(app, name, data):
    """Store a document in the place of the one that is there."""
    store = app.workflows.engine.store
    (known,) = store.read([("w", name)])
    tag = None if known is None else known.tag
    assert store.write([DocumentChange("w", name, data, tag)]) != [None]


# -- of a task -------------------------------------------------------------------------------------


def test_the_first_success_of_a_task_counts_so_that_a_replay_changes_nothing(app):
    chain(app.work.s(1), app.work.s()).delay(workflow_id="w")
    assert given(app, 1) is None
    with pytest.raises(Damaged, match=r"task w\.1 is no longer in the result store"):
        given(app, 2)
    record(app, 1, State.FAILED, None)
    with pytest.raises(Damaged, match="no longer in the result store"):
        given(app, 2)
    record(app, 1, value=b"\x07", generation=1)
    assert given(app, 2) == Input(b"\x07")
    record(app, 1, value=b"\x08", generation=2)
    assert given(app, 2) == Input(b"\x07")


def test_a_task_without_a_value_gives_nothing(app):
    chain(app.work.s(1), app.work.s()).delay(workflow_id="w")
    record(app, 1, value=None)
    assert given(app, 2) == Input(NIL) == Input(b"\xc0")


# -- of a group ------------------------------------------------------------------------------------


def test_a_group_gives_its_values_in_order(app):
    chord([app.work.s(n) for n in range(3)], app.work.s()).delay(workflow_id="w")
    for number, value in ((4, b"\x04"), (2, b"\x02"), (3, b"\x03")):
        end(app, number, value=value)
    found = given(app, 5)
    assert (msgpack.unpackb(found.value), found.failures) == ([2, 3, 4], ())
    assert found.value[:3] == b"\xdc\x00\x03"
    assert found.packet() == [found.value, []]


def test_a_group_that_passes_errors_names_each_failure_and_its_place(app):
    graph = chord([app.work.s(n) for n in range(3)], app.work.s(), return_errors=True)
    graph.delay(workflow_id="w")
    end(app, 2, State.FAILED)
    end(app, 3)
    end(app, 4, State.CANCELLED, error="stopped")
    found = given(app, 5)
    assert msgpack.unpackb(found.value) == [None, 5, None]
    assert found.failures == (
        (0, 2, "failed", "OSError", "disk"), (2, 4, "cancelled", "OSError", "stopped"),
    )  # fmt: skip
    assert found.packet() == [found.value, [list(each) for each in found.failures]]


def test_an_empty_group_gives_an_empty_list(app):
    chain(app.work.s(1), group(), app.work.s()).delay(workflow_id="w")
    end(app, 1)
    plan = app.workflows.engine.graphs.plan("w")
    last = max(node.number for node in plan.nodes if node.task)
    assert msgpack.unpackb(given(app, last).value) == []


def test_groups_in_groups_give_lists_in_lists(app):
    inner = [group(app.work.s(1), app.work.s(2)), chain(app.work.s(3), app.work.s())]
    chord(inner, app.work.s()).delay(workflow_id="w")
    plan = app.workflows.engine.graphs.plan("w")
    tasks = [node for node in plan.nodes if node.task]
    for node in tasks[:-1]:
        end(app, node.number, value=bytes([node.number]))
    inner_group = next(node for node in plan.nodes if not node.task and node.slot == (1, 0))
    members = [node.number for node in tasks if node.slot and node.slot.join == inner_group.number]
    last = [node.number for node in tasks if node.slot == (1, 1)][-1]
    found = given(app, tasks[-1].number)
    assert msgpack.unpackb(found.value) == [members, last]


def test_the_value_of_a_workflow_is_that_of_its_root(app):
    result = chain(app.work.s(1)).delay(workflow_id="w")
    end(app, 1, value=b"\x09")
    assert app.workflows.engine.inputs.value("w", 0) == Input(b"\x09")
    assert result.get(timeout=0) == 9


# -- of a failure ----------------------------------------------------------------------------------


def test_a_handler_gets_a_map_for_each_failure(app):
    graph = chord([app.work.s(1), app.work.s(2)], app.work.s(), on_error=app.work.s())
    graph.delay(workflow_id="w")
    end(app, 2, State.FAILED)
    plan = app.workflows.engine.graphs.plan("w")
    handler = plan.nodes[1].on_error or plan.nodes[0].on_error
    with pytest.raises(Damaged, match="has not ended"):
        given(app, handler)
    end(app, 3, State.EXPIRED, error="late")
    assert msgpack.unpackb(given(app, handler).value) == [
        {"task_id": "w.2", "state": "failed", "error_type": "OSError", "error": "disk"},
        {"task_id": "w.3", "state": "expired", "error_type": "OSError", "error": "late"},
    ]


def test_the_handler_of_a_group_of_several_rows_gets_the_decision_of_its_join(app, monkeypatch):
    monkeypatch.setattr("aztask.workflows.plan.BLOCK", 2)
    graph = chord([app.work.s(n) for n in range(4)], app.work.s(), on_error=app.work.s())
    graph.delay(workflow_id="w")
    for number in (2, 3, 4):
        end(app, number)
    plan = app.workflows.engine.graphs.plan("w")
    handler = plan.nodes[1].on_error or plan.nodes[0].on_error
    end(app, 5, State.FAILED)
    (found,) = msgpack.unpackb(given(app, handler).value)
    assert found["task_id"] == "w.5"


def test_errors_stand_in_the_place_of_the_values_that_are_missing():
    codec = Codec()
    value = codec.encode_value([None, 1, None, None])
    failures = [
        [0, 2, "failed", "OSError", "disk"], [2, 4, "cancelled", "", ""], [3, 5, "expired", "", ""],
    ]  # fmt: skip
    failed, one, cancelled, expired = first_argument(codec, value, failures)
    assert one == 1
    assert type(failed) is TaskFailed
    assert "OSError" in str(failed)
    assert "disk" in str(failed)
    assert (type(cancelled), type(expired)) == (TaskCancelled, TaskExpired)
    assert first_argument(codec, codec.encode_value("x"), ()) == "x"


# -- what is damaged -------------------------------------------------------------------------------


@pytest.fixture
def pair(app):
    """A chord of two members, whose row the tests write themselves."""
    chord([app.work.s(1), app.work.s(2)], app.work.s()).delay(workflow_id="w")
    return app


def row(*values):
    found = empty_row(2)
    plain = TaskEnd("w", NodePlace(2, (1, 0), 2), 0, State.SUCCEEDED).end()
    for index, value in enumerate(values):
        found.set(index, plain, value)
    return found.pack()


def test_a_row_that_is_missing_or_damaged_is_no_input(pair):
    with pytest.raises(Damaged):
        given(pair, 4)
    put(pair, row_name(1, 0), b"\xc1")
    with pytest.raises(Damaged):
        given(pair, 4)


def test_a_value_in_a_document_is_read_from_its_place(pair):
    put(pair, "values-a", pack_values([(b"\x01", None), (b"\x02", None)]))
    put(pair, row_name(1, 0), row(ParkedValue("values-a", 1), ParkedValue("values-a", 0)))
    assert msgpack.unpackb(given(pair, 4).value) == [2, 1]


def test_a_value_that_its_document_does_not_have_is_damaged(pair):
    put(pair, "values-a", pack_values([(b"\x01", None)]))
    put(pair, row_name(1, 0), row(ParkedValue("values-a", 0), ParkedValue("values-a", 1)))
    with pytest.raises(Damaged, match="a document of values holds too few"):
        given(pair, 4)
    put(pair, row_name(1, 0), row(b"\x01", ParkedValue("values-missing", 0)))
    with pytest.raises(Damaged):
        given(pair, 4)


def test_a_member_without_a_value_gives_nothing(pair):
    put(pair, row_name(1, 0), row(b"\x01"))
    assert msgpack.unpackb(given(pair, 4).value) == [1, None]


def test_a_value_that_refers_to_an_unknown_group_is_damaged(pair):
    nodes = len(pair.workflows.engine.graphs.plan("w").nodes)
    for join in (nodes, 999):
        put(pair, row_name(1, 0), row(b"\x01", OfJoin(join)))
        with pytest.raises(Damaged, match="no longer exists"):
            given(pair, 4)


def test_groups_that_refer_to_each_other_are_damaged(pair):
    put(pair, row_name(1, 0), row(b"\x01", OfJoin(1)))
    with pytest.raises(Damaged, match="refer to each other in a circle"):
        given(pair, 4)


def test_a_row_of_values_that_holds_too_few_is_damaged(app, monkeypatch):
    monkeypatch.setattr("aztask.workflows.plan.BLOCK", 2)
    chord([app.work.s(n) for n in range(3)], app.work.s()).delay(workflow_id="w")
    decision = Decision(State.SUCCEEDED, 0, 5.0, values=("row-a", "row-b"))
    put(app, join_name(1), pack_join(Join([None, None], decision)))
    put(app, "row-a", pack_values([(b"\x01", None), (b"\x02", Failure(3, State.FAILED))]))
    with pytest.raises(Damaged):
        given(app, 5)
    put(app, "row-b", pack_values([]))
    with pytest.raises(Damaged, match="a document of values holds too few"):
        given(app, 5)
    put(app, "row-b", pack_values([(b"\x03", None)]))
    found = given(app, 5)
    assert msgpack.unpackb(found.value) == [1, 2, 3]
    assert [failure[:2] for failure in found.failures] == [(1, 3)]


def test_the_decision_of_a_large_group_that_is_missing_is_damaged(app, monkeypatch):
    monkeypatch.setattr("aztask.workflows.plan.BLOCK", 2)
    chord([app.work.s(n) for n in range(3)], app.work.s()).delay(workflow_id="w")
    with pytest.raises(Damaged, match="node 1 of workflow w has not ended"):
        given(app, 5)
    put(app, join_name(1), pack_join(Join([None, None])))
    with pytest.raises(Damaged, match="node 1 of workflow w has not ended"):
        given(app, 5)
