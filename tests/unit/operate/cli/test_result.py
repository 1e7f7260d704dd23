import json
import re
import time
from contextlib import closing

import pytest
from damaging import SqlOutsider
from recordedruns import record_run

from aztask import App, group
from aztask.errors import ResultDamaged
from aztask.message.message import TaskMessage
from aztask.settlement import Complete
from aztask.steps.parts import Take, parts_of, take_of
from aztask.stores.records.base import RunKey, RunningTask, Start, State, WorkerRecord


def test_a_task_that_succeeded(cli, filled):
    ended = cli("result", "good")
    assert ended.code == 0
    fields = dict(line.split(": ", 1) for line in ended.out.splitlines())
    assert fields["state"].strip() == "succeeded"
    assert json.loads(fields["value"]) == [1, "zwei"]
    assert fields["worker"].strip() == "worker-1"


def test_a_task_that_failed_shows_its_runs_and_the_traceback(cli, filled):
    out = cli("result", "bad").out
    assert "state:   failed" in out
    assert "error:   ValueError: no\n" in out
    assert "retrying" in out
    assert "resubmit" in out
    assert "\\x1b[31mline" in out
    assert "\x1b" not in out


def test_a_running_task_shows_its_last_checkpoint(cli, filled):
    filled.results.start([Start(RunKey("runs"), "shop.add", "default", 1, "me", "w", 1e9)])
    progress = filled.codec.encode_value({"row": 7})
    task = RunningTask("runs", "shop.add", "default", 1e9, progress=progress)
    filled.results.heartbeat(WorkerRecord("w", 1e9, 1e9, ("q",), 1, 5, tasks=(task,)))
    assert 'progress: {"row": 7}' in cli("result", "runs").out
    assert json.loads(cli("result", "runs", "--json").out)["progress"] == {"row": 7}
    assert "progress" not in cli("result", "good").out
    assert json.loads(cli("result", "good", "--json").out)["progress"] is None


def test_results_of_an_owner_with_other_keys_are_listed_as_theirs_and_not_verified(cli, filled):
    keys, place = ["a-key-that-no-attacker-knows-0123456789"], cli.address
    with closing(
        App("other", broker="local://:memory:", results=place, owner="theirs", signing_keys=keys)
    ) as other:
        record_run(other, RunKey("signed"), State.SUCCEEDED, Complete())
    lines = {line.split()[0]: line for line in cli("result").out.splitlines()}
    assert lines["ID"].split()[-2:] == ["OWNER", "VERIFIED"]
    assert lines["signed"].split()[-3:] == ["theirs", "not", "verified"]
    assert "not verified" not in lines["good"]
    found = map(json.loads, cli("result", "--json").out.splitlines())
    assert {each["id"]: each.get("unverified") for each in found}.items() >= {
        "signed": True,
        "good": None,
    }.items()
    assert "unreadable" not in cli("result", "--state", "unreadable").out


def test_json_has_everything(cli, filled):
    good = json.loads(cli("result", "good", "--json").out)
    assert (good["state"], good["value"], good["duration_seconds"]) == (
        "succeeded",
        [1, "zwei"],
        0.25,
    )
    bad = json.loads(cli("result", "bad", "--json").out)
    assert (bad["state"], bad["hop"], bad["settlement"]) == ("failed", 1, "dead-letter")
    assert [each["state"] for each in bad["runs"]] == ["retrying", "failed"]
    assert bad["traceback"].startswith("Trace")
    waits = json.loads(cli("result", "waits", "--json").out)
    assert (waits["state"], waits["started_at"], waits["value"]) == ("pending", None, None)


def test_the_newest_runs(cli, filled):
    lines = [json.loads(line) for line in cli("result", "--json").out.splitlines()]
    assert [each["id"] for each in lines] == ["waits", "bad", "bad", "good"]
    lines = cli("result", "--state", "failed", "--limit", "5").out.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("bad")


def test_a_value_that_cannot_be_read_is_described(cli, filled):
    record_run(filled, RunKey("odd"), State.SUCCEEDED, Complete(), value=b"\xc1")
    assert "(cannot be read:" in cli("result", "odd").out


