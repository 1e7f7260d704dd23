"""Compiled graphs: whatever the order of their tasks, they mean what the nested graph means."""

import random
from collections import Counter

import pytest
from graphinterpreter import FAILED, FakeTask, Interpreter, evaluate
from hypothesis import given, settings
from hypothesis import strategies as st

from aztask.errors import ConfigurationError, DecodeError
from aztask.workflows import plan as plans
from aztask.workflows.compiler import DEPTH, compile_graph
from aztask.workflows.graphs import Chain, Chord, Group, chain, chord, group
from aztask.workflows.place import NodePlace
from aztask.workflows.plan import GraphPlan, JoinSlot, Layout, task_id_of, unpack

TASKS = [FakeTask(f"t{n}") for n in range(6)]
SIGNATURES = st.builds(
    lambda task, number, immutable: task.si(number) if immutable else task.s(number),
    st.sampled_from(TASKS),
    st.integers(0, 9),
    st.booleans(),
)
HANDLER = st.none() | st.just(FakeTask("alarm").s())


def larger(parts):
    lists = st.lists(parts, max_size=4).map(tuple)
    return (
        st.builds(Chain, lists.filter(bool), HANDLER)
        | st.builds(Group, lists, HANDLER)
        | st.builds(Chord, st.builds(Group, lists), parts, st.booleans(), HANDLER)
    )


GRAPHS = st.recursive(SIGNATURES, larger, max_leaves=25)


def compiled(graph):
    return compile_graph(graph, lambda signature: "default")


@settings(max_examples=300, deadline=None)
@given(GRAPHS, st.sets(st.sampled_from([task.name for task in TASKS]), max_size=2), st.integers())
def test_a_plan_means_what_its_graph_means(graph, failing, seed):
    found = compiled(graph)
    run = Interpreter(found.plan, found.signatures, failing, random.Random(seed))
    assert run.run() == evaluate(graph, failing)
    again = unpack(found.plan.pack())
    assert again == found.plan
    handled = Counter(run.ran)["alarm"]
    assert (handled > 0) <= bool(failing), "a handler runs only after a failure"


@settings(max_examples=100, deadline=None)
@given(GRAPHS)
def test_every_slot_is_filled_by_nodes_in_their_order(graph):
    plan = compiled(graph).plan
    for slot, nodes in plan.in_slots.items():
        numbers = [node.number for node in nodes]
        assert numbers == sorted(numbers)
        assert slot.member < plan.nodes[slot.join].size
        assert not nodes[-1].next, "the last node of a slot fills it"
        assert all(node.next for node in nodes[:-1])
    for node in plan.nodes[1:]:
        if node.task:
            assert NodePlace.read(str(NodePlace.of(plan, node))) == NodePlace.of(plan, node)


def test_a_chord_is_a_group_followed_by_a_task():
    a, b, c = TASKS[:3]
    one = compiled(group(a.s(1), b.s(2)) | c.s())
    two = compiled(chord([a.s(1), b.s(2)], c.s()))
    assert one.plan == two.plan
    root, join, first, second, body = one.plan.nodes
    assert (root.size, root.single, join.size, join.next) == (1, True, 2, (4,))
    assert [first.slot, second.slot, body.slot] == [JoinSlot(1, 0), JoinSlot(1, 1), JoinSlot(0, 0)]
    assert (body.takes, one.plan.entries, one.plan.tasks) == (1, (2, 3), 3)


def test_a_task_followed_by_a_group_feeds_every_member():
    a, b, c = TASKS[:3]
    plan = compiled(a.s() | group(b.s(), c.si())).plan
    assert plan.nodes[1].next == (3, 4)
    assert (plan.nodes[3].takes, plan.nodes[4].takes) == (1, None)


def test_an_empty_group_is_started_itself():
    a = TASKS[0]
    plan = compiled(chain(group(), a.s())).plan
    assert plan.entries == (1,)
    found = compiled(chord([], a.s()))
    run = Interpreter(found.plan, found.signatures, (), random.Random(1))
    assert run.run() == "t0([])"


def test_a_handler_gets_the_failures_of_its_own_part():
    a, alarm = TASKS[0], FakeTask("alarm")
    plan = compiled(chain(a.s(), group(a.s(), on_error=alarm.s()))).plan
    handler = next(node for node in plan.nodes if node.task == "alarm")
    scope = plan.nodes[handler.takes]
    assert (scope.on_error, scope.single, handler.slot) == (handler.number, True, None)
    assert NodePlace.of(plan, handler).takes_errors
    whole = compiled(chain(a.s(), a.s(), on_error=alarm.si())).plan
    assert whole.nodes[0].on_error == 3
    assert whole.nodes[3].takes is None


