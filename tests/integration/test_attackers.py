"""What attackers can do, as docs/security.md says it, and what they cannot.

Each attacker has what the page gives it and nothing else: a broker without the app's keys, a result
store, or another user of the machine.
"""

from __future__ import annotations

import json
import os
import pickle
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from harness import Site, site_in
from ledger_app import attacked, private, silent, work

from aztask import App, AsyncResult, chain
from aztask.address.owner import Owner
from aztask.errors import ConfigurationError, ResultDamaged, TaskFailed
from aztask.message.codec import Codec
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage
from aztask.operate.deadletters.view import DeadLetters
from aztask.queues.engine import Database
from aztask.settlement import Complete, DeadLetter
from aztask.stores.records.base import Finish, Outcome, RunKey, Start, State
from aztask.stores.records.local.store import LocalResults
from aztask.stores.records.workflows import DocumentChange
from aztask.workflows.graph import pack_messages, read_messages

KEY = "a-key-that-no-attacker-knows-0123456789"
MARK = "4111-1111-1111-1111"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Broker and result store in two files, so that each can be attacked alone."""
    with site_in(tmp_path / "site", joint=False) as made:
        made.app().broker.declare("default")
        yield made


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys for all apps that are made from here on, and their workers."""
    monkeypatch.setenv("AZTASK_SIGNING_KEYS", KEY)
    monkeypatch.setenv("AZTASK_ID_KEY", KEY)


@pytest.fixture
def strict(keys: None, site: Site) -> None:
    """The same, and nothing unsigned counts."""
    site.extra["LEDGER_OPTIONS"] = json.dumps({"old_signatures": False})


def burst(site: Site) -> str:
    """Run a worker until the queue is empty; its log."""
    worker = site.worker("-Q", "default", "--burst")
    assert worker.wait() == 0, worker.log
    return worker.log


def forged(task: str, args: list[object], task_id: str) -> Envelope:
    """A message as a program without any key makes it."""
    codec = Codec()
    body, content_type, encoding = codec.encode_arguments(args, {})
    message = TaskMessage(task_id, task, "default", body, content_type, encoding)
    return codec.to_envelope(message)


# -- may send -------------------------------------------------------------------------------------


def test_without_keys_a_sender_runs_any_registered_task(site: Site) -> None:
    site.app().broker.send("default", [forged(work.name, ["stranger"], "stranger")])
    burst(site)
    assert site.counts("end") == {"stranger": 1}


def test_without_keys_a_known_id_ends_the_task(site: Site) -> None:
    """The first of two messages with one id has the outcome of both."""
    app = site.app()
    app.broker.send("default", [forged(work.name, ["stranger"], "order-1")])
    result = app.send(work.name, ["ours"], task_id="order-1", force=True)
    burst(site)
    assert site.counts("end") == {"stranger": 1}
    assert result.get(timeout=5) == "stranger"


def test_a_sender_gets_no_answer(site: Site) -> None:
    """Although it names a queue for one, as Celery's clients do."""
    app = site.app()
    app.broker.declare("inbox")
    asked = replace(forged(work.name, ["asks"], "asks"), properties={"reply_to": "inbox"})
    app.broker.send("default", [asked])
    burst(site)
    assert site.counts("end") == {"asks": 1}
    assert app.broker.peek("inbox") == []


def test_with_keys_it_runs_nothing(keys: None, site: Site) -> None:
    app = site.app()
    app.broker.send("default", [forged(work.name, ["stranger"], "stranger")])
    app.send(work.name, ["ours"], task_id="ours")
    burst(site)
    assert site.counts("end") == {"ours": 1}
    (letter,) = DeadLetters(app, "default").list()
    assert letter.reason == "undecodable"
    assert "the message is not signed" in letter.description


def test_a_message_that_is_sent_again_does_not_run_again(keys: None, site: Site) -> None:
    """By an attacker who could also read it: its signature is right."""
    app = site.app()
    app.send(work.name, ["once"], task_id="once")
    (recorded,) = app.broker.peek("default")
    burst(site)
    app.broker.send("default", [recorded.envelope, replace(recorded.envelope, message_id="other")])
    burst(site)
    assert site.counts("start") == {"once": 1}


