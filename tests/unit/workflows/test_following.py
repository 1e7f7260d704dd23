"""What follows an end: successors, decisions, handlers and the end of the workflow, each once."""

from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest

from aztask import App, chain, chord, group
from aztask.settlement import Complete
from aztask.stores.records.base import Finish, Outcome, RunKey, Start, State
from aztask.stores.records.workflows import DocumentChange
from aztask.workflows import joins as module
from aztask.workflows.bits import NIL, Decision, Failure, ParkedValue
from aztask.workflows.edits import row_name
from aztask.workflows.joins import TaskEnd
from aztask.workflows.place import NodePlace
from aztask.workflows.plan import JoinSlot
from aztask.workflows.rows import empty_row, read_row


@pytest.fixture
def app():
    with closing(App("shop", broker="local://:memory:", results="local://:memory:")) as made:
        made.work = made.task(name="shop.work")(lambda x=0: x)
        made.alarm = made.task(name="shop.alarm")(lambda x=0: x)
        yield made


def end_of(app, number, state=State.SUCCEEDED, generation=0, value=b"\x05", repeated=False):
    plan = app.workflows.engine.graphs.plan("w")
    place = NodePlace.of(plan, plan.nodes[number])
    return TaskEnd("w", place, generation, state, value, "OSError", "disk", repeated)


def end(app, *numbers, **options):
    app.workflows.engine.joins.ended([end_of(app, number, **options) for number in numbers])


def record(app, number, generation=0):
    """The task has started, so that it is known."""
    key = RunKey(f"w.{number}", generation)
    app.results.start([Start(key, "shop.work", "default", number, f"o{generation}", "w", 1.0)])


def received(app):
    """The ids of what was sent since the last call, each with its generation."""
    receiver = app.broker.receiver("default", lease=30.0)
    found = receiver.receive(50, 0.0)
    receiver.settle([(each, Complete()) for each in found])
    messages = [app.codec.from_envelope(each.envelope, "default") for each in found]
    return sorted((each.id, each.generation) for each in messages)


def ids(app):
    return [name for name, _ in received(app)]


def state(app):
    return app.workflows.result("w").state


# -- ends of tasks ---------------------------------------------------------------------------------


def test_the_end_of_a_success_has_its_value_and_no_failure(app):
    chain(app.work.s(1)).delay(workflow_id="w")
    made = end_of(app, 1, generation=3).end()
    assert (made.slot, made.size, made.node, made.generation) == (JoinSlot(0, 0), 1, 1, 3)
    assert (made.state, made.value, made.failures, made.first) == (
        State.SUCCEEDED, b"\x05", (), True,
    )  # fmt: skip
    assert end_of(app, 1, value=None).end().value == NIL
    assert not end_of(app, 1, repeated=True).end().first


def test_the_end_of_anything_else_says_why(app):
    chain(app.work.s(1)).delay(workflow_id="w")
    made = end_of(app, 1, State.FAILED).end()
    assert made.failures == (Failure(1, State.FAILED, "OSError", "disk"),)
    stopped = end_of(app, 1).end(State.CANCELLED)
    assert (stopped.state, stopped.failures[0].state) == (State.CANCELLED, State.CANCELLED)
    plain = TaskEnd("w", NodePlace(1, JoinSlot(0, 0), 1), 0, State.EXPIRED).end()
    assert plain.failures == (Failure(1, State.EXPIRED, "", ""),)
    assert plain.first, "an end is the first one unless it is known to be repeated"


def test_a_task_of_on_error_fills_no_slot(app):
    assert TaskEnd("w", NodePlace(4), 0, State.SUCCEEDED).end() is None
    chain(app.work.s(1), on_error=app.alarm.s()).delay(workflow_id="w")
    end(app, 1, state=State.FAILED)
    assert ids(app) == ["w.1", "w.2"]
    for outcome in (State.SUCCEEDED, State.FAILED):
        end(app, 2, state=outcome)
    assert state(app) == "failed", "whatever becomes of the handler"


@pytest.mark.parametrize("errors", [False, True])
def test_an_end_says_what_its_group_passes_on(app, errors):
    chord([app.work.s(1), app.work.s(2)], app.work.s(), return_errors=errors).delay(workflow_id="w")
    made = end_of(app, 2).end()
    assert (made.passes_errors, made.blocked, made.size) == (errors, True, 2)


# -- successors ------------------------------------------------------------------------------------


