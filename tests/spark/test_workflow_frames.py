"""Statistics of workflows: from lines and compacted files, beside events without workflows."""

import json
from contextlib import closing

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aztask.operate.cli.main import run
from aztask.spark import read_events, workflow_statistics
from aztask.spark.events.lines import ARROW, CLOCK_BACK, WORKFLOW
from aztask.spark.events.statistics import plain
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
