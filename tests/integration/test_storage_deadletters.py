"""More dead letters on a Storage queue than the service shows: the result store has the index."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from azurite import Azurite
from damaging import NOTE_DAMAGES, SqlOutsider
from harness import Site, Worker, wait_until
from ledger_app import rejecting, work
from storage import storage_site

from aztask import App
from aztask.message.envelope import Envelope
from aztask.operate.deadletters.view import DeadLetters, Selection
from aztask.queues.delivery import Settled
from aztask.settlement import Complete, DeadLetter
from aztask.stores.records.deadindex import IndexedDeadLetter, index_for
from aztask.support.clock import Clock

ALL = Selection(everything=True)
ARGUMENTS = ("-Q", "default", "-c", "8", "--pool", "threads", "--lease", "30s")


@pytest.fixture
def site(azurite: Azurite, tmp_path: Path) -> Iterator[Site]:
    with storage_site(tmp_path / "site", azurite) as made:
        yield made


def dead_letters(site: Site, count: int) -> DeadLetters:
    """That many dead letters, made by a real worker; the last one cannot be read."""
    app = site.app()
    for number in range(count - 1):
        reason = "even" if number % 2 == 0 else "odd"
        app.send(rejecting.name, [f"k{number}", reason], task_id=f"t{number}")
    app.broker._client.queue("default").send_message("not ours", time_to_live=-1)  # type: ignore[attr-defined]
    worker = site.worker(*ARGUMENTS)
    wait_until(lambda: app.broker.stats("default").dead == count, 60, "all are dead letters")
    wait_until(lambda: app.broker.stats("default").total == 0, 30, "the queue is empty")
    assert worker.stop() == 0, worker.log
    return DeadLetters(app, "default")


def run(site: Site, *arguments: str) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(
        [sys.executable, "-m", "aztask", "-A", "ledger_app", "dlq", *arguments],
        env=site.environment,
        cwd=site.folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended


def command(site: Site, *arguments: str) -> list[dict[str, Any]]:
    lines = run(site, *arguments).stdout.splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def notes(app: App) -> set[str]:
    index = index_for(app.broker, app.results)
    assert index is not None
    return {each.key for each in index.notes("default")}


def test_a_hundred_dead_letters_are_listed_grouped_shown_replayed_and_purged(site: Site) -> None:
    letters = dead_letters(site, 100)
    app = site.app()
    assert len(app.broker.peek("default", dead_letter=True)) == 32

    listed = command(site, "list", "--limit", "200", "--json")
    assert {each["id"] for each in listed} >= {f"t{number}" for number in range(99)}
    assert len(listed) == 100
    groups = {group["reason"]: group["count"] for group in command(site, "groups", "--json")}
    assert groups == {"even": 50, "odd": 49, "undecodable": 1}
    (shown,) = command(site, "show", "t98", "--values", "--json")
    assert "k98" in json.dumps(shown)
    assert letters.count(Selection(reason="odd")) == 49

    assert letters.replay(Selection(reason="odd")).done == 49
    assert app.broker.stats("default").total == 49
    assert letters.count(ALL) == 51
    assert letters.purge(Selection(frozenset({"t98"}))).done == 1
    assert letters.count(ALL) == 50
    assert letters.purge(ALL).done == 50
    assert letters.count(ALL) == 0
    assert notes(app) == set()


def test_a_note_whose_dead_letter_is_gone_is_dropped(site: Site) -> None:
    """Removed past aztask: by another tool, or never stored because the worker died before."""
    dead_letters(site, 50)
    app = site.app()
    receiver = app.broker.receiver("default", lease=30.0, dead_letter=True)
    removed = receiver.receive(32, 5.0)
    receiver.settle([(each, Complete()) for each in removed])
    index = index_for(app.broker, app.results)
    assert index is not None
    index.note(
        [IndexedDeadLetter("default", Envelope(b"x", message_id="crashed"), "r", "", 1.0, 1)]
    )
    assert len(notes(app)) == 51
    ahead = Clock(wall=lambda: time.time() + 600)  # none of these is being stored any more
    letters = DeadLetters(app, "default", clock=ahead)
    assert letters.count(ALL) == 18
    assert len(notes(app)) == 18


def test_a_sweep_drops_notes_without_and_makes_notes_for_dead_letters_with_none(
    site: Site,
) -> None:
    dead_letters(site, 60)
    app = site.app()
    index = index_for(app.broker, app.results)
    assert index is not None
    unknown = sorted(notes(app))[:20]
    index.drop("default", unknown)  # as if dead-lettered without a result store
    index.note(
        [IndexedDeadLetter("default", Envelope(b"x", message_id="crashed"), "r", "", 1.0, 1)]
    )
    letters = DeadLetters(app, "default", clock=Clock(wall=lambda: time.time() + 600))
    report = letters.replay(Selection(frozenset({"t7"})))
    assert (report.done, report.ids) == (1, ["t7"])
    kept = notes(app)
    assert len(kept) == 59
    assert "crashed" not in kept
    assert set(unknown) - {"t7:0:0"} <= kept


def test_damaged_notes_are_named_and_hide_no_other_dead_letter(site: Site) -> None:
    """The dead letters that the service does not show can be replayed and purged all the same."""
    dead_letters(site, 40)
    app = site.app()
    shown = {each.envelope.message_id for each in app.broker.peek("default", dead_letter=True)}
    behind = sorted(key for key in notes(app) if key not in shown and key.startswith("t"))[:3]
    outsider = SqlOutsider(site.results.removeprefix("local://"))
    for key, changes in zip(behind, NOTE_DAMAGES.values(), strict=False):
        outsider.damage_note("default", key, changes)
    ended = run(site, "list", "--limit", "200", "--json")
    assert len(ended.stdout.splitlines()) == 37
    (line,) = ended.stderr.splitlines()
    assert line.startswith("aztask: warning: 3 damaged dead-letter notes: ")
    assert all(key in line for key in behind)
    assert sum(group["count"] for group in command(site, "groups", "--json")) == 37
    done = run(site, "replay", behind[0], "--yes")
    assert done.stdout.splitlines()[-1] == "replayed 1 dead letter"
    done = run(site, "purge", behind[1], "--yes")
    assert done.stdout.splitlines()[-1] == "purged 1 dead letter"
    letters = DeadLetters(app, "default")
    assert letters.count(ALL) + len(letters.damaged) == 38
    assert set(letters.damaged) <= {behind[2]}, "the service may show its dead letter by now"
    assert letters.replay(ALL).done == 38
    assert notes(app) == set()
    assert letters.count(ALL) == 0
    assert letters.damaged == {}


def test_without_a_result_store_the_first_ones_are_shown_and_all_are_acted_on(site: Site) -> None:
    dead_letters(site, 40)
    plain = App("plain", broker=site.broker)
    letters = DeadLetters(plain, "default")
    assert letters.count(ALL) == 32
    assert letters.replay(Selection(reason="odd")).done == 19
    plain.close()


def test_killed_between_the_note_and_the_dead_letter(site: Site) -> None:
    """The next delivery dead-letters it: one note, one dead letter."""
    app = site.app()
    app.send(rejecting.name, ["k", "no"], task_id="t")
    killed = site.worker("-Q", "default", "-c", "1", "--lease", "2s", AZTASK_FAILPOINT="noted:KILL")
    assert killed.wait() == -signal.SIGKILL, killed.log
    assert notes(app) == {"t:0:0"}
    assert app.broker.stats("default").dead == 0
    worker = site.worker("-Q", "default", "-c", "1", "--lease", "2s")
    wait_until(lambda: app.broker.stats("default").dead == 1, 30, "it is stored")
    wait_until(lambda: app.broker.stats("default").total == 0, 30, "the original is deleted")
    assert worker.stop() == 0
    assert notes(app) == {"t:0:0"}
    assert [each.id for each in DeadLetters(app, "default").list()] == ["t"]
    assert site.counts("start") == {"k": 1}


def two_copies(site: Site) -> Worker:
    """Leave two copies of one dead letter; returns the worker, which goes on."""
    app = site.app()
    arguments = ("-Q", "default", "-c", "1", "--lease", "2s")
    app.send(rejecting.name, ["k", "no"], task_id="t")
    killed = site.worker(*arguments, AZTASK_FAILPOINT="stored:KILL")
    assert killed.wait() == -signal.SIGKILL, killed.log
    assert app.broker.stats("default").dead == 1
    assert app.broker.stats("default").total == 1  # the original is still there
    worker = site.worker(*arguments)
    wait_until(lambda: app.broker.stats("default").total == 0, 30, "the original is deleted")
    assert app.broker.stats("default").dead == 2
    assert site.counts("start") == {"k": 1}
    return worker


def test_killed_between_the_dead_letter_and_the_deletion(site: Site) -> None:
    """It is stored twice at most; all count one, and a replay of both copies runs once."""
    app, worker = site.app(), two_copies(site)
    letters = DeadLetters(app, "default")
    plain = App("plain", broker=site.broker)  # without a result store: no index
    for view in (letters, DeadLetters(plain, "default")):  # two copies are one dead letter
        assert [each.id for each in view.list()] == ["t"]
        assert [group.count for group in view.groups()] == [1]
        assert view.count(ALL) == 1
    plain.close()
    report = letters.replay(ALL)
    assert (report.done, report.ids, report.lost) == (1, ["t"], 0)
    wait_until(lambda: site.counts("start") == {"k": 2}, 30, "the replay runs")
    wait_until(lambda: app.broker.stats("default").total == 0, 30, "both are settled")
    assert worker.stop() == 0, worker.log
    assert site.counts("start") == {"k": 2}


@pytest.mark.parametrize("selected", ["all", "by id", "without results"])
def test_a_purge_counts_both_copies_as_one(selected: str, site: Site) -> None:
    worker = two_copies(site)
    assert worker.stop() == 0, worker.log
    app = App("plain", broker=site.broker) if selected == "without results" else site.app()
    selection = Selection(frozenset({"t"})) if selected == "by id" else ALL
    assert DeadLetters(app, "default").purge(selection).done == 1
    assert app.broker.stats("default").dead == 0


def test_copies_of_a_unique_task_are_held_back_as_one(site: Site) -> None:
    """Another task holds its key by now: neither copy is replayed."""
    app = App("lone", broker=site.broker, results=site.results)

    @app.task(unique="arguments")
    def lone(key: str) -> None: ...

    lone.with_options(task_id="first").delay("a")
    receiver = app.broker.receiver("default", lease=30.0)
    for number in range(2):
        (delivery,) = receiver.receive(1, 10.0)
        assert receiver.settle([(delivery, DeadLetter("rejected"))]) == [Settled()]
        if number == 0:
            app.broker.send("default", [delivery.envelope])  # as if its deletion had not happened
    app.unique_engine(lone.name).ended(app.message_in(delivery.envelope, "default", "0"))
    assert lone.with_options(task_id="second").delay("a").id == "second"
    letters = DeadLetters(app, "default")
    report = letters.replay(ALL)
    assert (report.done, report.held_back, report.lost) == (0, 1, 0)
    assert report.blocked == {"first": "second"}
    assert letters.count(ALL) == 1
    app.close()


def test_the_note_is_made_before_the_dead_letter_is_stored(site: Site) -> None:
    """While the poison queue is away the original stays, and is noted once."""
    app = site.app()
    app.send(rejecting.name, ["k", "no"], task_id="t")
    queue = app.broker._client.queue("default-poison")  # type: ignore[attr-defined]
    queue.delete_queue()  # the dead letter cannot be stored
    worker = site.worker("-Q", "default", "-c", "1", "--lease", "3s")
    wait_until(lambda: "was not settled" in worker.log, 30, "the dead letter is refused")
    assert notes(app) == {"t:0:0"}
    assert app.broker.stats("default").total == 1  # the original stays
    queue.create_queue()
    wait_until(lambda: app.broker.stats("default").dead == 1, 60, "it is stored later")
    wait_until(lambda: app.broker.stats("default").total == 0, 30, "the original is deleted")
    app.send(work.name, ["after"], task_id="after")
    assert app.result("after").get(timeout=20) == "after"
    assert worker.stop() == 0
    assert notes(app) == {"t:0:0"}
    assert [each.id for each in DeadLetters(app, "default").list()] == ["t"]


def test_a_full_message_of_another_program_is_listed_with_its_reason(site: Site) -> None:
    """Its bytes are kept as they are, which leaves no room for a reason: the index has it."""
    app = site.app()
    queue = app.broker._client.queue("default")  # type: ignore[attr-defined]
    queue.send_message("x" * 65_536, time_to_live=-1)
    queue.send_message("é" * 30_000, time_to_live=-1)
    queue.send_message("short", time_to_live=-1)
    worker = site.worker(*ARGUMENTS)
    wait_until(lambda: app.broker.stats("default").dead == 3, 30, "all are dead letters")
    assert worker.stop() == 0, worker.log
    letters = {len(each.envelope.body): each for each in DeadLetters(app, "default").list()}
    assert {size: each.reason for size, each in letters.items()} == {
        65_536: "undecodable",
        60_000: "undecodable",
        5: "undecodable",
    }
    assert all("is not accepted" in each.description for each in letters.values())
