"""From a log to published leases: the job, the document, the command, and a worker."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict

import pytest
from events_reference import cut_off
from events_site import as_frame, random_event, write_log

from aztask import App
from aztask.errors import AztaskError
from aztask.leaseadvice.advice import Observation, bin_of
from aztask.leaseadvice.document import QueueEntry, publish_advice
from aztask.leaseadvice.stores import LeaseFile
from aztask.operate.cli import main
from aztask.queues.lease.bounds import Bounds
from aztask.spark.events.frame import read_events
from aztask.spark.events.lengths import CUT_OFF
from aztask.spark.events.statistics import OUTCOMES, RAN
from aztask.spark.recommendation.recommend import (
    TRIES,
    QueueEvidence,
    TaskEvidence,
    observe,
    publish_evidence,
)
from aztask.stores.events.sink import read_events as read_plainly

BOUNDS = Bounds(30.0, 600.0)


def test_what_is_observed_is_what_a_plain_count_says(spark, tmp_path):
    draw = random.Random(4)
    write_log(tmp_path, [random_event(draw, number) for number in range(3000)])
    bins = defaultdict(Counter)
    lease = {}
    for event in read_plainly(tmp_path):
        key, kind = (event.queue, event.task), event.event
        if kind in (*OUTCOMES, "settle_failed"):
            bins[(*key, "held")][bin_of(event.held_seconds)] += 1
        if kind in RAN:
            stopped = "stopped" if event.error_type in CUT_OFF else "run"
            bins[(*key, stopped)][bin_of(event.duration_seconds)] += 1
        if kind == "lease_lost":
            bins[(event.queue, "", "lost")][bin_of(event.lease_seconds)] += 1
        if kind == "settle_failed":
            bins[(event.queue, "", "failed")][bin_of(event.lease_seconds)] += 1
        if kind == "started":
            lease[event.queue] = max(
                lease.get(event.queue, (0.0, 0.0)), (event.ts, event.lease_seconds)
            )
    for task, queue, seconds, held in cut_off(read_plainly(tmp_path)):
        bins[(queue, task, "stopped")][bin_of(seconds)] += 1
        if held is not None:
            bins[(queue, task, "cut")][bin_of(held)] += 1
    seen = observe(read_events(spark, tmp_path).events)
    assert list(seen) == ["queue-0", "queue-1", "queue-2"]
    for queue, found in seen.items():
        assert found.lease_seconds == lease[queue][1]
        assert found.lost == bins[(queue, "", "lost")]
        assert found.failed == bins[(queue, "", "failed")]
        assert len(found.tasks) == 6
        for task, its in found.tasks.items():
            for name in ("held", "cut", "run"):
                assert getattr(its, name) == bins[(queue, task, name)]


def test_edges_of_bins_are_counted_alike(spark):
    seconds = [0.0, 0.009, 0.01, 0.0100001, 0.02, 0.04, 1.28, 2.56, 30.0, 86400.0 * 30, 1e12]
    seconds += [0.01 * 2 ** (number / 8) for number in range(60)]
    rows = [("q", "t", float(n), "succeeded", each, 0.0, 1.0) for n, each in enumerate(seconds)]
    rows += [
        ("q", "t", 0.0, "succeeded", None, None, None),
        ("q", "t", 0.0, "failed", -1.0, 0.0, 1.0),
    ]
    names = "queue string, task string, ts double, event string, held_seconds double, "
    frame = as_frame(spark, rows, names + "duration_seconds double, lease_seconds double")
    assert observe(frame)["q"].tasks["t"].held == Counter(map(bin_of, seconds))


def seen_of(lease, lost=0, seconds=10.0):
    task = TaskEvidence(held=Counter({bin_of(seconds): 500}), run=Counter({bin_of(seconds): 500}))
    return {"q": QueueEvidence("q", lease, {"t": task}, Counter({bin_of(lease): lost}))}


class TestPublish:
    def test_what_changes_is_written_and_what_stays_is_not(self, tmp_path):
        store = LeaseFile(tmp_path / "leases.json")
        first = publish_evidence(seen_of(40.0, lost=10), store, bounds=BOUNDS, at=5.0)
        assert (first.queues, first.revision) == (("q",), 1)
        advice = store.load().document.entry("q").advice
        assert (advice.lease_seconds, advice.source, advice.at) == (80.0, "pipeline", 5.0)
        again = publish_evidence(seen_of(40.0, lost=10), store, bounds=BOUNDS, at=6.0)
        assert (again.queues, again.revision) == ((), 1)

    def test_a_writer_that_comes_between_is_read_and_kept(self, tmp_path):
        path = tmp_path / "leases.json"

        class Overtaken(LeaseFile):
            def publish(self, document, based_on):
                if not self.path.exists():
                    other = LeaseFile(path)
                    now = other.load()
                    counted = QueueEntry(None, Observation({5: 7.0}, at=1.0))
                    assert other.publish(now.document.with_entry("other", counted), now)
                return super().publish(document, based_on)

        done = publish_evidence(seen_of(40.0, lost=10), Overtaken(path), bounds=BOUNDS, at=5.0)
        assert done.revision == 2
        document = LeaseFile(path).load().document
        assert document.entry("other").observed.held == {5: 7.0}
        assert document.entry("q").advice.lease_seconds == 80.0

    def test_a_stale_writer_is_refused(self, tmp_path):
        store = LeaseFile(tmp_path / "leases.json")
        stale = store.load()
        first = publish_evidence(seen_of(40.0, lost=10), store, bounds=BOUNDS, at=5.0)
        assert not publish_advice(store, {"q": first.recommendations[0].advice}, stale)
        assert store.load().document.revision == 1

    def test_one_who_is_always_overtaken_gives_up_and_says_so(self, tmp_path):
        class Busy(LeaseFile):
            tries = 0

            def publish(self, document, based_on):
                self.tries += 1
                now = self.load()
                assert super().publish(now.document, now)
                return super().publish(document, based_on)

        store = Busy(tmp_path / "leases.json")
        with pytest.raises(AztaskError, match="another writer published first 8 times"):
            publish_evidence(seen_of(40.0, lost=10), store, bounds=BOUNDS)
        assert store.tries == TRIES
        assert store.load().document.queues == {}


MODULE = """
import os, time
from aztask import App

