import json
import time

from aztask.message.message import TaskMessage
from aztask.steps.home import StepHome
from aztask.steps.keepers import StoredSteps
from aztask.steps.records import DONE, FAILED, RETRYING, STEP, StepRecord
from aztask.stores.records.base import RunKey, Start


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
