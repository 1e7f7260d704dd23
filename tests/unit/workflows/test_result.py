"""What a `WorkflowResult` says while its workflow runs, and after it has ended."""

import asyncio
from contextlib import closing
from dataclasses import replace

import pytest

from aztask import (
    App,
    ResultDamaged,
    ResultTimeout,
    TaskCancelled,
    TaskFailed,
    chain,
    chord,
    group,
)
from aztask.settlement import Complete
from aztask.stores.records.base import Finish, Outcome, RunKey, Start, State
from aztask.stores.records.workflows import ROOT, DocumentChange
from aztask.workflows.joins import TaskEnd
from aztask.workflows.place import NodePlace


@pytest.fixture
def app():
    with closing(App("shop", broker="local://:memory:", results="local://:memory:")) as made:
        made.work = made.task(name="shop.work")(lambda x=0: x)
        yield made


def end(app, number, state=State.SUCCEEDED, generation=0, value=b"\x05"):
    engine = app.workflows.engine
    plan = engine.graphs.plan("w")
    place = NodePlace.of(plan, plan.nodes[number])
    engine.joins.ended(
        [TaskEnd("w", place, generation, state, value, "OSError", "disk", repeated=generation > 0)]
    )


def queued(app):
    return app.broker.stats("default").active


def test_it_follows_the_workflow(app):
    work = app.work
    result = chord([work.s(1), work.s(2)], work.s()).delay(workflow_id="w")
    assert (repr(result), result.state, result.ready()) == ("<WorkflowResult w>", "started", False)
    with pytest.raises(ResultTimeout, match="did not end within 0 s"):
        result.get(timeout=0)
    end(app, 2)
    assert (result.progress.done, result.progress.failed, result.progress.total) == (1, 0, 3)
    end(app, 3)
    end(app, 4, value=b"\x07")
    assert (result.state, result.ready(), result.get(timeout=0)) == ("succeeded", True, 7)
    assert asyncio.run(result.aget(timeout=0)) == 7
    assert [member.id for member in result.members()] == ["w.2", "w.3", "w.4"]
    assert result.failures == []


def test_members_come_once_each_as_they_end(app):
    result = chord([app.work.s(1), app.work.s(2)], app.work.s()).delay(workflow_id="w")
    end(app, 2)
    members = result.members()
    first = next(members)
    assert (first.id, first.state) == ("w.2", "pending"), "it asks the store for its state"
    end(app, 3)
    assert next(members).id == "w.3"
    end(app, 4)
    assert [member.id for member in members] == ["w.4"]


def test_of_a_chain_that_failed_the_steps_behind_have_not_ended(app):
    result = chain(app.work.s(1), app.work.s(), app.work.s()).delay(workflow_id="w")
    engine = app.workflows.engine
    first, second, _ = (node.number for node in engine.graphs.plan("w").nodes if node.task)
    end(app, first)
    end(app, second, State.FAILED)
    progress = result.progress
    assert (progress.done, progress.failed, progress.total) == (2, 1, 3)
    assert [member.id for member in result.members()] == [f"w.{first}", f"w.{second}"]


def test_an_unknown_workflow(app):
    result = app.workflows.result("unknown")
    assert (result.state, result.ready(), result.cancel()) == ("pending", False, False)
    assert result.progress.total == 0
    assert list(result.members()) == []


def test_a_cancelled_workflow_sends_neither_its_body_nor_its_handler(app):
    work = app.work
    graph = chord([work.s(1), work.s(2)], work.s(), on_error=work.s())
    result = graph.delay(workflow_id="w")
    assert result.cancel()
    end(app, 2)
    end(app, 3)
    assert queued(app) == 2
    assert result.state == "cancelled"
    with pytest.raises(TaskCancelled, match="workflow w was cancelled"):
        result.get(timeout=0)
    assert not result.cancel()


