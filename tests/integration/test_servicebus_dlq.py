"""``aztask dlq`` on Service Bus: letters that a worker made, seen, replayed and purged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bus import bus_site
from harness import Site, wait_until
from ledger_app import flaky, rejecting, snoozing

from aztask.message.envelope import Envelope
from aztask.queues.base import QueueOptions
from aztask.stores.records.base import State
from aztask.testing import RunningEmulator

LEASE = 5.0
ARGUMENTS = ("-Q", "default", "-c", "2", "--lease", f"{LEASE}s", "--max-lease", "60s")


@pytest.fixture
def site(bus: RunningEmulator, tmp_path: Path) -> Iterator[Site]:
    """A queue that drops duplicates within ten minutes."""
    options = QueueOptions(lease=LEASE, duplicate_window=600.0)
    with bus_site(tmp_path / "site", bus, options) as made:
        yield made


def dlq(site: Site, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "aztask", "-A", "ledger_app", "dlq", *arguments],
        env=site.environment,
        cwd=site.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def objects(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def dead(site: Site) -> int:
    return len(site.app().broker.peek("default", dead_letter=True))


def test_three_snoozes_three_retries_a_dead_letter_and_its_replay_in_the_window(
    site: Site,
) -> None:
    """Each of them runs: hop and generation make the ids differ."""
    app = site.app()
    worker = site.worker(*ARGUMENTS)
    assert app.send(snoozing.name, ["s", 3]).get(timeout=20) == 3
    app.send(flaky.name, ["f", 99], task_id="f")
    wait_until(lambda: dead(site) == 1, 20, "three retries end in the dead letters")
    assert site.counts("start") == {"s": 4, "f": 4}
    assert "replayed 1 dead letter" in dlq(site, "replay", "f", "--yes", "-Q", "default")
    wait_until(lambda: site.counts("start")["f"] == 8, 20, "the replay and its retries run")
    wait_until(lambda: dead(site) == 1, 20, "it is dead again")
    assert "replayed 1 dead letter" in dlq(site, "replay", "--all", "--yes", "-Q", "default")
    wait_until(lambda: site.counts("start")["f"] == 12, 20, "and once more")
    wait_until(lambda: dead(site) == 1, 20, "it is dead for the third time")
    runs = app.results.history("f")
    assert sorted({run.key.generation for run in runs}) == [0, 1, 2]
    assert [run.state for run in runs].count(State.RETRYING) == 9
    assert worker.stop() == 0, worker.log


def test_seen_counted_shown_and_purged(site: Site) -> None:
    app = site.app()
    for number in range(3):
        app.send(rejecting.name, [f"r{number}", "no such customer"], task_id=f"r{number}")
    app.send(rejecting.name, ["other", "no good"], task_id="other")
    app.broker.send("default", [Envelope(b"\xc1garbage", message_id="garbage")])
    worker = site.worker(*ARGUMENTS)
    wait_until(lambda: dead(site) == 5, 20, "all are dead")
    assert worker.stop() == 0, worker.log

    listed = objects(dlq(site, "list", "-Q", "default", "--json"))
    assert len(listed) == 5
    reasons = [each["reason"] for each in listed]
    assert sorted(map(str, reasons)).count("no such customer") == 3
    assert "other" in dlq(site, "list", "--reason", "no good")
    groups = objects(dlq(site, "groups", "-Q", "default", "--json"))
    assert groups[0]["count"] == 3, groups
    shown = dlq(site, "show", "r1", "-Q", "default")
    assert "no such customer" in shown
    assert "there is no" in dlq(site, "show", "nosuch", "-Q", "default", code=5)

    assert "would replay 1" in dlq(site, "replay", "other", "--dry-run", "-Q", "default")
    assert dead(site) == 5
    assert "purged 3" in dlq(site, "purge", "--reason", "no such customer", "--yes")
    assert dead(site) == 2
    purged = dlq(site, "purge", "--all", "--yes", "-Q", "default")
    assert "purged 2" in purged
    assert dead(site) == 0
    assert "aztask: error" in dlq(site, "purge", "--yes", code=2), "nothing was selected"