def test_arguments_are_checked_with_the_value_that_will_come():
    class Strict(FakeTask):
        def check_arguments(self, args, kwargs):
            if len(args) != 1:
                raise TypeError(f"{self.name}() takes 1 argument, not {len(args)}")

    one = Strict("one")
    compiled(one.s(1) | one.s() | one.si(2))
    for wrong in (one.s(), one.s(1) | one.s(2), one.s(1) | one.si()):
        with pytest.raises(TypeError, match="takes 1 argument"):
            compiled(wrong)


def test_graphs_that_are_too_deep_or_too_large_are_refused(monkeypatch):
    graph = TASKS[0].s()
    for _ in range(DEPTH + 1):
        graph = group(graph)
    with pytest.raises(ConfigurationError, match="nested at most 100"):
        compiled(graph)
    compiled(chain(*[TASKS[0].s()] * 5000))
    monkeypatch.setattr("aztask.workflows.compiler.NODES", 3)
    with pytest.raises(ConfigurationError, match="at most 3 nodes"):
        compiled(chain(*[TASKS[0].s()] * 3))


def test_ten_thousand_members_are_few_bytes():
    plan = compiled(chord([TASKS[0].s(n) for n in range(10_000)], TASKS[1].s())).plan
    assert len(plan.pack()) < 50_000
    assert plan.nodes[1].rows == 20
    assert [Layout(size).rows for size in (0, 127, 128, 512, 5000)] == [1, 1, 2, 4, 10]
    assert task_id_of("order", 7) == "order.7"


def packed(*value):
    return plans.zlib.compress(plans.msgpack.packb(value))


ROOT = [0, [], None, [], 1, 0, None]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        compiled(TASKS[0].s()).plan.pack()[:-3],
        plans.zlib.compress(b"\x93"),
        packed([["a", "q"]], [7], [ROOT]),
        packed([["", ""]], [0], [[0, [0, 3], None, [], 1, 0, None]]),
        packed([["", ""]], [0], [[0, [], None, [], -1, 0, None]]),
        packed([["", ""]], [0], [[0, [], None, [[0, 2]], 1, 0, None]]),
        packed([["", ""]], [0], [ROOT, ROOT]),
        packed([[1, 2]], [0], [ROOT]),
        packed(5),
    ],
    ids=range(11),
)
def test_a_damaged_plan_is_refused(data):
    with pytest.raises(ValueError):
        unpack(data)
    assert unpack(GraphPlan((), ()).pack()) == GraphPlan((), ())


@pytest.mark.parametrize(
    "text", ["", "x", "1", "1:2:3:4:5", "1:2:4:4::", "1:2:3::5:", "1:::x:", "1::::5:q", "١:::::"]
)
def test_a_place_that_no_compiler_writes_is_refused(text):
    with pytest.raises(DecodeError):
        NodePlace.read(text)


def test_failures_stay_in_their_place_where_errors_are_returned():
    a, b, c = TASKS[:3]
    graph = chord([a.s(1), b.s(2)], c.s(), return_errors=True)
    found = compiled(graph)
    run = Interpreter(found.plan, found.signatures, {"t0"}, random.Random(1))
    assert run.run() == f"t2(['{FAILED}', 't1(2)'])".replace(f"'{FAILED}'", repr(FAILED))


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 512, 513, 1500])
def test_a_layout_has_one_place_for_each_member(size, blocked):
    layout = Layout(size, blocked)
    members = list(range(size))
    places = {layout.place(member) for member in members}
    assert len(places) == size
    assert sum(layout.row_size(row) for row in range(layout.rows)) == size
    for row in range(layout.rows):
        assert len(layout.members(row)) == layout.row_size(row) <= 512
        for index, member in enumerate(layout.members(row)):
            assert layout.place(member) == (row, index)


def test_sixteen_neighbours_are_in_one_row_or_two():
    layout = Layout(10_000)
    for first in range(0, 10_000, 7):
        rows = {layout.place(n)[0] for n in range(first, min(first + 16, 10_000))}
        assert len(rows) <= 2
    assert layout.place(0)[0] != layout.place(16)[0] != layout.place(32)[0], "runs take turns"
