"""The history of real workers agrees with the result store and with the events."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from aztask import App
from aztask.operate.history import history
from aztask.stores.records.base import State

APP = """
import time
from aztask import App, RetryPolicy
app = App("shop", broker={place!r}, results={place!r}, events={events!r})

@app.task(name="shop.pay", retry=RetryPolicy(max_retries=2, delay=0.01))
def pay(number):
    time.sleep(0.02)
    if number % 5 == 0:
        raise ValueError(f"no {{number}}")

@app.task(name="shop.ship", queue="parcels")
def ship(number):
    pass

@app.task(name="shop.wait")
def wait(path):
    open(path, "w").close()
    time.sleep(60)
"""


def start(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "aztask", "-A", "shopapp:app", "worker"]
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.Popen(
        [*command, "-Q", "default,parcels", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.fixture
def app(tmp_path: Path) -> Any:
    place = f"local://{tmp_path}/queues.db"
    text = APP.format(place=place, events=str(tmp_path / "events"))
    (tmp_path / "shopapp.py").write_text(text)
    names: dict[str, Any] = {}
    exec(text, names)  # noqa: S102  # the text above
    yield names["app"]
    names["app"].close()


def events(folder: Path) -> Counter[tuple[str, str]]:
    """How many events of each kind and task the workers wrote."""
    found: Counter[tuple[str, str]] = Counter()
    for path in (folder / "events").rglob("*.jsonl"):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            found[event["event"], event["task"]] += 1
    return found


def test_the_history_counts_what_the_store_and_the_events_have(app: App, tmp_path: Path) -> None:
    app.tasks["shop.pay"].map([(number,) for number in range(40)])
    app.tasks["shop.ship"].map([(number,) for number in range(25)])
    workers = [start(tmp_path, "--burst", "-c", "2", "--name", name) for name in ("a", "b")]
    for worker in workers:
        assert worker.wait(60) == 0
    assert app.results is not None
    stored = Counter((run.task, run.state) for run in app.results.recent(limit=1000))
    view = history(app, by="task")
    seen = events(tmp_path)
    rows = dict(view.figures())
    for task in ("shop.pay", "shop.ship"):
        figure = rows[task]
        assert figure.succeeded == stored[task, State.SUCCEEDED] == seen["succeeded", task]
        assert figure.failed == stored[task, State.FAILED] == seen["failed", task]
        assert figure.retried == seen["resubmitted", task]
        assert figure.ended == seen["started", task]
    assert (rows["shop.pay"].succeeded, rows["shop.pay"].failed) == (32, 8)
    assert rows["shop.pay"].retried == 16
    pay = dict(view.rows)["shop.pay"]
    assert sum(pay.runs.values()) == 56
    assert sum(pay.waits.values()) == 40  # first runs alone
    median = rows["shop.pay"].run_median
    assert median is not None and 0.02 <= median < 0.2
    # The same runs by queue and by worker; and both workers are known as started.
    queues = {name: figure.ended for name, figure in history(app, by="queue").figures()}
    assert queues == {"default": 56, "parcels": 25}
    people = history(app, by="worker")
    assert sum(figure.ended for _, figure in people.figures()) == 81
    assert {each.worker for each in people.starts} <= {"a", "b"}
    for window in ("day", "week", "30d"):
        assert history(app, window).figure == view.figure
    one = history(app, "hour", "task", {"queue": "parcels"})
    assert [name for name, _ in one.rows] == ["shop.ship"]


def test_a_worker_that_is_stopped_writes_what_it_did_last(app: App, tmp_path: Path) -> None:
    app.tasks["shop.ship"].map([(number,) for number in range(5)])
    app.send("shop.wait", [str(tmp_path / "started")])
    worker = start(tmp_path, "-c", "2", "--shutdown-timeout", "0s", "--shutdown-grace", "1s")
    wait_until((tmp_path / "started").exists, 30, "the task runs")
    ended = lambda: {name: each.ended for name, each in history(app, by="task").figures()}  # noqa: E731
    wait_until(lambda: ended().get("shop.ship") == 5, 30, "the history is written while it runs")
    app.tasks["shop.ship"].map([(number,) for number in range(3)])
    wait_until(lambda: app.broker.stats("parcels").living == 0, 30, "they have run")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(30) == 0
    assert ended()["shop.ship"] == 8
