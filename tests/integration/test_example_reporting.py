"""The examples `sentry/` and `structlog/`: what the real libraries report and log of tasks."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import wait_until

ROOT = Path(__file__).parents[2]


@contextmanager
def example(name, folder):
    """Copies the example; yields its folder and a function that runs a program in it."""
    shutil.copytree(ROOT / "examples" / name, folder / name)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*words, **more):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=folder / name,
            env={**environment, **more},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    yield folder / name, run


def worker(*words):
    return ["-m", "aztask", "-A", "shop:app", "worker", *words]


def read(folder):
    """The events that the receiver has taken."""
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("pool", ["processes", "threads", "asyncio"])
def test_sentry_gets_failures_kills_and_one_trace(pool, tmp_path):
    with example("sentry", tmp_path) as (folder, run):
        receiver = subprocess.Popen([sys.executable, "receiver.py"], cwd=folder)
        try:
            wait_until((folder / "dsn").exists, 20, "the receiver serves")
            dsn = (folder / "dsn").read_text()
            run("shop.py", SENTRY_DSN=dsn)
            run(*worker("--pool", pool, "-c", "2", "--max-tasks", "4"), SENTRY_DSN=dsn)
            traced = len(read(folder))
            run("shop.py", "endless", SENTRY_DSN=dsn)
            run(*worker("--pool", pool, "--max-tasks", "1"), SENTRY_DSN=dsn)
        finally:
            receiver.send_signal(signal.SIGTERM)
            receiver.wait(10)
        events = read(folder)
    errors = [each for each in events if "exception" in each]
    assert [each["level"] for each in errors] == ["warning", "error"]
    for number, each in enumerate(errors):
        (error,) = each["exception"]["values"]
        assert (error["type"], error["value"]) == ("CardDeclined", "order 7")
        assert error["stacktrace"]["frames"][-1]["function"] == "charge"
        assert each["tags"]["aztask.task"] == "shop.charge"
        assert each["contexts"]["aztask"]["failures before"] == number
    (killed,) = [each for each in events if "message" in each]
    assert "time limit of 0.5 s was exceeded" in killed["message"]
    assert killed["tags"]["aztask.task"] == "shop.endless"
    transactions = [each for each in events[:traced] if each.get("type") == "transaction"]
    names = [each["transaction"] for each in transactions]
    assert {"POST /orders", "shop.mail", "shop.charge"} <= set(names)
    traces = {each["contexts"]["trace"]["trace_id"] for each in [*transactions, *errors]}
    assert len(traces) == 1, "the runs continue the trace of the request"


@pytest.mark.parametrize("pool", ["processes", "asyncio"])
def test_structlog_binds_the_task_and_the_senders_request(pool, tmp_path):
    with example("structlog", tmp_path) as (_, run):
        run("shop.py")
        text = run(*worker("--pool", pool, "-c", "4", "--max-tasks", "9"))
    found = defaultdict(list)
    for line in map(json.loads, text.splitlines()):
        found[line["request_id"], line["task"]].append(line)
    assert len(found) == 6
    for order in ("1", "2", "3"):
        charge = found[f"r-{order}", "shop.charge"]
        assert [(each["event"], each["attempt"]) for each in charge] == [
            ("asking the bank", 1),
            ("failed", 1),
            ("asking the bank", 2),
            ("succeeded", 2),
        ]
        assert len({each["task_id"] for each in charge}) == 1
        mail = found[f"r-{order}", "shop.mail"]
        assert [each["event"] for each in mail] == ["connecting", "sent", "succeeded"]
        assert {each.get("order", int(order)) for each in mail} == {int(order)}
