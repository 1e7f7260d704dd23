"""A message runs in its turn only, and its end counts where the stored graph says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pipelinebench import Bench, Make

from aztask import RetryPolicy, chain, chord, group
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.operate.deadletters import DeadLetters, Selection
from aztask.queues.local.payload import envelope_of
from aztask.settlement import Complete
from aztask.stores.records.base import Finish, Outcome, RunKey, Start, State
from aztask.uniqueness.engine import read_claim
from aztask.worker.pipeline.work import Stage, WorkItem, message_of
from aztask.worker.pipeline.workflowends import OUT_OF_TURN

KEY = "a-key-that-no-attacker-knows-0123456789"


@pytest.fixture
def bank(make: Make) -> Bench:
    """A worker with keys, of a fleet that a release before 0.2 may belong to."""
    return bank_of(make(signing_keys=[KEY]))


def bank_of(bench: Bench) -> Bench:
    for name in ("approve", "ship", "alarm"):
        bench.app.task(name=f"shop.{name}")(lambda *order: None)
    return bench


def tasks(bench: Bench) -> tuple[Any, Any, Any]:
    return tuple(bench.app.tasks[f"shop.{name}"] for name in ("approve", "ship", "alarm"))  # type: ignore[return-value]


def stored_before(bench: Bench, node: int, workflow: str = "w") -> TaskMessage:
    """A step of a workflow as a program reads it that has no key."""
    graphs = bench.app.workflows.engine.graphs
    root = graphs.root(workflow)
    assert root is not None
    queue, envelope = graphs.messages(workflow, root, [node])[node]
    return Codec().from_envelope(envelope, queue, stored="any")


def send_old(bench: Bench, message: TaskMessage) -> None:
    """Send a message that a release before 0.2 has signed: alike for the store and the queue."""
    bench.app.broker.send(message.queue, [bench.app.codec.to_envelope(message)])


def run(bench: Bench) -> list[str]:
    """Run what is in the queue; the ids of what ran."""
    items = bench.again()
    ready = [item for item in items if item.stage is Stage.READY]
    bench.succeed(ready)
    bench.pipeline.finish([item for item in items if item.stage is not Stage.ENDED])
    return [item.key.task_id for item in ready]


def fail(bench: Bench) -> list[str]:
    items = bench.again()
    for item in items:
        bench.pipeline.decisions.died(item, "OSError", "disk")
    bench.pipeline.finish(items)
    return [item.key.task_id for item in items]


def state(bench: Bench) -> str:
    return str(bench.app.workflows.result("w").state)


# -- steps of workflows ----------------------------------------------------------------------------


def test_a_step_that_an_old_release_stored_does_not_run_before_its_turn(bank: Bench) -> None:
    approve, ship, _ = tasks(bank)
    chain(approve.si(), ship.si()).delay(workflow_id="w")
    early = stored_before(bank, 2)
    assert early.task == "shop.ship"
    bank.app.broker.purge("default")
    for _ in range(2):
        send_old(bank, early)
        assert run(bank) == []
    assert bank.dead() == {
        "w.2": "out-of-turn: what node 2 of workflow w follows is not recorded: another program has"
        " sent what waits in the result store for its turn"
    }
    assert bank.app.results.get("w.2") is None, "the run is that of the message that will come"
    send_old(bank, stored_before(bank, 1))
    assert (run(bank), run(bank)) == (["w.1"], ["w.2"])
    assert state(bank) == "succeeded"


def test_without_old_signatures_a_step_waits_for_its_turn_too(make: Make) -> None:
    """A program may have read it while the release that stored it was there."""
    bench = bank_of(make(signing_keys=[KEY], old_signatures=False))
    approve, ship, _ = tasks(bench)
    chain(approve.si(), ship.si()).delay(workflow_id="w")
    bench.app.broker.purge("default")
    bench.app.broker.send("default", [bench.app.codec.to_envelope(stored_before(bench, 2))])
    assert run(bench) == []
    assert [each.split(":")[0] for each in bench.dead().values()] == ["out-of-turn"]


def test_steps_run_in_every_place_of_a_graph(bank: Bench) -> None:
    approve, ship, alarm = tasks(bank)
    chain(
        approve.si(),
        group(chain(approve.si(), ship.si()), approve.si()),
        group(()),
        ship.si(),
        on_error=alarm.si(),
    ).delay(workflow_id="w")
    ran = [sorted(run(bank)) for _ in range(4)]
    assert [len(each) for each in ran] == [1, 2, 1, 1]
    assert (state(bank), bank.dead()) == ("succeeded", {})


def test_the_task_of_on_error_runs_after_a_failure_alone(make: Make) -> None:
    bench = bank_of(make(signing_keys=[KEY], retry=RetryPolicy(max_retries=0)))
    approve, _, alarm = tasks(bench)
    chord([approve.si(), approve.si()], approve.si(), on_error=alarm.si()).delay(workflow_id="w")
    plan = bench.app.workflows.engine.graphs.plan("w")
    assert plan is not None
    (handler,) = [each.number for each in plan.nodes if each.task == "shop.alarm"]
    early = stored_before(bench, handler)
    held = bench.app.broker.peek("default")
    bench.app.broker.purge("default")
    send_old(bench, early)
    assert run(bench) == []
    assert bench.dead()[f"w.{handler}"].startswith(OUT_OF_TURN)
    bench.app.broker.send("default", [each.envelope for each in held])
    assert len(fail(bench)) == 2
    assert run(bench) == [f"w.{handler}"]


def test_a_step_of_a_deleted_workflow_does_not_run(bank: Bench) -> None:
    approve, ship, _ = tasks(bank)
    result = chain(approve.si(), ship.si()).delay(workflow_id="w")
    early = stored_before(bank, 2)
    assert (run(bank), run(bank)) == (["w.1"], ["w.2"])
    result.forget()
    bank.app.workflows.engine.graphs.forget("w")
    bank.pipeline.following.refresh()
    send_old(bank, early)
    assert run(bank) == []
    assert bank.dead() == {"w.2": "out-of-turn: workflow w no longer exists"}
    send_old(bank, replace(early, generation=1))
    assert run(bank) == ["w.2"], "an operator has replayed it"


def test_a_replay_does_not_run_before_its_turn_either(bank: Bench) -> None:
    """An attacker who may receive can make a dead letter of anything, with any reason."""
    approve, ship, _ = tasks(bank)
    chain(approve.si(), ship.si()).delay(workflow_id="w")
    early = stored_before(bank, 2)
    bank.app.broker.purge("default")
    send_old(bank, early)
    assert run(bank) == []
    assert DeadLetters(bank.app, "default").replay(Selection(everything=True)).done == 1
    assert run(bank) == []
    assert list(bank.dead()) == ["w.2"]
    send_old(bank, stored_before(bank, 1))
    assert run(bank) == ["w.1"]
    assert DeadLetters(bank.app, "default").replay(Selection(everything=True)).done == 1
    assert run(bank) == ["w.2", "w.2"], "its turn has come"


def test_retries_run_whatever_is_recorded(bank: Bench) -> None:
    """A worker has signed them to be sent."""
    approve, ship, _ = tasks(bank)
    chain(approve.si(), ship.si()).delay(workflow_id="w")
    early = stored_before(bank, 2)
    bank.app.broker.purge("default")
    send_old(bank, replace(early, hop=1))
    assert [item.stage for item in bank.again()] == [Stage.READY]


# -- places, without keys --------------------------------------------------------------------------


def forged(bench: Bench, message: TaskMessage) -> list[WorkItem]:
    bench.app.broker.send(message.queue, [Codec().to_envelope(message)])
    return bench.again()


def test_the_sizes_of_a_join_come_from_the_stored_graph(make: Make) -> None:
    bench = bank_of(make())
    approve, ship, _ = tasks(bench)
    chord([approve.si(), approve.si()], ship.si()).delay(workflow_id="w")
    plan = bench.app.workflows.engine.graphs.plan("w")
    assert plan is not None
    member = next(each for each in plan.nodes if each.task == "shop.approve")
    message = stored_before(bench, member.number)
    assert member.slot is not None
    join = member.slot.join
    assert message.node is not None and f":{join}:0:2:" in message.node
    bench.app.broker.purge("default")
    lie = replace(message, node=message.node.replace(f":{join}:0:2:", f":{join}:0:1:"))
    (item,) = forged(bench, lie)
    assert item.place is not None and item.place.size == 2
    bench.succeed([item])
    bench.pipeline.finish([item])
    assert state(bench) == "started", "one of two members has ended"
    other = next(each for each in plan.nodes if each.slot == (join, 1))
    bench.app.broker.purge("default")
    forged_items = forged(bench, stored_before(bench, other.number))
    bench.succeed(forged_items)
    bench.pipeline.finish(forged_items)
    assert len(run(bench)) == 1, "the body"
    assert state(bench) == "succeeded"


@pytest.mark.parametrize(
    "lie",
    [
        {"task": "shop.alarm"},
        {"id": "stranger"},
        {"node": "1:::::"},
        {"node": "0:::::"},
        {"node": "99:::::"},
    ],
)
def test_a_message_that_is_no_step_of_its_workflow_ends_nothing(
    make: Make, lie: dict[str, str]
) -> None:
    bench = bank_of(make())
    approve, ship, _ = tasks(bench)
    chain(approve.si(), ship.si()).delay(workflow_id="w")
    message = stored_before(bench, 2)
    bench.app.broker.purge("default")
    items = forged(bench, replace(message, **lie))  # type: ignore[arg-type]
    bench.pipeline.finish(items)
    (reason,) = bench.dead().values()
    assert reason.startswith("out-of-turn: workflow w has no node")
    assert state(bench) == "started"
    assert bench.app.results.get("w.2") is None


def test_what_cannot_be_compared_runs_as_before(make: Make) -> None:
    bench = bank_of(make())
    approve, ship, _ = tasks(bench)
    chain(approve.si(), ship.si()).delay(workflow_id="w")
    bench.app.workflows.engine.store.delete_workflow(
        bench.app.workflows.engine.store.open_workflows(1)[0]
    )
    bench.pipeline.following.refresh()
    assert run(bench) == ["w.1"], "its workflow was deleted"


# -- debounced tasks -------------------------------------------------------------------------------


def quiet(make: Make, **options: Any) -> Bench:
    return make(signing_keys=[KEY], task={"unique": "arguments", "debounce": 60.0}, **options)


def stored_call(bench: Bench) -> TaskMessage:
    store = bench.app.results.uniques
    (holder,) = store.due(store.now() + 1e6, 5)
    claim = read_claim(holder.data)
    return Codec().from_envelope(envelope_of(claim.payload), claim.queue, stored="any")


def test_a_debounced_call_that_an_old_release_stored_does_not_run_before_its_time(
    make: Make,
) -> None:
    bench = quiet(make)
    bench.app.send("shop.count", [[1]])
    call = stored_call(bench)
    send_old(bench, call)
    assert run(bench) == []
    assert bench.dead()[call.id].startswith(
        f"out-of-turn: call {call.id} waits in the result store"
    )
    assert bench.app.results.get(call.id) is None
    bench.clock.sleep(61.0)
    assert bench.app.unique_engine("shop.count").repair() == 1
    assert run(bench) == [call.id]
    assert [message_of(item).id for item in bench.again()] == []


def test_a_debounced_call_that_is_being_sent_runs(make: Make) -> None:
    """Its worker may die, or be slow, between the send and the release of the key."""
    bench = quiet(make)
    bench.app.send("shop.count", [[1]])
    call = stored_call(bench)
    store = bench.app.results.uniques
    (holder,) = store.due(store.now() + 1e6, 5)
    closing = replace(read_claim(holder.data), closing=True)
    store.write(holder.key, closing.pack(), 1.0, holder)
    send_old(bench, call)
    assert run(bench) == [call.id]


def test_a_call_that_could_have_no_key_fails_as_it_runs(make: Make) -> None:
    bench = quiet(make)
    body, content_type, encoding = bench.app.codec.encode_arguments([1, 2, 3], {})
    send_old(bench, TaskMessage("t", "shop.count", "default", body, content_type, encoding))
    (item,) = bench.again()
    assert item.stage is Stage.READY


# -- ids of other tasks ----------------------------------------------------------------------------


@pytest.mark.parametrize("lie", [{"task": "shop.alarm"}, {"queue": "low"}], ids=str)
def test_a_forged_message_with_a_known_id_does_not_complete_the_task(
    make: Make, lie: dict[str, str]
) -> None:
    """By a program without keys that may send to some queue, and knows the id of a task."""
    bench = bank_of(make())
    body, kind, encoding = bench.app.codec.encode_arguments([1], {})
    genuine = TaskMessage("order-1", "shop.ship", "default", body, kind, encoding)
    start = Start(RunKey("order-1"), "shop.ship", "default", 1, "attacker", "w", 1.0)
    bench.app.results.start([replace(start, **lie)])  # type: ignore[arg-type]
    outcome = Outcome(State.SUCCEEDED, Complete(), b"\x01", at=2.0)
    bench.app.results.record([Finish(start.key, "attacker", outcome)])
    items = forged(bench, genuine)
    bench.pipeline.finish(items)
    (text,) = bench.dead().values()
    assert text.startswith("id-of-another-task: task id order-1 is that of task shop.")
    assert bench.stats()[:2] == (0, 0), "it is not completed, its dead letter is there"
    assert DeadLetters(bench.app, "default").replay(Selection(everything=True)).done == 1
    assert run(bench) == ["order-1"], "an operator runs it as another generation"