def test_a_workflow_that_has_ended_can_be_forgotten(app):
    result = chord([app.work.s(1), app.work.s(2)], app.work.s()).delay(workflow_id="w")
    other = app.work.s(1).delay(workflow_id="w1")
    assert not result.forget(), "it has not ended"
    assert result.state == "started"
    for number in (2, 3, 4):
        run = RunKey(f"w.{number}")
        app.results.start([Start(run, "shop.work", "default", number, "o", "w", 1.0)])
        outcome = Outcome(State.SUCCEEDED, Complete(), b"\x05", at=2.0)
        app.results.record([Finish(run, "o", outcome)])
        end(app, number)
    assert result.get(timeout=0) == 5
    assert result.forget()
    assert (result.state, result.forget(), list(result.members())) == ("pending", False, [])
    assert app.results.get("w.2") is None
    workflows = app.results.workflows
    assert [each.workflow for each in workflows.open_workflows(9)] == ["w1"]
    assert workflows.ended_workflows(9) == []
    assert other.state == "started"
    assert app.work.s(3).delay(workflow_id="w").state == "started", "its id is free again"


def test_a_late_end_of_an_older_generation_changes_nothing(app):
    result = group(app.work.s(1), app.work.s(2)).delay(workflow_id="w")
    end(app, 2, State.FAILED)
    end(app, 3)
    assert result.state == "failed"
    end(app, 2, generation=1, value=b"\x09")
    assert (result.state, result.get(timeout=0)) == ("succeeded", [9, 5])
    end(app, 2, State.FAILED)
    assert (result.state, result.get(timeout=0)) == ("succeeded", [9, 5])


def test_a_replay_after_the_body_was_sent_changes_nothing_for_the_body(app):
    work = app.work
    graph = chord([work.s(1), work.s(2)], work.s(), return_errors=True)
    graph.delay(workflow_id="w")
    end(app, 2, State.FAILED)
    end(app, 3)
    engine = app.workflows.engine
    plan = engine.graphs.plan("w")
    before = engine.inputs.load("w", NodePlace.of(plan, plan.nodes[4]))
    end(app, 2, generation=1, value=b"\x09")
    assert engine.inputs.load("w", NodePlace.of(plan, plan.nodes[4])) == before
    assert [failure[:3] for failure in before.failures] == [(0, 2, "failed")]


def test_a_failed_step_of_a_chain_resumes_the_workflow(app):
    result = chain(app.work.s(1), app.work.s(), app.work.s()).delay(workflow_id="w")
    end(app, 1)
    end(app, 2, State.FAILED)
    assert result.state == "failed"
    sent = queued(app)
    end(app, 2, generation=1)
    assert queued(app) == sent + 1
    end(app, 3, value=b"\x08")
    assert (result.state, result.get(timeout=0)) == ("succeeded", 8)
    assert app.results.workflows.open_workflows(5) == []
    assert len(app.results.workflows.ended_workflows(5)) == 1


def test_the_handler_runs_once_for_each_time_that_its_part_fails(app):
    graph = chain(app.work.s(1), on_error=app.work.s())
    graph.delay(workflow_id="w")
    for _ in range(2):
        end(app, 1, State.FAILED)
    receiver = app.broker.receiver("default", lease=30.0)

    def handlers():
        found = [app.codec.from_envelope(d.envelope, "default") for d in receiver.receive(9, 0.0)]
        return {(each.id, each.generation) for each in found if each.id == "w.2"}

    assert handlers() == {("w.2", 0)}
    end(app, 1, State.FAILED, generation=1)
    assert handlers() == {("w.2", 1)}


def test_a_damaged_root_is_said_in_one_line(app):
    result = chain(app.work.s(1)).delay(workflow_id="w")
    store = app.results.workflows
    (document,) = store.read([("w", ROOT)])
    store.write([DocumentChange("w", ROOT, b"\x93\x01", document.tag)])
    for look in (lambda: result.state, result.ready, result.cancel, lambda: result.progress):
        with pytest.raises(ResultDamaged, match="workflow w cannot be read") as error:
            look()
        assert "\n" not in str(error.value)


# -- waiting ---------------------------------------------------------------------------------------


def test_waiting_ends_with_the_workflow(app):
    result = chain(app.work.s(1)).delay(workflow_id="w")
    waits = []

    def wait_changed(version, timeout):
        waits.append((version, timeout))
        if len(waits) == 3:
            end(app, 1, value=b"\x09")
        return version + 1

    app.results.wait_changed = wait_changed
    assert result.get() == 9
    assert waits == [(0, 1.0), (1, 1.0), (2, 1.0)], "without a limit it looks each second at least"