app = App(
    "films",
    broker=f"local://{os.environ['FILMS']}/q.db",
    results=f"local://{os.environ['FILMS']}/q.db",
    lease=1.0, max_lease=120.0, renew_at=1.0,
)

@app.task
def render(name):
    time.sleep(1.6)
    return name
"""


def test_a_lease_that_is_too_short_is_learned_and_nothing_is_lost_any_more(
    spark, tmp_path, monkeypatch, capsys
):
    """Renewals are off, and each run takes longer than its lease."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FILMS", str(tmp_path))
    monkeypatch.setenv("AZTASK_APP", "films:app")
    monkeypatch.setenv("AZTASK_EVENTS", str(tmp_path / "events"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    (tmp_path / "films.py").write_text(MODULE)
    app = App("films", broker=f"local://{tmp_path}/q.db", results=f"local://{tmp_path}/q.db")
    names = [f"film-{number}" for number in range(4)]
    for name in names:
        app.send("films.render", [name], task_id=name)

    worker = [sys.executable, "-m", "aztask", "worker", "-c", "4", "--pool", "threads"]
    first = subprocess.Popen(worker, stderr=subprocess.DEVNULL)
    give_up_at = time.monotonic() + 30
    while kinds(tmp_path)["lease_lost"] < 4 and time.monotonic() < give_up_at:
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    assert first.wait(30) == 0
    before = kinds(tmp_path)
    assert before["lease_lost"] >= 4
    assert before["succeeded"] == 0

    monkeypatch.setenv("AZTASK_LEASE_ADVICE", str(tmp_path / "leases.json"))
    (found,) = recommend(capsys, "--publish")
    assert (found["queue"], found["current_lease_seconds"]) == ("default", 1.0)
    assert found["advice"]["lease_seconds"] == 30.0
    assert found["advice"]["evidence"]["lost_leases"] == before["lease_lost"]
    assert "leases were lost" in found["reasons"]["lease"]

    subprocess.run([*worker, "--burst"], check=True, timeout=60, stderr=subprocess.DEVNULL)
    after = kinds(tmp_path)
    assert (after["succeeded"], after["lease_lost"]) == (4, before["lease_lost"])
    assert [app.result(name).get(timeout=5) for name in names] == names
    leases = {event.lease_seconds for event in events(tmp_path) if event.event == "succeeded"}
    assert leases == {30.0}

    (again,) = recommend(capsys, "--publish")  # over the whole log: it stands
    assert again["advice"]["lease_seconds"] == 30.0
    assert LeaseFile(tmp_path / "leases.json").load().document.revision >= 1
    table = run(capsys).splitlines()
    assert table[0].split()[:2] == ["QUEUE", "DELIVERIES"]
    assert any(line.startswith("  lease: kept") for line in table)
    app.close()


def events(folder):
    return list(read_plainly(folder / "events"))


def kinds(folder):
    return Counter(event.event for event in events(folder))


def run(capsys, *arguments):
    capsys.readouterr()
    code = main.run(["spark", "recommend", *arguments])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def recommend(capsys, *arguments):
    return [json.loads(line) for line in run(capsys, "--json", *arguments).splitlines()]


def test_what_is_missing_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("AZTASK_EVENTS", "AZTASK_LEASE_ADVICE", "AZTASK_APP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AZTASK_BROKER", f"local://{tmp_path}/q.db")
    assert main.run(["spark", "recommend"]) == 4
    assert "there is no PATH to events" in capsys.readouterr().err
    assert main.run(["spark", "recommend", "--events", str(tmp_path), "--publish"]) == 4
    assert "--publish needs a place" in capsys.readouterr().err
    assert main.run(["spark", "recommend", str(tmp_path), "--events", str(tmp_path)]) == 2
    assert "--events is PATH" in capsys.readouterr().err


def test_a_log_is_enough_and_is_named_like_that_of_the_other_commands(
    spark, tmp_path, monkeypatch, capsys
):
    """An analyst has no broker; both spellings, in both commands."""
    monkeypatch.chdir(tmp_path)
    for name in ("AZTASK_EVENTS", "AZTASK_LEASE_ADVICE", "AZTASK_APP", "AZTASK_BROKER"):
        monkeypatch.delenv(name, raising=False)
    draw = random.Random(4)
    write_log(tmp_path / "log", [random_event(draw, number) for number in range(500)])
    first, second = (recommend(capsys, *given) for given in (["log"], ["--events", "log"]))
    assert [row["queue"] for row in first] == ["queue-0", "queue-1", "queue-2"]
    assert [row["reasons"] for row in first] == [row["reasons"] for row in second]
    for given in (["log"], ["--events", "log"]):
        assert main.run(["spark", "stats", *given, "--json"]) == 0
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert json.loads(first)["queues"] == json.loads(second)["queues"]