def test_a_success_starts_what_follows_and_a_failure_does_not(app):
    chain(app.work.s(1), group(app.work.s(), app.work.s()), app.work.s()).delay(workflow_id="w")
    assert ids(app) == ["w.1"]
    end(app, 1)
    first, second = ids(app)
    end(app, int(first[2:]))
    assert ids(app) == []
    end(app, int(second[2:]))
    (last,) = ids(app)
    assert state(app) == "started"
    end(app, int(last[2:]), state=State.FAILED)
    assert (ids(app), state(app)) == ([], "failed")


def test_empty_groups_are_decided_at_once(app):
    result = chain(app.work.s(1), group(), app.work.s()).delay(workflow_id="w")
    assert ids(app) == ["w.1"]
    end(app, 1)
    (last,) = ids(app)
    end(app, int(last[2:]))
    assert result.get(timeout=0) == 5
    assert app.results.workflows.open_workflows(9) == []


def test_a_repeated_end_sends_only_what_is_not_known_yet(app):
    chain(app.work.s(1), group(app.work.s(), app.work.s())).delay(workflow_id="w")
    received(app)
    end(app, 1)
    first, second = ids(app)
    record(app, int(first[2:]))
    end(app, 1, repeated=True)
    assert ids(app) == [second]
    record(app, int(second[2:]))
    end(app, 1, repeated=True)
    assert ids(app) == []
    end(app, 1)
    assert ids(app) == [first, second], "an end that is not repeated asks for nothing"


def test_a_repeated_end_of_a_full_group_sends_the_body_if_it_is_not_known(app):
    chord([app.work.s(1), app.work.s(2)], app.work.s()).delay(workflow_id="w")
    received(app)
    end(app, 2, 3)
    assert ids(app) == ["w.4"]
    end(app, 3)
    assert ids(app) == [], "the process that has decided sends it"
    end(app, 3, repeated=True)
    assert ids(app) == ["w.4"]
    record(app, 4)
    end(app, 3, repeated=True)
    assert ids(app) == []


def test_nothing_follows_the_task_of_a_deleted_workflow(app):
    graph = chain(app.work.s(1), chord([app.work.s(), app.work.s()], app.work.s()))
    result = graph.delay(workflow_id="w")
    end(app, 1)
    ends = [end_of(app, number) for number in (1, 3, 4)]
    received(app)
    (listed,) = app.results.workflows.open_workflows(9)
    assert app.results.workflows.delete_workflow(listed)
    engine = app.workflows.engine
    engine.graphs.forget("w")
    engine.joins.ended(ends)
    engine.joins.start("w", [1])
    engine.joins.decided("w", 0, Decision(State.SUCCEEDED, 0, 5.0))
    engine.joins.decide("w", 0)
    engine.joins.filled("w", 2, {0: empty_row(2)})
    assert received(app) == []
    assert result.state == "pending"
    assert app.results.workflows.read([("w", row_name(2, 0))]) == [None]


def test_rows_of_a_deleted_workflow_hold_up_no_other(app, monkeypatch):
    monkeypatch.setattr("aztask.workflows.plan.BLOCK", 2)
    for name in ("gone", "w"):
        chord([app.work.s(n) for n in range(4)], app.work.s()).delay(workflow_id=name)
    received(app)
    ends = [end_of(app, number) for number in (2, 3, 4, 5)]
    engine = app.workflows.engine
    plan, cached = engine.graphs.plan, []

    def gone(workflow, root=None):
        cached.append(workflow)
        return None if workflow == "gone" else plan(workflow, root)

    monkeypatch.setattr(engine.graphs, "plan", gone)
    engine.joins.ended([*(each._replace(workflow="gone") for each in ends), *ends])
    assert "gone" in cached
    assert ids(app) == ["w.6"]


def test_of_a_workflow_that_is_deleted_in_between_no_root_comes_back(app):
    chain(app.work.s(1)).delay(workflow_id="w")
    engine = app.workflows.engine
    (listed,) = app.results.workflows.open_workflows(9)
    last = end_of(app, 1)
    assert app.results.workflows.delete_workflow(listed)
    engine.joins.ended([last])
    engine.joins.finish("w", Decision(State.SUCCEEDED, 0, 5.0))
    assert engine.graphs.root("w") is None
    assert app.results.workflows.all_workflows(9) == []


# -- cancelled workflows ---------------------------------------------------------------------------