def test_a_wait_is_as_long_as_it_is_asked_for_and_says_what_it_waited_for(app):
    result = chain(app.work.s(1)).delay(workflow_id="w")
    waits = []
    app.results.wait_changed = lambda version, timeout: waits.append(timeout) or version
    with pytest.raises(ResultTimeout, match=r"did not end within 0\.05 s: it goes on; ask again"):
        result.get(timeout=0.05)
    assert waits
    assert max(waits) <= 0.05
    assert min(waits) > 0
    with pytest.raises(ResultTimeout, match="no workflow with this id is known"):
        app.workflows.result("unknown").get(timeout=0)


def test_a_long_wait_looks_each_second(app):
    result = chain(app.work.s(1)).delay(workflow_id="w")

    def wait_changed(version, timeout):
        assert 0.9 < timeout <= 1.0
        end(app, 1)
        return version

    app.results.wait_changed = wait_changed
    assert result.get(timeout=3600) == 5


def test_a_task_that_waits_in_a_worker_that_runs_one_at_a_time_is_warned_once(
    app, monkeypatch, caplog
):
    monkeypatch.setattr("aztask.workflows.result.blocks_its_worker", lambda: True)
    result = chain(app.work.s(1)).delay(workflow_id="w")
    looks = []

    def wait_changed(version, timeout):
        assert "a task waits for workflow w" in caplog.text, "before it waits at all"
        looks.append(version)
        if len(looks) == 3:
            end(app, 1)
        return version + 1

    app.results.wait_changed = wait_changed
    result.get(timeout=60)
    assert caplog.text.count("a task waits for workflow w") == 1
    caplog.clear()
    assert result.get(timeout=60) == 5
    assert caplog.text == "", "it has ended"


def test_members_come_until_the_workflow_has_ended(app):
    result = group(app.work.s(1), app.work.s(2)).delay(workflow_id="w")
    waits, left = [], [2, 3]

    def wait_changed(version, timeout):
        waits.append((version, timeout))
        end(app, left.pop(0))
        return version + 1

    app.results.wait_changed = wait_changed
    assert [member.id for member in result.members()] == ["w.2", "w.3"]
    assert waits == [(0, 1.0), (1, 1.0)]


# -- progress and failures -------------------------------------------------------------------------


def test_progress_counts_the_tasks_of_each_member(app):
    result = group(chain(app.work.s(1), app.work.s()), app.work.s(2), app.work.s(3)).delay(
        workflow_id="w"
    )
    plan = app.workflows.engine.graphs.plan("w")
    steps = [node.number for node in plan.nodes if node.task and node.slot == (1, 0)]
    second, third = (
        node.number for node in plan.nodes if node.task and node.slot in ((1, 1), (1, 2))
    )

    def counted():
        progress = result.progress
        return progress.done, progress.failed, progress.total

    assert counted() == (0, 0, 4)
    end(app, third, State.FAILED)
    assert counted() == (1, 1, 4), "members before it that have not ended are passed over"
    end(app, second)
    assert counted() == (2, 1, 4)
    end(app, steps[0])
    assert counted() == (2, 1, 4), "a step that is followed by another one sets no bit"
    end(app, steps[1], State.CANCELLED)
    assert counted() == (4, 2, 4)


def test_a_member_that_fails_at_its_first_step_has_not_done_the_second(app):
    result = group(chain(app.work.s(1), app.work.s()), app.work.s(2)).delay(workflow_id="w")
    plan = app.workflows.engine.graphs.plan("w")
    first, _ = (node.number for node in plan.nodes if node.task and node.slot == (1, 0))
    end(app, first, State.FAILED)
    progress = result.progress
    assert (progress.done, progress.failed) == (1, 1)
    assert [each.node for each in result.failures] == [], "it has not failed yet"


def test_a_group_in_a_chain_that_failed_counts_only_its_members(app):
    result = chain(app.work.s(1), group(app.work.s(), app.work.s()), app.work.s()).delay(
        workflow_id="w"
    )
    plan = app.workflows.engine.graphs.plan("w")
    inner = next(node.number for node in plan.nodes if not node.task and node.size == 2)
    members = [node.number for node in plan.nodes if node.slot and node.slot.join == inner]
    end(app, 1)
    end(app, members[0], State.FAILED)
    end(app, members[1])
    progress = result.progress
    assert (progress.done, progress.failed, progress.total) == (3, 1, 4)
    assert [failure.node for failure in result.failures] == [members[0]]


