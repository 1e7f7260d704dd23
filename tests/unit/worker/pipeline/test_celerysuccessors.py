"""Which tasks a message of Celery may have a worker send."""

from __future__ import annotations

from typing import Any

import pytest
from pipelinebench import Bench, Make

from aztask.celery.embedded.chords import Chords
from aztask.message.message import TaskMessage
from aztask.settlement import DeadLetter
from aztask.stores.records.base import State
from aztask.stores.records.workflows import workflows_of
from aztask.worker.pipeline.work import Stage

KEY = "a-key-that-no-attacker-knows-0123456789"


def sig(task: str, task_id: str = "", **options: Any) -> dict[str, Any]:
    """A signature as Celery serializes it."""
    chosen = {**options, **({"task_id": task_id} if task_id else {})}
    return {"task": task, "args": [], "kwargs": {}, "options": chosen, "immutable": True}


def send(bench: Bench, embed: dict[str, Any], task_id: str = "first", **fields: Any) -> None:
    codec = bench.app.codec
    body, kind, encoding = codec.encode_embedding([[1]], {}, embed, codec.content_type)
    message = TaskMessage(task_id, "shop.count", "default", body, kind, encoding, **fields)
    bench.app.broker.send("default", [codec.to_envelope(message)])


def run(bench: Bench) -> None:
    """Run what is in the queue."""
    items = bench.again()
    bench.succeed([each for each in items if each.stage is Stage.READY])
    bench.pipeline.finish([each for each in items if each.stage is not Stage.ENDED])


def waiting(bench: Bench, queue: str = "default") -> list[str]:
    return [each.envelope.headers["task"] for each in bench.app.broker.peek(queue)]


def refused(bench: Bench, task_id: str) -> str:
    run = bench.app.results.get(task_id)
    assert run is not None and run.outcome is not None
    assert run.state is State.FAILED
    assert isinstance(run.outcome.settlement, DeadLetter)
    return f"{run.outcome.error_type}: {run.outcome.error}"


STRICT: list[dict[str, Any]] = [{"signing_keys": [KEY]}, {"celery_may_send": []}]


def test_without_keys_any_task_is_sent_to_any_queue_with_a_warning(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make()
    bench.app.broker.declare("payments")
    send(bench, {"callbacks": [sig("pay.out", queue="payments")]})
    run(bench)
    assert waiting(bench, "payments") == ["pay.out"]
    assert "task pay.out follows task first to queue payments: this app has no task" in caplog.text
    assert "the next release refuses it" in caplog.text


@pytest.mark.parametrize("settings", STRICT, ids=["keys", "list"])
def test_a_task_that_is_not_named_is_not_sent_and_is_recorded_as_failed(
    make: Make, settings: dict[str, Any]
) -> None:
    bench = make(**settings)
    bench.app.broker.declare("payments")
    named = [sig("pay.out", "out", queue="payments"), sig("shop.count", "in")]
    send(bench, {"callbacks": named})
    run(bench)
    assert waiting(bench, "payments") == []
    assert waiting(bench) == ["shop.count"]
    text = "this app has no task pay.out, and celery_may_send does not name it"
    assert refused(bench, "out") == f"may-not-send: {text}"
    assert bench.states("first", "in") == ["succeeded", ""], "the task itself has succeeded"
    assert bench.dead() == {}


@pytest.mark.parametrize("settings", STRICT, ids=["keys", "list"])
def test_a_refusal_is_the_end_of_the_chain(make: Make, settings: dict[str, Any]) -> None:
    bench = make(**settings)
    alarm = sig("shop.count", "alarm")
    chain = [sig("shop.count", "last"), sig("pay.out", "out", link_error=[alarm])]
    send(bench, {"chain": chain})  # in Celery's order, from the end
    run(bench)
    assert refused(bench, "out").startswith("may-not-send: ")
    assert "pay.out out before it failed: may-not-send: " in refused(bench, "last")
    assert [each.envelope.headers["id"] for each in bench.app.broker.peek("default")] == ["alarm"]


@pytest.mark.parametrize("settings", STRICT, ids=["keys", "list"])
def test_a_refused_member_fails_its_chord(make: Make, settings: dict[str, Any]) -> None:
    bench = make(**settings)
    group = {
        "task": "celery.group", "args": [], "subtask_type": "group", "immutable": True,
        "kwargs": {"tasks": [sig("shop.count", "one"), sig("pay.out", "out")]},
        "options": {"task_id": "g"},
    }  # fmt: skip
    send(bench, {"chain": [sig("shop.count", "body"), group]})
    run(bench)
    assert refused(bench, "out").startswith("may-not-send: ")
    store = workflows_of(bench.app.results)
    assert store is not None
    state = Chords(store).state("g")
    assert state is not None and len(state.ended) == 1
    run(bench)
    assert "ChordError: out failed: may-not-send" in refused(bench, "body")
    assert waiting(bench) == []


def test_a_task_that_the_list_names_is_sent(make: Make) -> None:
    bench = make(signing_keys=[KEY], celery_may_send=["pay.out"])
    send(bench, {"callbacks": [sig("pay.out", "out"), sig("pay.other", "other")]})
    run(bench)
    assert waiting(bench) == ["pay.out"]
    assert refused(bench, "other").startswith("may-not-send: ")


def test_a_message_that_embeds_too_many_tasks_is_refused(make: Make) -> None:
    bench = make()
    send(bench, {"callbacks": [sig("shop.count")] * 10_001})
    run(bench)
    assert bench.dead() == {"first": "undecodable: the message embeds more than 10,000 tasks"}
    assert waiting(bench) == []