# -- may read the queue ---------------------------------------------------------------------------


def test_a_reader_of_the_queue_reads_the_arguments(keys: None, site: Site) -> None:
    app = site.app()
    app.send(work.name, [MARK], task_id="paid")
    (seen,) = app.broker.peek("default")
    assert Codec().decode_arguments(Codec().from_envelope(seen.envelope, "default"))[0] == (MARK,)
    assert not any(KEY in str(value) for value in seen.envelope.headers.values())


def test_a_receiver_can_delete_messages_and_dead_letter_them(keys: None, site: Site) -> None:
    app = site.app()
    for name in ("deleted", "dead"):
        app.send(work.name, [name], task_id=name)
    receiver = app.broker.receiver("default", lease=30.0)
    first, second = receiver.receive(2, 5.0)
    receiver.settle([(first, Complete()), (second, DeadLetter("a reason that is not true"))])
    burst(site)
    assert site.counts("start") == {}
    assert [each.reason for each in DeadLetters(app, "default").list()] == [
        "a reason that is not true"
    ]


def test_without_keys_a_receiver_changes_a_message(site: Site) -> None:
    app = site.app()
    app.send(work.name, ["honest"], task_id="changed")
    receiver = app.broker.receiver("default", lease=30.0)
    (delivery,) = receiver.receive(1, 5.0)
    body = forged(work.name, ["dishonest"], "changed").body
    app.broker.send("default", [replace(delivery.envelope, body=body)])
    receiver.settle([(delivery, Complete())])
    burst(site)
    assert site.counts("start") == {"dishonest": 1}


def test_without_keys_a_message_runs_again_under_another_id(site: Site) -> None:
    app = site.app()
    app.send(work.name, ["once"], task_id="once")
    (recorded,) = app.broker.peek("default")
    burst(site)
    headers = {**recorded.envelope.headers, "id": "again"}
    app.broker.send("default", [replace(recorded.envelope, headers=headers, message_id="again")])
    burst(site)
    assert site.counts("start") == {"once": 2}


def test_a_receiver_cannot_change_a_message_and_put_it_back(keys: None, site: Site) -> None:
    app = site.app()
    app.send(work.name, ["honest"], task_id="changed")
    receiver = app.broker.receiver("default", lease=30.0)
    (delivery,) = receiver.receive(1, 5.0)
    body = forged(work.name, ["dishonest"], "changed").body
    app.broker.send("default", [replace(delivery.envelope, body=body)])
    receiver.settle([(delivery, Complete())])
    burst(site)
    assert site.counts("start") == {}
    (letter,) = DeadLetters(app, "default").list()
    assert "the signature does not match" in letter.description


# -- may write results ----------------------------------------------------------------------------


def test_without_keys_a_reader_of_results_runs_a_step_before_its_turn(site: Site) -> None:
    app = site.app()
    step = app.task(name=work.name)(lambda key: key)
    chain(step.si("approve"), step.si("ship")).delay(workflow_id="order")
    graphs = app.workflows.engine.graphs
    root = graphs.root("order")
    assert root is not None
    _, stored = graphs.messages("order", root, [2])[2]
    app.broker.purge("default")
    app.broker.send("default", [stored])
    burst(site)
    assert site.counts("start") == {"ship": 1}


def test_without_keys_a_writer_of_results_has_another_task_run(site: Site) -> None:
    """In the place of the second step, with arguments of its own."""
    app = site.app()
    step = app.task(name=work.name)(lambda key: key)
    chain(step.si("approve"), step.si("ship")).delay(workflow_id="order")
    with writer_of_results(site, app.owner) as stranger:
        root = app.workflows.engine.graphs.root("order")
        assert root is not None
        name = f"part-{root.token}-0"
        (part,) = stranger.workflows.read([("order", name)])
        assert part is not None
        body = forged(work.name, ["stranger"], "any").body
        rows = [
            (node, queue, replace(each, body=body) if node == 2 else each)
            for node, queue, each in read_messages(part.data)
        ]
        change = DocumentChange("order", name, pack_messages(rows), part.tag)
        assert stranger.workflows.write([change]) != [None]
    burst(site)
    assert [line.key for line in site.lines("start")] == ["approve", "stranger"]


