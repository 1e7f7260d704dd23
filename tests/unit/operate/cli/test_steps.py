import json
import time

from aztask.message.message import TaskMessage
from aztask.settlement import Resubmit
from aztask.steps.home import StepHome
from aztask.steps.keepers import StoredSteps
from aztask.steps.records import DONE, FAILED, RETRYING, SIGNAL, STEP, WAITING, StepRecord
from aztask.steps.waits import SIGNALS, ParkedRun, Wait
from aztask.stores.records.base import PARKED, Finish, Outcome, RunKey, Start, State


def record(app, *records):
    store = StepHome(app).store()
    keeper = StoredSteps(store, TaskMessage("a", "shop.order", "q", b""), app.codec, None, 0)
    for number, (name, state, value) in enumerate(records, 1):
        data = app.codec.encode_value(value)
        keeper.write(StepRecord(STEP, state, name, "", "1", False, number, data, 1.8e9))


ERROR = {"module": "shop", "class": "CardError", "text": "no\nfunds", "args": []}


def test_show(cli, filled):
    record(filled, ("charge", DONE, {"id": 7}), ("ship", FAILED, ERROR), ("mail", RETRYING, None))
    out = cli("steps", "show", "a").out
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["STEP", "BRANCH", "STATE", "AT", "FAILURES", "VALUE"]
    assert [row[0] for row in rows[1:]] == ["charge", "ship", "mail"]
    assert "CardError: no" in out
    found = [json.loads(line) for line in cli("steps", "show", "a", "--json").out.splitlines()]
    assert [(each["step"], each["state"]) for each in found] == [
        ("charge", "done"), ("ship", "failed"), ("mail", "retrying"),
    ]  # fmt: skip
    assert found[0]["value"] == {"id": 7}
    assert found[0]["history"] == "0"


def test_a_task_without_steps(cli, filled):
    ended = cli("steps", "show", "good")
    assert (ended.code, ended.error) == (
        5, "task good has no recorded steps; see: aztask result good",
    )  # fmt: skip


def test_reset(cli, filled):
    record(filled, ("charge", DONE, 1), ("ship", DONE, 2), ("mail", DONE, 3))
    what = "forget 2 recorded steps of task a, from ship on"
    assert cli("steps", "reset", "a", "--from", "ship", "--dry-run").out == f"would {what}\n"
    assert "forgot 2 steps" in cli("steps", "reset", "a", "--from", "ship", "--yes").out
    assert len(cli("steps", "show", "a", "--json").out.splitlines()) == 1


def test_reset_of_an_unknown_step_and_of_a_task_that_runs(cli, filled):
    record(filled, ("charge", DONE, 1))
    ended = cli("steps", "reset", "a", "--from", "chrage", "--yes")
    assert ended.code == 5
    assert "has no recorded step 'chrage'. Did you mean 'charge'?" in ended.error
    filled.results.start([Start(RunKey("a"), "t", "q", 1, "me", "w", time.time())])
    ended = cli("steps", "reset", "a", "--from", "charge", "--yes")
    assert ended.code == 4
    assert "runs now and knows its steps" in ended.error


def waiting(app):
    """Task w has charged a card, and waits for the signal approved."""
    now = time.time()
    due, key = now + 86400.0, RunKey("w")
    app.results.start([Start(key, "shop.order", "q", 1, "me", "worker", now)])
    text = "it waits for signal approved, until tomorrow"
    settlement = Resubmit(86400.0, due, counted=False, asked=True)
    outcome = Outcome(State.SNOOZED, settlement, error_type=PARKED, error=text, at=now)
    app.results.record([Finish(key, "me", outcome)])
    message = TaskMessage("w", "shop.order", "q", b"\x93\x90\x80\x80")
    keeper = StoredSteps(StepHome(app).store(), message, app.codec, None, 0)
    charged = app.codec.encode_value(1)
    keeper.write(StepRecord(STEP, DONE, "charge", "", "1", False, 1, charged, now))
    wait = StepRecord(SIGNAL, WAITING, "approved", "", "1", False, 2, b"", now)
    keeper.write(wait)
    waits = (Wait(SIGNALS, ("approved",), due),)
    run = ParkedRun("w", "shop.order", "q", 0, 1, now, due, waits, b"")
    app.broker.declare("q")
    assert not app.sends.signals.park(run, message.parked())


def test_a_task_that_waits_and_its_signal(cli, filled):
    """`result` says for what and since when, `explain` shows steps, waits and signals."""
    waiting(filled)
    shown = cli("result", "w").out
    assert "waiting" in shown
    assert "signal approved" in shown
    assert "since" in shown
    found = json.loads(cli("result", "w", "--json").out.splitlines()[0])
    assert found["state"] == "waiting"
    told = cli("explain", "w").out
    assert "step charge: done" in told
    assert "wait for signal approved: waits" in told
    before = filled.broker.stats("q").active
    assert cli("signal", "w", "other", "1").out == "sent other to task w\n"
    assert filled.broker.stats("q").active == before, "it does not wait for that one"
    assert "signal other, which no wait has taken" in cli("explain", "w").out
    assert cli("signal", "w", "approved", '{"by": "ann"}').out == "sent approved to task w\n"
    assert filled.broker.stats("q").active == before + 1, "its wake-up is sent"
    signals = filled.sends.signals.store.read("w").signals
    values = {each.name: filled.codec.decode_value(each.value) for each in signals}
    assert values == {"other": 1, "approved": {"by": "ann"}}


def test_a_signal_to_a_task_that_is_unknown_or_has_ended(cli, filled):
    ended = cli("signal", "nothing", "approved")
    assert (ended.code, ended.error.split(";")[0]) == (
        5, "the result store does not know task nothing",
    )  # fmt: skip
    assert "has ended (succeeded) and takes no signal" in cli("signal", "good", "approved").error