def test_a_cancelled_chain_ends_where_it_is(app):
    result = chain(app.work.s(1), app.work.s(), on_error=app.alarm.s()).delay(workflow_id="w")
    received(app)
    assert result.cancel()
    end(app, 1)
    assert (ids(app), state(app)) == ([], "cancelled")
    (failure,) = result.failures
    assert (failure.node, failure.state) == (1, State.CANCELLED)


def test_a_cancelled_group_ends_as_cancelled_instead_of_starting_its_body(app):
    graph = chord([app.work.s(1), app.work.s(2)], app.work.s(), on_error=app.alarm.s())
    result = graph.delay(workflow_id="w")
    received(app)
    end(app, 2)
    assert result.cancel()
    end(app, 3)
    assert (ids(app), state(app)) == ([], "cancelled")
    (failure,) = result.failures
    assert (failure.node, failure.state) == (1, State.CANCELLED)


def test_what_has_succeeded_although_it_was_cancelled_has_succeeded(app):
    result = chain(app.work.s(1)).delay(workflow_id="w")
    result.cancel()
    end(app, 1)
    assert result.state == "succeeded"


def test_what_fails_after_it_was_cancelled_is_cancelled_and_alarms_nobody(app):
    result = chain(app.work.s(1), on_error=app.alarm.s()).delay(workflow_id="w")
    received(app)
    result.cancel()
    end(app, 1, state=State.FAILED)
    assert (ids(app), state(app)) == ([], "cancelled")


# -- handlers --------------------------------------------------------------------------------------


def test_a_part_that_succeeds_sends_no_handler(app):
    inner = chord([app.work.s(1), app.work.s(2)], app.work.s(), on_error=app.alarm.s())
    result = chain(inner, on_error=app.alarm.s()).delay(workflow_id="w")
    first = [int(name[2:]) for name in ids(app)]
    end(app, *first)
    (body,) = ids(app)
    end(app, int(body[2:]))
    assert (ids(app), result.state) == ([], "succeeded")


def test_each_part_that_fails_sends_its_own_handler(app):
    inner = chord([app.work.s(1), app.work.s(2)], app.work.s(), on_error=app.alarm.s())
    chain(inner, app.work.s(), on_error=app.alarm.s()).delay(workflow_id="w")
    first = received(app)
    end(app, *(int(name[2:]) for name, _ in first), state=State.FAILED)
    assert len(received(app)) == 2
    assert state(app) == "failed"


def test_a_handler_of_a_later_failure_is_sent_under_its_generation(app):
    chain(app.work.s(1), on_error=app.alarm.s()).delay(workflow_id="w")
    received(app)
    end(app, 1, state=State.FAILED)
    assert received(app) == [("w.2", 0)]
    record(app, 2)
    end(app, 1, state=State.FAILED, repeated=True)
    assert received(app) == [], "it is known"
    end(app, 1, state=State.FAILED, generation=1, repeated=True)
    assert received(app) == [("w.2", 1)]
    record(app, 2, 1)
    end(app, 1, state=State.FAILED, generation=1, repeated=True)
    assert received(app) == []


# -- the end of a workflow -------------------------------------------------------------------------


def test_a_workflow_moves_in_the_index_once_for_each_end(app, monkeypatch):
    result = chain(app.work.s(1)).delay(workflow_id="w")
    store, moved = app.workflows.engine.store, []
    for name in ("reopen_workflow", "close_workflow"):

        def noted(*arguments, name=name, call=getattr(store, name)):
            moved.append(name)
            return call(*arguments)

        monkeypatch.setattr(store, name, noted, raising=False)
    end(app, 1, state=State.FAILED)
    assert (moved, result.state) == (["close_workflow"], "failed")
    first_at = app.workflows.engine.graphs.root("w").ended_at
    moved.clear()
    end(app, 1, state=State.FAILED, repeated=True)
    assert moved == ["close_workflow"], "a repeated end changes nothing"
    moved.clear()
    end(app, 1, generation=1, repeated=True)
    assert moved == ["reopen_workflow", "close_workflow"]
    assert result.state == "succeeded"
    (listed,) = app.results.workflows.ended_workflows(9)
    assert listed.ended_at == app.workflows.engine.graphs.root("w").ended_at >= first_at
    assert app.results.workflows.open_workflows(9) == []