def test_what_is_stored_for_its_turn_cannot_be_sent_before(keys: None, site: Site) -> None:
    """By an attacker who reads results and may send."""
    app = site.app()
    step = app.task(name=work.name)(lambda key: key)
    chain(step.si("approve"), step.si("ship")).delay(workflow_id="order")
    graphs = app.workflows.engine.graphs
    root = graphs.root("order")
    assert root is not None
    _, stored = graphs.messages("order", root, [1])[1]
    app.broker.purge("default")
    app.broker.send("default", [stored, replace(stored, message_id="other")])
    burst(site)
    assert site.counts("start") == {}
    letters = list(DeadLetters(app, "default").list())
    assert [letter.reason for letter in letters] == ["undecodable"] * 2
    assert all("signed to be stored, and not to be sent" in each.description for each in letters)
    chain(step.si("first"), step.si("second")).delay()
    burst(site)
    assert [line.key for line in site.lines("start")] == ["first", "second"]


def test_what_a_former_release_stored_cannot_be_sent_before_its_turn(
    keys: None, site: Site
) -> None:
    """Such a release signed what it stored as it signed what it sent."""
    app = site.app()
    step = app.task(name=work.name)(lambda key: key)
    chain(step.si("approve"), step.si("ship")).delay(workflow_id="order")
    (first,) = app.broker.peek("default")
    app.broker.purge("default")
    graphs = app.workflows.engine.graphs
    root = graphs.root("order")
    assert root is not None
    _, stored = graphs.messages("order", root, [2])[2]
    message = Codec().from_envelope(stored, "default", stored="any")
    app.broker.send("default", [app.codec.to_envelope(message)])
    burst(site)
    assert site.counts("start") == {}
    assert [letter.reason for letter in DeadLetters(app, "default").list()] == ["out-of-turn"]
    app.broker.send("default", [first.envelope])
    burst(site)
    assert [line.key for line in site.lines("start")] == ["approve", "ship"]
    assert app.workflows.result("order").state == "succeeded"


@contextmanager
def writer_of_results(site: Site, owner: Owner) -> Iterator[LocalResults]:
    """The result store of a program without keys."""
    database = Database(site.results.removeprefix("local://"))
    yield LocalResults(database, owner=owner)
    database.close()


def pretend(site: Site, app: App) -> AsyncResult[object]:
    """Send a task, and have the attacker record that it has run."""
    result = app.send(work.name, ["never"], task_id="never")
    value, key = Codec().encode_value("invented"), RunKey("never")
    with writer_of_results(site, app.owner) as stranger:
        stranger.start([Start(key, work.name, "default", 0, "attacker", "attacker", 1.0)])
        stranger.record([Finish(key, "attacker", Outcome(State.SUCCEEDED, Complete(), value))])
    return result


def test_a_writer_of_results_can_pretend_that_a_task_has_run(keys: None, site: Site) -> None:
    """Until old signatures end: a run that is recorded is not repeated, and its value believed."""
    app = site.app()
    result = pretend(site, app)
    burst(site)
    assert site.counts("start") == {}
    assert result.get(timeout=5) == "invented"
    assert app.broker.stats("default").dead == 0


def test_with_keys_alone_a_writer_of_results_cannot_pretend_that_a_task_has_run(
    strict: None, site: Site
) -> None:
    app = site.app()
    pretend(site, app)
    burst(site)
    assert site.counts("start") == {}
    places = {"broker": site.broker, "results": site.results}
    with (
        closing(App("ledger", **places, old_signatures=False)) as reader,
        pytest.raises(ResultDamaged, match="it is not signed"),
    ):
        reader.result("never").get(timeout=5)
    (letter,) = DeadLetters(app, "default").list()
    assert letter.reason == "unreadable-record"


def test_a_writer_of_results_changes_no_outcome(keys: None, site: Site) -> None:
    app = site.app()
    result = app.send(work.name, ["true"], task_id="t")
    burst(site)
    with sqlite3.connect(site.results.removeprefix("local://")) as connection:
        forged = Codec().encode_value("invented")
        assert connection.execute("UPDATE runs SET value = ?", (forged,)).rowcount == 1
    connection.close()
    with pytest.raises(ResultDamaged, match="its value does not fit its signature"):
        result.get(timeout=5)


