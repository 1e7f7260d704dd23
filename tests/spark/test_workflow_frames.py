"""Statistics of workflows: from lines and compacted files, beside events without workflows."""

import json
from contextlib import closing
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from browser import opened

from aztask.operate.cli.main import run
from aztask.spark import read_events, workflow_statistics
from aztask.spark.events.lines import ARROW, CLOCK_BACK, WORKFLOW
from aztask.spark.events.statistics import plain
from aztask.spark.events.workflows import PATH_STEPS
from aztask.spark.report.page import render
from aztask.spark.report.summary import summarize
from aztask.stores.events.event import Event
from aztask.stores.events.sink import FileEventSink

# chain(1, group 2 of (3, 4), 5): node 2 is the group
TASKS = ((1, None, 0.0, 2.0), (3, 1, 2.5, 3.0), (4, 1, 2.5, 9.0), (5, 2, 9.25, 10.0))


def task(sink, workflow, number, parent, started, ended, kind="succeeded"):
    """The events of one task, whose times are seconds after 1000."""
    names = {
        "workflow_id": workflow,
        "parent_id": None if parent is None else f"{workflow}.{parent}",
    }
    about = (f"{workflow}.{number}", "shop.page", "default")
    sink.emit(Event("enqueued", *about, ts=1000.0 + started, **names))
    sink.emit(Event("started", *about, 1, ts=1000.0 + started, **names))
    seconds = ended - started
    sink.emit(Event(kind, *about, 1, ts=1000.0 + ended, duration_seconds=seconds, **names))


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Two workflows, a task without one, and a compacted file of an older release."""
    folder = tmp_path_factory.mktemp("workflows")
    sink = FileEventSink(folder, "w1")
    for each in TASKS:
        task(sink, "order-7", *each)
    task(sink, "order-8", 1, None, 0.0, 1.0, "failed")
    sink.emit(Event("dead_lettered", "order-8.1", "shop.page", "default", 1, ts=1001.1))
    sink.emit(Event("succeeded", "alone", "shop.page", "default", 1, ts=1000.0))
    sink.close()
    (hour,) = folder.glob("date=*/hour=*")
    old = [name for name in ARROW.names if name not in WORKFLOW]
    row = {"id": "old", "event": "succeeded", "ts": 1000.0, "task_id": "old", "task": "shop.page"}
    row |= {"queue": "default", "worker": "w0", "delivery_count": 1, "resubmit_count": 0}
    schema = pa.schema([ARROW.field(name) for name in old])
    pq.write_table(pa.Table.from_pylist([row], schema), hour / "old.parquet")
    return folder


def test_workflows_their_paths_and_their_slowest_tasks(spark, log):
    events = read_events(spark, log)
    assert events.counts.events == 18
    assert set(events.counts.odd) <= {CLOCK_BACK}
    figures = workflow_statistics(events.events)
    longest, failed = plain(figures.workflows)
    assert (longest["workflow_id"], longest["tasks"], longest["runs"]) == ("order-7", 4, 4)
    assert longest["seconds"] == pytest.approx(10.0)
    assert longest["busy_seconds"] == pytest.approx(2.0 + 0.5 + 6.5 + 0.75)
    assert (longest["slowest_task_id"], longest["slowest_seconds"]) == ("order-7.4", 6.5)
    assert (failed["workflow_id"], failed["failed"]) == ("order-8", 1)
    path = [row for row in plain(figures.critical_paths) if row["workflow_id"] == "order-7"]
    assert [(row["step"], row["task_id"], row["wait_seconds"]) for row in path] == [
        (1, "order-7.1", 0.0),
        (2, "order-7.4", 0.5),
        (3, "order-7.5", 0.25),
    ]
    slowest = plain(workflow_statistics(events.events, "order-7").slowest(2))
    assert [row["task_id"] for row in slowest] == ["order-7.4", "order-7.1"]
    alone = events.events.where("workflow_id is null").count()
    assert alone == 3, "tasks without a workflow, and events of older releases"
    events.close()


def test_the_report_has_the_longest_and_where_their_time_went(spark, tmp_path):
    """Against plain Python: order-7 of the log, and a workflow with a retry on its path."""
    with closing(FileEventSink(tmp_path, "w2")) as sink:
        for each in TASKS:
            task(sink, "order-7", *each)
        about = {"workflow_id": "late", "parent_id": "late.1"}
        task(sink, "late", 1, None, 0.0, 10.0)
        for kind, start, end in (("resubmitted", 12.0, 13.0), ("succeeded", 33.0, 40.0)):
            its = ("late.2", "shop.mail", "default", 1)
            sink.emit(Event("started", *its, ts=1000.0 + start, **about))
            seconds = end - start
            sink.emit(Event(kind, *its, ts=1000.0 + end, duration_seconds=seconds, **about))
        for number in range(1, 31):  # a chain of thirty, of which the longest ten are told
            task(sink, "chain", number, number - 1 or None, number * 1.0, number + number**2 / 1000)
        sink.emit(Event("started", "open.1", "shop.page", "default", ts=1.0, workflow_id="open"))
    read = read_events(spark, tmp_path)
    summary = summarize(read)
    assert [row["workflow_id"] for row in summary.workflows] == ["late", "chain", "order-7"]
    late, chain, order = summary.workflows
    parts = ("wait_seconds", "ran_seconds", "between_seconds")
    assert [late[part] for part in parts] == pytest.approx([2.0, 10.0 + 1.0 + 7.0, 20.0])
    assert sum(late[part] for part in parts) == pytest.approx(late["seconds"])
    assert [step["task_id"] for step in late["path"]] == ["late.1", "late.2"]
    assert late["path"][1]["runs"] == 2
    assert [order[part] for part in parts] == pytest.approx([0.75, 2.0 + 6.5 + 0.75, 0.0])
    assert (chain["steps"], len(chain["path"])) == (30, PATH_STEPS)
    waits = sum(1 - number**2 / 1000 for number in range(1, 30))
    assert chain["wait_seconds"] == pytest.approx(waits)
    assert [step["step"] for step in chain["path"]] == list(range(21, 31))
    assert summarize(read, details=False).workflows == []
    read.close()
    page = tmp_path / "page.html"
    page.write_text(render(summary))
    for dark in (False, True):
        with opened(page.as_uri(), dark=dark) as shown:
            section = shown.locator("section", has_text="Workflows that took longest")
            assert section.locator("svg[role=img] rect").count() == 3 + 2 + 2
            cells = section.locator("table").first.locator("tbody tr").first.inner_text()
            assert "late" in cells
            assert "20 s (50.0 %)" in cells
    assert "Workflows that took longest" not in render(replace(summary, workflows=[]))


def test_the_command(spark, log, capsys):
    assert run(["spark", "workflows", str(log), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["workflow_id"] for row in rows] == ["order-7", "order-8"]
    assert run(["spark", "workflows", str(log)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split()[:2] == ["WORKFLOW", "TOOK"]
    assert shown[1].split()[:4] == ["order-7", "10", "s", "4"]
    assert run(["spark", "workflows", str(log), "--id", "order-7"]) == 0
    shown = capsys.readouterr().out
    assert "order-7: 10 s, 4 tasks, 0 failed" in shown
    assert shown.index("order-7.1") < shown.index("order-7.4") < shown.index("order-7.5")
    assert run(["spark", "workflows", str(log), "--id", "other"]) == 5
    assert "no event there belongs to workflow other" in capsys.readouterr().err


def test_a_log_without_workflows_says_so(spark, tmp_path, capsys):
    with closing(FileEventSink(tmp_path, "w")) as sink:
        sink.emit(Event("started", "alone", "shop.page", "default", 1, ts=1000.0))
    assert run(["spark", "workflows", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("no workflow among the events of 1 file")