def test_the_process_that_ended_a_workflow_knows_it_at_once(app):
    chain(app.work.s(1)).delay(workflow_id="w")
    graphs = app.workflows.engine.graphs
    assert graphs.recent_root("w").ended_at is None
    end(app, 1)
    assert graphs.recent_root("w").state is State.SUCCEEDED


# -- several groups, and what a process remembers --------------------------------------------------


def test_ends_of_several_workflows_and_groups_are_worked_off_together(app):
    for name in ("v", "w"):
        group(
            chord([app.work.s(1), app.work.s(2)], app.work.s()),
            chord([app.work.s(3), app.work.s(4)], app.work.s()),
        ).delay(workflow_id=name)
    received(app)
    engine = app.workflows.engine
    plan = engine.graphs.plan("w")
    members = [node for node in plan.nodes if node.task and not node.takes]
    ends = [
        TaskEnd(name, NodePlace.of(plan, node), 0, State.SUCCEEDED, b"\x05")
        for name in ("v", "w")
        for node in members
    ]
    engine.joins.ended(ends)
    bodies = ids(app)
    assert len(bodies) == 4
    numbers = {int(name[2:]) for name in bodies}
    engine.joins.ended(
        [
            TaskEnd(name, NodePlace.of(plan, plan.nodes[number]), 0, State.SUCCEEDED, b"\x07")
            for name in ("v", "w")
            for number in sorted(numbers)
        ]
    )
    for name in ("v", "w"):
        assert app.workflows.result(name).get(timeout=0) == [7, 7]


def test_how_full_rows_are_is_remembered_of_the_last_ones(app, monkeypatch):
    monkeypatch.setattr(module, "REMEMBERED", 2)
    joins = app.workflows.engine.joins
    rows = [("w", 1, number) for number in range(3)]
    for place in rows:
        joins.note_left(place, empty_row(5))
    assert joins.left == {rows[1]: 5, rows[2]: 5}
    joins.note_left(rows[1], None)
    joins.note_left(rows[0], None)
    assert joins.left == {rows[2]: 5}


def test_while_a_group_fills_it_is_known_how_many_members_are_left(app):
    group(*(app.work.s(n) for n in range(4))).delay(workflow_id="w")
    joins = app.workflows.engine.joins
    for number, left in ((2, 3), (3, 2), (4, 1)):
        end(app, number)
        assert joins.left == {("w", 1, 0): left}


# -- messages that are refused ---------------------------------------------------------------------


def refuse(app, number):
    """Spoil the stored message of a node."""
    mailer = app.workflows.engine.mailer
    send = mailer.send

    def refused(workflow, root, nodes, watch=None, made=None):
        kept = [each for each in nodes if each[0] != number]
        found = send(workflow, root, kept, watch, made) if kept else []
        return found + [(number, "its signature is wrong") for each, _ in nodes if each == number]

    mailer.send = refused


def test_a_node_whose_message_is_refused_fails_and_its_group_with_it(app):
    chain(app.work.s(1), app.work.s(), on_error=app.alarm.s()).delay(workflow_id="w")
    received(app)
    refuse(app, 2)
    end(app, 1)
    assert ids(app) == ["w.3"], "the handler"
    (failure,) = app.workflows.result("w").failures
    assert failure == Failure(2, State.FAILED, "ContentRefused", "its signature is wrong")


def test_a_handler_whose_message_is_refused_fails_nothing_more(app):
    chain(app.work.s(1), on_error=app.alarm.s()).delay(workflow_id="w")
    received(app)
    refuse(app, 2)
    end(app, 1, state=State.FAILED)
    assert (ids(app), state(app)) == ([], "failed")


# -- decisions that another process has made -------------------------------------------------------


def test_housekeeping_acts_on_a_decision_again(app):
    chain(app.work.s(1), on_error=app.alarm.s()).delay(workflow_id="w")
    received(app)
    joins = app.workflows.engine.joins
    failed = Decision(State.FAILED, 2, 5.0, 1, (Failure(1, State.FAILED),))
    joins.decided("w", 0, failed)
    assert received(app) == [("w.2", 2)]
    assert state(app) == "failed"
    record(app, 2, 2)
    joins.decided("w", 0, failed)
    assert received(app) == [], "its handler is known"


