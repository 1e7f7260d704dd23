"""What a `WorkflowResult` says while its workflow runs, and after it has ended."""

import asyncio
from contextlib import closing

import pytest

from aztask import App, ResultDamaged, ResultTimeout, TaskCancelled, chain, chord, group
from aztask.canvas.place import Place
from aztask.results.base import Finish, Outcome, RunKey, Start, State
from aztask.results.workflows import ROOT, Change
from aztask.settlement import Complete
from aztask.workflows.joins import TaskEnd


@pytest.fixture
def app():
    with closing(App("shop", broker="local://:memory:", results="local://:memory:")) as made:
        made.work = made.task(name="shop.work")(lambda x=0: x)
        yield made


def end(app, number, state=State.SUCCEEDED, generation=0, value=b"\x05"):
    engine = app.workflows.engine
    plan = engine.graphs.plan("w")
    place = Place.of(plan, plan.nodes[number])
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
    before = engine.inputs.load("w", Place.of(plan, plan.nodes[4]))
    end(app, 2, generation=1, value=b"\x09")
    assert engine.inputs.load("w", Place.of(plan, plan.nodes[4])) == before
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
    store.write([Change("w", ROOT, b"\x93\x01", document.tag)])
    for look in (lambda: result.state, result.ready, result.cancel, lambda: result.progress):
        with pytest.raises(ResultDamaged, match="workflow w cannot be read") as error:
            look()
        assert "\n" not in str(error.value)