@pytest.mark.parametrize("task_id", ["nosuch", "\x1b[31m", "x" * 5000, "a\nb"])
def test_an_unknown_id_is_not_found(cli, filled, task_id):
    ended = cli("result", task_id)
    assert ended.code == 5
    assert "the result store has no task" in ended.error


def test_without_a_result_store(cli):
    cli.make_file()
    ended = cli("result", "x", AZTASK_BROKER=cli.address)
    assert ended.code == 4
    assert "AZTASK_RESULTS" in ended.error


def only_line(ended):
    """What a listing says of damaged rows."""
    assert ended.code == 0
    (line,) = ended.err.splitlines()
    assert line.isprintable()
    return line.removeprefix("aztask: warning: ")


class TestDamage:
    @pytest.fixture
    def damaged(self, cli, filled):
        """The rows of four tasks are damaged; a worker has found one of them."""
        outsider = SqlOutsider(cli.address.removeprefix("local://"))
        for name in ("one", "two", "three", "\x1b[31mfour"):
            record_run(filled, RunKey(name), State.SUCCEEDED, Complete())
            outsider.damage_run(RunKey(name), {"state": "ban\x1b[31mana"})
        filled.results.start([Start(RunKey("two"), "shop.add", "default", 1, "x", "w", 1e9)])
        now = time.time()
        for name in ("alive", "broken"):
            task = RunningTask(f"runs on {name}", "shop.add", "default", now)
            filled.results.heartbeat(WorkerRecord(name, now, now, ("q",), 1, 5, tasks=(task,)))
        outsider.damage_worker("broken", {"tasks": b"\x91"})
        return filled

    def test_a_listing_names_them_on_one_line(self, cli, damaged):
        ended = cli("result", "--json")
        ids = [json.loads(line)["id"] for line in ended.out.splitlines()]
        assert ids == ["waits", "bad", "bad", "good"]
        line = only_line(ended)
        assert line.startswith("4 damaged runs: \\x1b[31mfour (its state 'ban")
        assert line.endswith(" and 1 more; see: aztask result ID, or --state unreadable")
        assert len(cli("result").out.splitlines()) == 5

    @pytest.mark.parametrize("limit", [1, 2, 3, 4])
    def test_they_take_no_other_runs_place_in_a_listing(self, cli, damaged, limit):
        ended = cli("result", "--json", "--limit", limit)
        ids = [json.loads(line)["id"] for line in ended.out.splitlines()]
        assert ids == ["waits", "bad", "bad", "good"][:limit]
        only_line(ended)

    def test_those_that_workers_found_are_listed(self, cli, damaged):
        ended = cli("result", "--state", "unreadable", "--json")
        (line,) = ended.out.splitlines()
        found = json.loads(line)
        assert (found["id"], found["state"], found["settlement"]) == ("two", "unreadable", None)
        assert found["damage"].startswith("its state ")
        assert ended.err == ""
        assert "its state 'ban" in cli("result", "--state", "unreadable").out

    def test_one_of_them_says_so_on_one_line(self, cli, damaged):
        ended = cli("result", "one")
        assert (ended.code, ended.err) == (0, "")
        lines = ended.out.splitlines()
        assert lines[:2] == ["id:      one", "state:   unreadable"]
        assert lines[-1].startswith("damaged: its state 'ban")
        shown = json.loads(cli("result", "one", "--json").out)
        assert (shown["state"], shown["value"]) == ("unreadable", None)
        assert [each["damage"] for each in shown["runs"]] == [shown["damage"]]

    def test_an_older_run_that_is_damaged_is_one_line_of_the_table(self, cli, damaged):
        record_run(damaged, RunKey("one", 1), State.SUCCEEDED, Complete())
        out = cli("result", "one").out
        assert "state:   succeeded" in out
        assert "damaged:" not in out
        assert "unreadable" in out

    def test_getting_the_result_is_an_error_that_says_what_to_do(self, damaged):
        with pytest.raises(ResultDamaged) as caught:
            damaged.result("one").get(timeout=1)
        assert str(caught.value).startswith("the row of task one in the result store is damaged (")
        assert str(caught.value).endswith("or send the task again with force=True")
        assert damaged.result("one").ready()
        assert damaged.result("one").error is None
        again = damaged.send("shop.add", [1, 2], task_id="one", force=True)
        assert again.state == "pending"

    @pytest.mark.parametrize("value", [b"\xc1", b"\x92\x01", b"\xdd\xff\xff\xff\xff"])
    def test_getting_a_value_that_cannot_be_decoded(self, filled, value):
        record_run(filled, RunKey("odd"), State.SUCCEEDED, Complete(), value=value)
        assert filled.result("odd").successful()
        with pytest.raises(ResultDamaged, match="the value of task odd is damaged") as caught:
            filled.result("odd").get(timeout=1)
        assert str(caught.value).isprintable()
        assert caught.value.__suppress_context__

    def test_workers_and_what_they_run(self, cli, damaged):
        ended = cli("workers", "--json")
        assert [json.loads(line)["worker"] for line in ended.out.splitlines()] == ["alive"]
        assert only_line(ended).startswith("1 damaged worker: broken (its list of tasks cannot")
        ended = cli("running", "--json")
        assert [json.loads(line)["id"] for line in ended.out.splitlines()] == ["runs on alive"]
        assert only_line(ended).startswith("1 damaged worker: broken (")

    def test_the_doctor_counts_and_names_them(self, cli, damaged):
        ended = cli("doctor", "--json")
        assert ended.code == 0
        found = {each["check"]: each for each in map(json.loads, ended.out.splitlines())}
        assert found["damage"]["level"] == "warning"
        assert "rows of tasks that cannot be read: 1: two (its state" in found["damage"]["text"]
        assert "aztask dlq replay --reason unreadable-record" in found["damage"]["advice"]
        assert "knows 1 workers" in found["results"]["text"]
        assert "rows of workers that cannot be read: 1: broken (" in found["workers"]["text"]

    def test_a_damaged_task_may_be_cancelled(self, cli, damaged):
        assert cli("cancel", "one", "--running").out == "one is cancelled\n"
        assert damaged.results.to_stop(["one", "two"]) == ["one"]