def test_an_unknown_workflow_has_no_progress_and_no_failures(app):
    result = app.workflows.result("unknown")
    progress = result.progress
    assert (progress.done, progress.failed, progress.total) == (0, 0, 0)
    assert result.failures == []
    assert not result.forget()


# -- what get raises -------------------------------------------------------------------------------


def test_a_failed_workflow_names_its_first_failure(app):
    result = group(app.work.s(1), app.work.s(2)).delay(workflow_id="w")
    end(app, 3, State.FAILED)
    end(app, 2)
    with pytest.raises(TaskFailed, match=r"OSError: disk \(task w\.3 of workflow w\)"):
        result.get(timeout=0)


def test_a_failure_without_a_type_names_its_state(app):
    result = chain(app.work.s(1)).delay(workflow_id="w")
    engine = app.workflows.engine
    plan = engine.graphs.plan("w")
    engine.joins.ended([TaskEnd("w", NodePlace.of(plan, plan.nodes[1]), 0, State.EXPIRED)])
    with pytest.raises(TaskFailed, match=r"expired: .*task w\.1 of workflow w"):
        result.get(timeout=0)


def test_a_failed_workflow_whose_failures_are_gone_says_so(app):
    result = chain(app.work.s(1)).delay(workflow_id="w")
    store = app.results.workflows
    root = app.workflows.engine.graphs.root("w")
    (document,) = store.read([("w", ROOT)])
    failed = replace(root, ended_at=5.0, state=State.FAILED)
    store.write([DocumentChange("w", ROOT, failed.pack(), document.tag)])
    with pytest.raises(TaskFailed, match=r"Unknown: .*task w\.0 of workflow w"):
        result.get(timeout=0)


def test_a_value_that_cannot_be_read_is_damage(app):
    result = chain(app.work.s(1)).delay(workflow_id="w")
    end(app, 1, value=b"\xc1")
    with pytest.raises(ResultDamaged, match=r"workflow w cannot be read .* w\.1 and so on"):
        result.get(timeout=0)


def test_bits_that_cannot_be_read_are_damage(app):
    result = chain(app.work.s(1)).delay(workflow_id="w")
    end(app, 1, State.FAILED)
    store = app.results.workflows
    (document,) = store.read([("w", "bits-0-0")])
    store.write([DocumentChange("w", "bits-0-0", b"\xc1", document.tag)])
    for look in (lambda: result.failures, lambda: result.progress, lambda: list(result.members())):
        with pytest.raises(ResultDamaged, match="workflow w cannot be read"):
            look()
    (document,) = store.read([("w", ROOT)])
    store.write([DocumentChange("w", ROOT, b"\xc1", document.tag)])
    with pytest.raises(ResultDamaged, match="workflow w cannot be read"):
        result.forget()


# -- cancelling ------------------------------------------------------------------------------------


def test_a_second_cancel_keeps_the_time_of_the_first(app):
    result = group(app.work.s(1), app.work.s(2)).delay(workflow_id="w")
    graphs = app.workflows.engine.graphs
    assert not graphs.cancelled("w")
    assert result.cancel()
    assert graphs.cancelled("w"), "this process knows it at once"
    at = graphs.root("w").cancelled_at
    assert at is not None
    assert result.cancel(), "it has not ended"
    assert graphs.root("w").cancelled_at == at


def test_a_workflow_that_has_ended_is_not_cancelled(app):
    result = chain(app.work.s(1)).delay(workflow_id="w")
    end(app, 1)
    assert not result.cancel()
    assert app.workflows.engine.graphs.root("w").cancelled_at is None
    assert result.state == "succeeded"


@pytest.mark.parametrize(
    ("graph", "value"),
    [
        (group([]), []),
        (group([group([]), group([])]), [[], []]),
        (chain(group([]), group([group([])])), [[]]),
        (chord([], group([])), []),
    ],
)
def test_a_graph_without_tasks_has_its_value_at_once(graph, value):
    """No task, so no app and no result store: nothing is sent."""
    result = graph.delay(workflow_id="w")
    assert (result.id, result.state, result.ready(), result.failures) == (
        "w",
        "succeeded",
        True,
        [],
    )
    assert (result.get(timeout=0), asyncio.run(result.aget())) == (value, value)
    assert (list(result.members()), result.cancel(), result.forget()) == ([], False, False)
    assert (result.progress.done, result.progress.total) == (0, 0)
    assert graph.delay().id != graph.delay().id
