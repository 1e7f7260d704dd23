"""The event log of a real run with kills, a freeze and failures, compared with plain Python."""

import json
from collections import Counter

from browser import dom_of, screenshot
from events_reference import check_lengths, compare, groups, lengths, lengths_over_time
from events_site import line
from realrun import QUICK

from aztask.operate.cli.main import run
from aztask.spark import compact, place_of, read_events
from aztask.spark.events.statistics import ACCURACY
from aztask.stores.events.sink import read_events as read_plainly

NOW = 4_000_000_000.0


def test_every_figure_of_a_real_run(spark, real_run, tmp_path, capsys):
    directory, number = real_run
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
    runs = lengths(plain_events)
    compared = check(before, expected, runs, plain_events)
    assert compared > 400
    assert before["total"]["run_cut_off"] > 4, "two workers and their leases were lost"
    assert sum(cut for _, cut in runs["ledger.too_long", None]) > 0
    assert before["counts"]["events"] == len({event.id for event in plain_events})
    assert (
        sum(before["counts"]["odd"].values()) - before["counts"]["odd"].get("clock went back", 0)
        == plain_reader.skipped + damage["corrupt"]
    )
    assert before["counts"]["duplicates"] == damage["duplicates"]

    compact(spark, place_of(directory), now=NOW)
    page = tmp_path / "report.html"
    after = figures(capsys, str(directory), "--html", str(page))
    assert check(after, expected, runs, plain_events) == compared
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


def check(found, expected, runs, events):
    """Compare every figure with plain Python's; how many there were."""
    assert found["accuracy"] == ACCURACY
    compared = compare(found["total"], expected["total"][()])
    compared += check_lengths(found["total"], runs[None, None])
    for row in found["tasks"]:
        compared += check_lengths(row, runs[row["task"], None])
    for row in found["queues"]:
        compared += check_lengths(row, runs[None, row["queue"]])
    for level, keys in (
        ("task", ["task"]),
        ("queue", ["queue"]),
        ("queue_hour", ["queue", "hour"]),
    ):
        rows = {tuple(row[key] for key in keys): row for row in found[f"{level}s"]}
        assert rows.keys() == expected[level].keys()
        for key, row in rows.items():
            compared += compare(row, expected[level][key])
    for (queue, hour), its in lengths_over_time(events, 3600, by_queue=True).items():
        (row,) = (r for r in found["queue_hours"] if (r["queue"], r["hour"]) == (queue, hour))
        compared += check_lengths(row, its)
    step = found["step_seconds"]
    for (_, at), its in lengths_over_time(events, step, by_queue=False).items():
        (row,) = (row for row in found["timeline"] if row["at"] == at)
        assert row["run_cut_off"] == sum(cut for _, cut in its)
        compared += 1
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


def test_the_table_is_for_people(real_run, spark, capsys):
    directory, _ = real_run
    assert run(["spark", "stats", str(directory)]) == 0
    out, err = capsys.readouterr()
    assert "ledger.flaky" in out
    assert "WAIT P99" in out
    assert "events" in out.splitlines()[-1]
    assert "statistics of" in err


def test_events_are_read_from_where_the_settings_say(real_run, spark, capsys, monkeypatch):
    directory, _ = real_run
    compact(spark, place_of(directory), now=NOW)  # unless an earlier test has
    monkeypatch.setenv("AZTASK_EVENTS", str(directory))
    assert run(["spark", "compact", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["compacted_files"] == 0
    monkeypatch.delenv("AZTASK_EVENTS")
    assert run(["spark", "stats"]) == 4
    assert "give one" in capsys.readouterr().err
    assert read_events(spark, directory).counts.compacted_files > 0