def test_housekeeping_decides_a_row_that_is_full(app):
    chord([app.work.s(1), app.work.s(2)], app.work.s()).delay(workflow_id="w")
    received(app)
    engine = app.workflows.engine
    engine.joins.decide("w", 1)
    assert (ids(app), state(app)) == ([], "started"), "it is not full"
    row = empty_row(2)
    for member, number in ((0, 2), (1, 3)):
        row.set(member, end_of(app, number).end(), b"\x05")
    (known,) = engine.store.read([("w", row_name(1, 0))])
    tag = None if known is None else known.tag
    assert engine.store.write([DocumentChange("w", row_name(1, 0), row.pack(), tag)]) != [None]
    engine.joins.decide("w", 1)
    assert ids(app) == ["w.4"]
    record(app, 4)
    engine.joins.decide("w", 1)
    assert ids(app) == []


def test_values_that_a_row_refers_to_are_copied_into_its_document(app, monkeypatch):
    """A group of several rows: later readers ask for one document of each row."""
    monkeypatch.setattr("aztask.workflows.plan.BLOCK", 3)
    monkeypatch.setattr("aztask.workflows.edits.INLINE_BYTES", 10)
    result = group(*(app.work.s(n) for n in range(6))).delay(workflow_id="w")
    long = [b"\xa8" + bytes([65 + n]) * 8 for n in range(6)]
    engine = app.workflows.engine
    members = [node.number for node in engine.graphs.plan("w").nodes if node.task]
    for number, value in zip(members[:5], long[:5], strict=True):
        end(app, number, value=value)
    (document,) = engine.store.read([("w", "row-1-0-0")])
    row = read_row(engine.store.read([("w", row_name(1, 0))])[0].data, 3)
    assert any(isinstance(bit.value, ParkedValue) for bit in row.bits)
    for value in long[:3]:
        assert value in document.data
    end(app, members[5], value=long[5])
    assert result.get(timeout=0) == [chr(65 + n) * 8 for n in range(6)]


def test_a_full_row_of_a_large_group_is_acted_on_by_its_last_end_and_by_repeated_ones(
    app, monkeypatch
):
    monkeypatch.setattr("aztask.workflows.plan.BLOCK", 2)
    chord([app.work.s(n) for n in range(4)], app.work.s()).delay(workflow_id="w")
    received(app)
    members = [2, 3, 4, 5]
    end(app, *members[:3])
    assert ids(app) == []
    end(app, members[3])
    assert ids(app) == ["w.6"]
    end(app, members[0])
    assert ids(app) == [], "an end that is set for the first time leaves it to the one that decided"
    end(app, members[0], repeated=True)
    assert ids(app) == ["w.6"]
    record(app, 6)
    end(app, members[0], repeated=True)
    assert ids(app) == []


def test_a_failed_member_of_a_large_group_may_succeed_later(app, monkeypatch):
    monkeypatch.setattr("aztask.workflows.plan.BLOCK", 2)
    result = group(*(app.work.s(n) for n in range(4))).delay(workflow_id="w")
    end(app, 2, 3, 4)
    end(app, 5, state=State.FAILED)
    assert result.state == "failed"
    assert [each.node for each in result.failures] == [5]
    end(app, 5, generation=1, repeated=True, value=b"\x09")
    assert (result.state, result.get(timeout=0)) == ("succeeded", [5, 5, 5, 9])


def test_a_start_that_is_slow_says_so_after_each_batch(app):
    called = []
    group(*(app.work.s(n) for n in range(3))).delay(workflow_id="w")
    received(app)
    app.workflows.engine.joins.start("w", [2, 3], SimpleNamespace(sent=lambda: called.append(1)))
    assert (ids(app), called) == (["w.2", "w.3"], [1])


def test_a_recorded_outcome_makes_no_difference_to_a_first_end(app):
    """Only repeated ends ask the store, so that a usual end costs no look."""
    chain(app.work.s(1), app.work.s()).delay(workflow_id="w")
    received(app)
    key = RunKey("w.2")
    app.results.start([Start(key, "shop.work", "default", 2, "o", "w", 1.0)])
    app.results.record([Finish(key, "o", Outcome(State.SUCCEEDED, Complete(), b"\x05", at=2.0))])
    end(app, 1)
    assert ids(app) == ["w.2"]


def test_a_root_that_was_started_long_ago_keeps_its_other_fields_when_it_ends(app):
    chain(app.work.s(1)).delay(workflow_id="w")
    graphs = app.workflows.engine.graphs
    before = graphs.root("w")
    end(app, 1)
    after = graphs.root("w")
    assert replace(after, ended_at=None, state=State.STARTED) == before
