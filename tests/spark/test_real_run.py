"""The event log of a real run: kills, a freeze, failures. Every figure against plain Python."""

import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from browser import dom_of, screenshot
from events_reference import compare, groups
from events_site import line

from aztask import App
from aztask.cli.main import run
from aztask.events import read_events as read_plainly
from aztask.events import recover
from aztask.spark import compact, place_of, read_events
from aztask.spark.eventstatistics import ACCURACY

INTEGRATION = Path(__file__).parents[1] / "integration"
QUICK = int(os.environ.get("AZTASK_REAL_RUN_TASKS", "20000"))
LEASE = 2.0
NOW = 4_000_000_000.0


@pytest.fixture(scope="module")
def harness():
    sys.path.insert(0, str(INTEGRATION))
    import harness  # noqa: PLC0415  # of the integration tests

    yield harness
    sys.path.remove(str(INTEGRATION))


def sender(site):
    """The tasks of `ledger_app`, to be sent from here, with events."""
    app = App("ledger", broker=site.broker, results=site.results, events=str(site.events))

    def named(name):
        def task(*args):
            raise AssertionError("not here")

        task.__name__ = name
        return app.task(task)

    names = ("noop", "flaky", "rejecting", "work", "snoozing", "too_long", "ending")
    return app, {name: named(name) for name in names}


def send_all(app, tasks):
    """A little of everything among many that do nothing; how many in all."""
    calls = {
        "too_long": [(f"l{n}",) for n in range(2)],
        "ending": [(f"e{n}", "segfault") for n in range(2)],
        "flaky": [(f"f{n}", 1 + n % 5) for n in range(300)],
        "rejecting": [(f"r{n}", "no") for n in range(40)],
        "work": [(f"w{n}", 0.02) for n in range(200)],
        "snoozing": [(f"s{n}", 2) for n in range(50)],
        "noop": [()] * QUICK,
    }
    for name, arguments in calls.items():
        tasks[name].map(arguments)
    tasks["noop"].with_options(expires=0.001).map([()] * 20)
    return sum(map(len, calls.values())) + 20


@pytest.fixture(scope="module")
def log(harness, tmp_path_factory):
    """(the directory of a real run's events, how many tasks there were)."""
    with harness.site_in(tmp_path_factory.mktemp("real") / "site") as site:
        app, tasks = sender(site)
        number = send_all(app, tasks)
        app.close()
        arguments = ("-c", "4", "--lease", f"{LEASE}s")
        first, second = site.worker(*arguments), site.worker(*arguments)

        def left():
            stats = site.app().broker.stats("default")
            return (stats.active or 0) + (stats.leased or 0) + (stats.scheduled or 0)

        harness.wait_until(lambda: left() < 0.8 * number, 60, "a fifth is done")
        first.signal(signal.SIGKILL)
        second.freeze()
        third = site.worker(*arguments)
        harness.wait_until(lambda: left() < 0.4 * number, 60, "more is done")
        time.sleep(LEASE + 0.5)  # what the frozen worker held is lost by now
        second.signal(signal.SIGCONT)
        harness.wait_until(lambda: left() == 0, 90, "everything is done")
        assert third.stop() == 0
        assert second.stop() == 0
        recover(site.events)
        yield site.events, number


def test_every_figure_of_a_real_run(spark, log, tmp_path, capsys):
    directory, number = log
    plain_reader = read_plainly(directory, published_only=True)
    plain_events = list(plain_reader)
    expected = groups(plain_events)
    kinds = Counter(event.event for event in plain_events)
    assert number >= QUICK
    assert kinds["succeeded"] >= 0.9 * number  # a kill takes what was not written yet
    for kind in ("resubmitted", "failed", "dead_lettered", "lease_lost", "snoozed", "expired"):
        assert kinds[kind] > 0, kinds
    assert len({event.worker for event in plain_events}) == 4
    damage = damaged(directory, plain_events)

    before = figures(capsys, str(directory))
    compared = check(before, expected)
    assert compared > 400
    assert before["counts"]["events"] == len({event.id for event in plain_events})
    assert (
        sum(before["counts"]["odd"].values()) - before["counts"]["odd"].get("clock went back", 0)
        == plain_reader.skipped + damage["corrupt"]
    )
    assert before["counts"]["duplicates"] == damage["duplicates"]

    compact(spark, place_of(directory), now=NOW)
    page = tmp_path / "report.html"
    after = figures(capsys, str(directory), "--html", str(page))
    assert check(after, expected) == compared
    for same in ("events", "duplicates", "odd"):
        assert after["counts"][same] == before["counts"][same]
    assert after["counts"]["compacted_files"] == after["counts"]["files"]
    check_page(page, after, tmp_path)


def damaged(directory, events):
    """What a kill and a power cut may leave, and an event that was copied."""
    folder = next(directory.glob("date=*/hour=*"))
    torn = line(events[0])[:40]
    (folder / "torn-1.jsonl").write_bytes(line(events[1]) + b"\0" * 64 + b"\n[1]\n" + torn)
    return {"corrupt": 3, "duplicates": 1}


def figures(capsys, *arguments):
    """What ``aztask spark stats --json`` prints."""
    assert run(["spark", "stats", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def check(found, expected):
    """Compare every figure with plain Python's; how many there were."""
    assert found["accuracy"] == ACCURACY
    compared = compare(found["total"], expected["total"][()])
    for level, keys in (
        ("task", ["task"]),
        ("queue", ["queue"]),
        ("queue_hour", ["queue", "hour"]),
    ):
        rows = {tuple(row[key] for key in keys): row for row in found[f"{level}s"]}
        assert rows.keys() == expected[level].keys()
        for key, row in rows.items():
            compared += compare(row, expected[level][key])
    for kind in ("succeeded", "failed", "resubmitted", "lease_lost"):
        in_time = sum(row[kind] for row in found["timeline"])
        assert in_time == expected["total"][()].kinds[kind]
    return compared


def check_page(page, found, folder):
    """The browser shows the figures, loads nothing, and draws something."""
    dom = dom_of(page)
    assert f"<strong>{found['total']['runs']:,}<" in dom
    for row in found["tasks"]:
        assert row["task"] in dom
    assert dom.count("<svg") >= 8
    assert "http://" not in dom.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in dom
    assert "<script" not in dom
    image = screenshot(page, folder / "report.png")
    assert image.startswith(b"\x89PNG")
    assert len(image) > 50_000  # a blank page is a tenth of that


def test_the_table_is_for_people(log, spark, capsys):
    directory, _ = log
    assert run(["spark", "stats", str(directory)]) == 0
    out, err = capsys.readouterr()
    assert "ledger.flaky" in out
    assert "WAIT P99" in out
    assert "events" in out.splitlines()[-1]
    assert "statistics of" in err


def test_events_are_read_from_where_the_settings_say(log, spark, capsys, monkeypatch):
    directory, _ = log
    monkeypatch.setenv("AZTASK_EVENTS", str(directory))
    assert run(["spark", "compact", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["compacted_files"] == 0
    monkeypatch.delenv("AZTASK_EVENTS")
    assert run(["spark", "stats"]) == 4
    assert "give a PATH" in capsys.readouterr().err
    assert read_events(spark, directory).counts.compacted_files > 0