@pytest.mark.parametrize("old", [True, False])
def test_a_writer_of_results_ends_no_step_of_a_workflow(keys: None, site: Site, old: bool) -> None:
    """The plan of another workflow, signed for that, whose first task is followed by another."""
    site.extra["LEDGER_OPTIONS"] = json.dumps({"old_signatures": old})
    app = site.app()
    step = app.task(name=work.name)(lambda key: key)
    chain(step.si("approve"), step.si("wait"), step.si("ship")).delay(workflow_id="order")
    (first,) = app.broker.peek("default")
    chain(step.si("approve"), step.si("ship")).delay(workflow_id="short")
    app.broker.purge("default")
    with closing(sqlite3.connect(site.results.removeprefix("local://"))) as file, file:
        sql = "SELECT data, signature, name FROM workflow_documents WHERE workflow = 'short' AND "
        sql += "name LIKE 'plan-%'"
        plan = file.execute(sql).fetchone()[:2]
        sql = "UPDATE workflow_documents SET data = ?, signature = ? WHERE workflow = 'order' AND "
        sql += "name LIKE 'plan-%'"
        assert file.execute(sql, plan).rowcount == 1
    app.broker.send("default", [first.envelope])
    log = burst(site)
    assert "is not obeyed: its signature does not fit" in log
    assert [line.key for line in site.lines("end")] in ([], ["approve"])


class Bomb:
    """Code that runs when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("value", [pickle.dumps(Bomb()), b"\xc1", b"\xdd\xff\xff\xff\xff"])
def test_a_writer_of_results_runs_no_code(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    app = site.app()
    result = app.send(work.name, ["t"], task_id="t")
    burst(site)
    with sqlite3.connect(site.results.removeprefix("local://")) as connection:
        assert connection.execute("UPDATE runs SET value = ?", (value,)).rowcount == 1
    connection.close()
    with pytest.raises(ResultDamaged):
        result.get(timeout=5)
    assert not (tmp_path / "exploded").exists()


# -- shares the machine ---------------------------------------------------------------------------

OTHER_USER = """
import os, sqlite3
os.setgroups(())
os.setgid(65_534)
os.setuid(65_534)
for folder, _, files in os.walk("."):
    for path in (os.path.join(folder, name) for name in files):
        try:
            open(path, "rb").read(1)
        except PermissionError:
            pass
        else:
            print("read", path)
        try:
            sqlite3.connect(path, isolation_level=None).execute("BEGIN IMMEDIATE")
        except sqlite3.Error:
            pass
        else:
            print("locked", path)