def test_it_says_how_often_a_run_was_started_if_more_than_once(cli, filled):
    assert "starts" not in cli("result", "good").out
    for worker in ("killed", "second"):
        start = Start(RunKey("redone"), "shop.add", "default", 1, worker, worker, 1e9)
        filled.results.start([start])
    assert re.search(r"^starts: +2$", cli("result", "redone").out, re.MULTILINE)


def test_the_id_of_a_workflow_is_answered_with_the_command_for_it(cli, filled):
    filled.task(name="shop.sum")(lambda: 1)
    graph = group(filled.tasks["shop.sum"].s(), filled.tasks["shop.sum"].s())
    workflow = graph.delay()
    ended = cli("result", workflow.id)
    assert ended.code == 5
    assert f"is a workflow; see aztask workflow show {workflow.id}" in ended.error


def emit(app, task_id, *values, delivery=1):
    store, take = parts_of(app.results, app.codec), Take(take_of(message(task_id), delivery))
    parts = [app.codec.encode_value(value) for value in values]
    store.append(task_id, take, 1, parts, new=True)


def message(task_id):
    return TaskMessage(task_id, "shop.add", "orders", b"")


def test_following_prints_the_parts(cli, filled):
    emit(filled, "good", "roses", {"are": 2}, "\x1b[31mred")
    answer = cli("result", "good", "--follow")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.splitlines()[:2] == ["roses", '{"are": 2}']
    assert "\x1b" not in answer.out
    lines = cli("result", "good", "--follow", "--json").out.splitlines()
    found = [json.loads(line) for line in lines]
    assert [(each["number"], each["value"], each["reset"]) for each in found][:2] == [
        (1, "roses", False),
        (2, {"are": 2}, False),
    ]
    assert found[2]["id"].endswith(".3")


def test_following_a_task_that_failed_says_why(cli, filled):
    emit(filled, "bad", "one")
    answer = cli("result", "bad", "--follow")
    assert answer.code == 1
    assert answer.out == "one\n"
    assert "ValueError" in answer.err
    assert cli("result", "--follow").code == 2


def test_explain_shows_the_takes(cli, filled):
    emit(filled, "good", 1, 2)
    emit(filled, "good", 1, 2, 3, delivery=2)
    out = cli("explain", "good").out
    assert "first of 2 parts of take" in out
    assert "first of 3 parts of take" in out
