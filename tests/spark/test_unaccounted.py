"""Runs that the result store knows and the event log lacks are named."""

import json
import os
import subprocess
import sys

import pytest

from aztask import App
from aztask.operate.cli import main
from aztask.spark import read_events
from aztask.spark.events.unaccounted import unaccounted_runs

MODULE = """
from aztask import App, RetryPolicy
app = App("post", retry=RetryPolicy(max_retries=1, delay=0.01))

@app.task
def deliver(number):
    if number == 3:
        raise ValueError("no address")

@app.task
def sort(number):
    pass
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(the events, the app's module, {task: the ids of its tasks}) of thirty runs of a worker."""
    folder = tmp_path_factory.mktemp("post")
    (folder / "post.py").write_text(MODULE)
    variables = {
        "AZTASK_BROKER": f"local://{folder}/q.db",
        "AZTASK_RESULTS": f"local://{folder}/q.db",
        "AZTASK_EVENTS": str(folder / "events"),
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
    }
    sent = {"post.deliver": [f"d{n}" for n in range(20)], "post.sort": [f"s{n}" for n in range(10)]}
    app = App("post", broker=variables["AZTASK_BROKER"], results=variables["AZTASK_RESULTS"])
    for task, ids in sent.items():
        for number, task_id in enumerate(ids):
            app.send(task, [number], task_id=task_id)
    app.close()
    worker = [sys.executable, "-m", "aztask", "worker", "-A", "post", "--burst"]
    ended = subprocess.run(
        worker, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return folder / "events", variables


def without(events, folder, lost):
    """A copy of the log that lacks the events of these tasks, or that `lost` says."""
    for path in events.glob("date=*/hour=*/*.jsonl"):
        target = folder / path.relative_to(events)
        target.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines(keepends=True)
        target.write_text("".join(line for line in lines if not lost(json.loads(line))))
    return folder


def unaccounted(spark, folder, variables):
    app = App("post", broker=variables["AZTASK_BROKER"], results=variables["AZTASK_RESULTS"])
    try:
        rows = unaccounted_runs(read_events(spark, folder).events, app.results).collect()
    finally:
        app.close()
    return {row["task_id"]: row for row in rows}


def test_no_run_of_a_whole_log_is_unaccounted(spark, run):
    assert unaccounted(spark, *run) == {}


def test_runs_whose_events_are_lost_are_named(spark, run, tmp_path):
    events, variables = run
    lost = ("d5", "d6", "s1")
    folder = without(events, tmp_path, lambda event: event["task_id"] in lost)
    found = unaccounted(spark, folder, variables)
    assert found.keys() == set(lost)
    assert (found["d5"]["task"], found["d5"]["state"]) == ("post.deliver", "succeeded")
    assert found["s1"]["worker"]


def test_a_run_that_the_log_has_only_the_beginning_of_is_cut_off_not_unaccounted(
    spark, run, tmp_path
):
    events, variables = run
    gone = ("succeeded", "failed", "settled")
    folder = without(
        events, tmp_path, lambda event: event["task_id"] == "d5" and event["event"] in gone
    )
    assert unaccounted(spark, folder, variables) == {}


def test_runs_outside_the_span_of_the_log_are_not_asked_for(spark, run, tmp_path):
    events, variables = run
    times = [
        json.loads(line)["ts"]
        for path in events.glob("date=*/hour=*/*.jsonl")
        for line in path.read_text().splitlines()
    ]
    middle = sorted(times)[len(times) // 2]
    folder = without(events, tmp_path, lambda event: event["ts"] > middle)
    later = unaccounted(spark, folder, variables)
    assert all(row["at"] <= middle for row in later.values())


def test_the_command_names_them(spark, run, tmp_path, monkeypatch, capsys):
    events, variables = run
    for name in ("AZTASK_BROKER", "AZTASK_RESULTS"):
        monkeypatch.setenv(name, variables[name])
    folder = without(events, tmp_path, lambda event: event["task_id"] in ("d5", "d6"))
    assert main.run(["spark", "stats", str(folder), "--store", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["unaccounted"] == [{"task": "post.deliver", "runs": 2, "example": "d5"}]
    page = tmp_path / "page.html"
    assert main.run(["spark", "stats", str(folder), "--store", "--html", str(page)]) == 0
    text = "post.deliver: 2 runs unaccounted, which the result store knows and the log lacks"
    assert text in capsys.readouterr().out
    assert text in page.read_text()
    assert main.run(["spark", "stats", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["unaccounted"] is None


def test_without_a_result_store_one_line_says_what_to_name(spark, run, monkeypatch, capsys):
    events, variables = run
    monkeypatch.setenv("AZTASK_BROKER", variables["AZTASK_BROKER"])
    monkeypatch.delenv("AZTASK_RESULTS", raising=False)
    assert main.run(["spark", "stats", str(events), "--store"]) == 4
    assert "--store compares with the result store" in capsys.readouterr().err
