import json
import time
from dataclasses import replace

import pytest

from aztask.stores.records.base import WorkerRecord


@pytest.fixture
def workers(filled):
    now = time.time()
    for name, seen_at, stopped in (("a", now, False), ("b", now - 60, False), ("c", now, True)):
        record = WorkerRecord(name, now - 7200, seen_at, ("x", "y"), 2, 5, stopped)
        record = replace(record, release="0.1.0 shop-7" if name == "a" else "")
        filled.results.heartbeat(record)
    return filled


def test_alive_silent_or_stopped(cli, workers):
    lines = [json.loads(line) for line in cli("workers", "--json").out.splitlines()]
    assert {each["worker"]: each["state"] for each in lines} == {
        "a": "alive",
        "b": "silent",
        "c": "stopped",
    }
    assert lines[0]["queues"] == ["x", "y"]


def test_as_a_table(cli, workers):
    lines = cli("workers").out.splitlines()
    assert lines[0].split() == [
        "WORKER",
        "STATE",
        "QUEUES",
        "RUNNING",
        "LEASED",
        "FINISHED",
        "STARTED",
        "SEEN",
        "VERSION",
    ]
    assert "shop-7 (aztask 0.1.0)" in lines[1]
    assert "2h ago" in lines[1]
