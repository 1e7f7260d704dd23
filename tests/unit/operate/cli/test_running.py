import json
import time

import pytest

from aztask.settlement import Complete
from aztask.stores.records.base import (
    Finish,
    Outcome,
    RunKey,
    RunningTask,
    Start,
    State,
    WorkerRecord,
)


@pytest.fixture
def running(filled):
    now = time.time()
    progress = filled.codec.encode_value({"page": 7})
    new = RunningTask("n-1", "resize", "images", now - 3, progress=progress)
    old = RunningTask("o-1", "report", "x", now - 7300, retries=2)
    cut = RunningTask("c-1", "report", "y", now - 400, progress=b"\xc1")
    for name, seen_at, tasks in (("here", now, (old, new)), ("gone", now - 280, (cut,))):
        filled.results.heartbeat(
            WorkerRecord(name, now - 9000, seen_at, ("x",), len(tasks), 5, tasks=tasks)
        )
    return filled


def ids(cli, *arguments):
    lines = cli("running", "--json", *arguments).out.splitlines()
    return [json.loads(line)["id"] for line in lines]


def test_the_longest_first_of_a_silent_worker_up_to_its_last_sign(cli, running):
    lines = [json.loads(line) for line in cli("running", "--json").out.splitlines()]
    assert [(each["id"], each["state"]) for each in lines] == [
        ("o-1", "alive"),
        ("c-1", "silent"),
        ("n-1", "alive"),
    ]
    assert 7300 <= lines[0]["running_seconds"] < 7400
    assert 119 <= lines[1]["running_seconds"] <= 121
    assert lines[0]["retries"] == 2
    assert lines[0]["worker"] == "here"
    assert [each["progress"] for each in lines] == [None, None, {"page": 7}]
    assert lines[0]["started_at"] < lines[1]["started_at"] < lines[0]["seen_at"]


def test_as_a_table(cli, running):
    lines = cli("running").out.splitlines()
    heads = ["ID", "TASK", "QUEUE", "RETRIES", "FOR", "WORKER", "STATE", "PROGRESS"]
    assert lines[0].split() == heads
    assert lines[1].split() == ["o-1", "report", "x", "2", "2h", "here", "alive", "-"]
    assert lines[3].endswith('{"page": 7}')


def test_those_that_are_asked_for(cli, running):
    assert ids(cli, "--longer", "1m") == ["o-1", "c-1"]
    assert ids(cli, "--longer", "1h") == ["o-1"]
    assert ids(cli, "-Q", "y,images") == ["c-1", "n-1"]
    assert ids(cli, "-Q", "y", "-Q", "x") == ["o-1", "c-1"]
    assert ids(cli, "--task", "resize") == ["n-1"]
    assert ids(cli, "--task", "report", "-Q", "images") == []


def test_a_duration_that_is_none(cli, running):
    ended = cli("running", "--longer", "soon")
    assert ended.code == 2
    assert "not a duration" in ended.error


def test_what_has_ended_since_the_last_heartbeat_of_a_killed_worker_is_left_out(cli, filled):
    now = time.time()
    tasks = tuple(
        RunningTask(name, "report", "x", now - 300) for name in ("done", "moved", "still", "lost")
    )
    for name, worker in (("done", "gone"), ("moved", "other"), ("still", "gone")):
        filled.results.start([Start(RunKey(name), "report", "x", 1, name, worker, now - 301)])
    outcome = Outcome(State.SUCCEEDED, Complete(), at=now - 100)
    filled.results.record([Finish(RunKey("done"), "done", outcome)])
    filled.results.heartbeat(WorkerRecord("gone", now - 900, now - 280, ("x",), 4, 5, tasks=tasks))
    assert sorted(ids(cli)) == ["lost", "still"]
    (worker,) = [json.loads(line) for line in cli("workers", "--json").out.splitlines()]
    assert (worker["state"], worker["running"]) == ("silent", 2)