print("ended")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reads_nothing_and_locks_nothing(site: Site) -> None:
    """Not even where the folder itself is open to all, as that of a service may be."""
    app = site.app()
    app.send(silent.name, [MARK], task_id="t")
    burst(site)
    site.folder.chmod(0o755)
    assert list(site.folder.glob("events/**/*.jsonl"))
    for path in (site.ledger, *(worker.log_path for worker in site.workers)):
        path.unlink(missing_ok=True)  # the test's own
    (site.folder / "open").touch(0o644)
    done = subprocess.run(
        [sys.executable, "-c", OTHER_USER],
        cwd=site.folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "read ./open\nended\n", "the attempt works, and on this file alone"


PLANTING = """
import os
os.setgroups(())
os.setgid(65_534)
os.setuid(65_534)
os.umask(0)
for name in ("queues.db", "queues.db-wal"):
    open(name, "wb").close()
os.mkdir("payloads")
os.mkdir("events")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("place", ["queues.db", "queues.db-wal", "payloads", "events"])
def test_what_another_user_has_put_there_before_is_not_used(tmp_path: Path, place: str) -> None:
    """In a directory like /tmp: that user would read and delete all messages in it."""
    tmp_path.chmod(0o1777)
    subprocess.run([sys.executable, "-c", PLANTING], cwd=tmp_path, check=True)
    for other in {"queues.db", "queues.db-wal"} - {place}:
        (tmp_path / other).unlink()
    kept = {each: str(tmp_path / each) for each in ("payloads", "events") if each == place}
    app = App("attacked", broker=f"local://{tmp_path}/queues.db", payload_threshold=4096, **kept)
    with pytest.raises(ConfigurationError, match=rf"{place} belongs to user 65534"):
        app.send("attacked.task", [MARK * 1000])
    app.close()


# -- where arguments are --------------------------------------------------------------------------


def places(site: Site, log: str) -> set[str]:
    """Where the mark is, after the app was closed."""
    found = {"log"} if MARK in log else set()
    for path in site.folder.rglob("*"):
        if path.is_file() and path.suffix != ".log" and MARK.encode() in path.read_bytes():
            name = str(path.relative_to(site.folder))
            found.add(name.partition(".")[0].partition("/")[0])
    return found - {"ledger"}


def test_arguments_are_in_the_queue_and_its_dead_letters_alone(site: Site) -> None:
    app = site.app()
    app.send(silent.name, [MARK], task_id="succeeds")
    app.send(silent.name, [MARK, "fails"], task_id="fails")
    app.send(attacked.name, [MARK], task_id="rejects")
    log = burst(site)
    letters = {each.id: each for each in DeadLetters(app, "default").list()}
    assert set(letters) == {"fails", "rejects"}
    for letter in letters.values():
        assert MARK.encode() in letter.envelope.body
        assert MARK not in letter.description
    app.close()
    assert places(site, log) == {"queues"}


def test_an_error_that_quotes_an_argument_takes_it_everywhere(site: Site) -> None:
    app = site.app()
    result = app.send(silent.name, [MARK, "quotes"], task_id="quotes")
    log = burst(site)
    (letter,) = DeadLetters(app, "default").list()
    assert MARK in letter.description
    with pytest.raises(TaskFailed, match=MARK):
        result.get(timeout=5)
    app.close()
    assert places(site, log) == {"queues", "results", "events", "log"}


def test_an_error_that_quotes_a_secret_argument_is_masked_everywhere(site: Site) -> None:
    """And so is a line of the log, while the task runs."""
    app = site.app()
    result = app.send(private.name, [MARK], task_id="quotes")
    app.send(private.name, [MARK, "rejects"], task_id="rejects")
    log = burst(site)
    assert log.count("charging ****") == 3
    letters = {each.id: each for each in DeadLetters(app, "default").list()}
    assert letters["quotes"].description.startswith("ValueError: the card **** was refused")
    assert (letters["rejects"].reason, letters["rejects"].description) == (
        "no ****",
        "the card **** was refused",
    )
    with pytest.raises(TaskFailed, match=r"the card \*\*\*\* was refused"):
        result.get(timeout=5)
    app.close()
    assert places(site, log) == {"queues"}


def test_the_results_hold_the_arguments_of_steps_whose_turn_has_not_come(site: Site) -> None:
    app = site.app()
    step = app.task(name=silent.name)(lambda text: None)
    chain(step.si("first"), step.si(MARK)).delay()
    app.close()
    assert places(site, "") == {"results"}


def test_a_reader_of_payloads_reads_large_arguments_and_no_others(tmp_path: Path) -> None:
    app = App("attacked", broker=f"local://{tmp_path}/q.db", payload_threshold=4096)
    app.send("attacked.task", [MARK * 1000])
    app.send("attacked.task", ["small"])
    app.close()
    (payload,) = (path for path in (tmp_path / "q.db.payloads").rglob("*") if path.is_file())
    assert MARK.encode() in payload.read_bytes()
    assert b"small" not in payload.read_bytes()


def test_a_return_value_is_in_the_results_and_nowhere_else(site: Site) -> None:
    app = site.app()
    app.send(silent.name, ["x", "returns", MARK[::-1]], task_id="t")
    log = burst(site)
    app.close()
    assert places(site, log) == {"results"}


def test_settled_messages_stay_in_the_file_until_their_place_is_used_again(site: Site) -> None:
    app = site.app()
    app.send(silent.name, [MARK], task_id="done")
    log = burst(site)
    stats = app.broker.stats("default")
    app.close()
    assert (stats.active, stats.dead) == (0, 0)
    assert places(site, log) == {"queues"}
