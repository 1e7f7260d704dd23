"""``aztask explain``: a task's history from rows and events."""

import json

from aztask.operate.cli import failures
from aztask.stores.events.event import Event
from aztask.stores.events.sink import FileEventSink


def test_what_the_rows_know(cli, filled):
    done = cli("explain", "bad")
    assert done.code == 0
    lines = [line.strip() for line in done.out.splitlines()]
    assert lines[0].startswith("shop.add  bad  failed")
    assert "gap: no event directory is configured here" in lines[1]
    assert any("retrying" in line and "settlement: resubmit, due in 1 s" in line for line in lines)
    assert lines[-1].endswith("settlement: dead-letter, retries-exhausted")
    assert "\x1b" not in done.out


def test_events_of_a_directory_as_json(cli, filled, tmp_path):
    sink = FileEventSink(tmp_path / "events", "w1")
    sink.emit(Event("received", "good", "shop.add", "default", 1, workflow_id="w", parent_id="p"))
    sink.emit(Event("renewed", "good", "shop.add", "default", 1, error="key=AccountKey=abc;"))
    sink.close()
    done = cli("explain", "good", "--events", str(tmp_path / "events"), "--json")
    head, *entries = map(json.loads, done.out.splitlines())
    assert (head["id"], head["state"], head["workflow_id"], head["parent_id"]) == (
        ("good", "succeeded", "w", "p")
    )
    assert head["gaps"] == sum(entry["kind"] == "gap" for entry in entries)
    received = next(entry for entry in entries if entry["kind"] == "received")
    assert (received["worker"], received["delivery_count"]) == ("w1", 1)
    assert received["source"] in ("event", "both")


def test_a_task_that_nothing_knows(cli, filled):
    done = cli("explain", "nobody")
    assert done.code == failures.NOT_FOUND
    assert "know a task 'nobody'" in done.err
    waits = cli("explain", "waits")
    assert "gap: hop 0 was sent, and no worker has started it" in waits.out


def test_nothing_to_read_is_one_line(cli, monkeypatch):
    cli.make_file()
    monkeypatch.setenv("AZTASK_BROKER", cli.address)
    monkeypatch.delenv("AZTASK_RESULTS", raising=False)
    done = cli("explain", "good")
    assert done.code == failures.CONFIGURATION
    assert "nothing to read" in done.err
