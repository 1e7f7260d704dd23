"""Everything that may need a payload is asked: no kind of row, message or module is forgotten."""

import ast
import sqlite3
import time
from pathlib import Path

import pytest

from aztask import App, chain
from aztask.message.message import TaskMessage
from aztask.message.payload import StoredValue, names_in
from aztask.operate import orphans
from aztask.operate.ledger import ledger_of
from aztask.queues.local.payload import payload_of
from aztask.steps.home import StepHome
from aztask.steps.parts import parts_of
from aztask.steps.waits import waits_of
from aztask.stores.payloads import holders
from aztask.stores.payloads.holders import (
    HOLDERS,
    MEMBERS,
    QUEUES,
    ROWS,
    UNOWNED_SECONDS,
    PayloadHolders,
    remove_ended,
    replaced_names,
)
from aztask.stores.payloads.payloads import Payloads
from aztask.stores.payloads.store import (
    ListedPayload,
    MemoryPayloads,
    PayloadKind,
    belongs,
    new_name,
)
from aztask.stores.records.base import Owned, RunKey, Start
from aztask.stores.records.history import history_of
from aztask.stores.records.local.scan import TABLES
from aztask.stores.records.onceruns import once_runs_of
from aztask.stores.records.workflows import DocumentChange

PACKAGE = Path(holders.__file__).parents[2]
LARGE = b"x" * 2000
LATER = 3 * 3600.0

# Each module that encodes a message or a value to be stored, and the holder that asks for it.
# A new one must be added here, with a test below that its payloads stay.
WRITERS = {
    "celery.backend": ROWS,
    "queues.local.broker": QUEUES,
    "queues.local.payload": QUEUES,
    "queues.local.receiver": QUEUES,
    "stores.payloads.payloads": QUEUES,
    "stores.records.deadindex": ROWS,
    "operate.cli.run": "it only tries whether the value can be written",
    "schedules.template": ROWS,
    "session": "the state of a session is never stored apart",
    "steps.emitting": ROWS,
    "operate.stepcheck": "for a child process, which stores nothing",
    "steps.keepers": ROWS,
    "steps.signals": ROWS,
    "steps.records": ROWS,
    "uniqueness.engine": ROWS,
    "uniqueness.rules": "a digest, which refers to nothing",
    "worker.pipeline.uniquekeys": MEMBERS,
    "worker.pool.attempt": MEMBERS,
    "worker.pool.fetching": MEMBERS,
    "workflows.graph": ROWS,
}
ENGINE = {"components", "file", "queues", "messages", "seen", "sessions", "boots"}
ENGINE |= {"numbered", "partitions"}
"""Tables of the file itself and of its queues, whose messages the broker shows."""

ENCODING = {"payload_of", "payload_of_dead", "encode_value"}


def modules_that_encode():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            keeps = ast.unparse(node.func).endswith(("payloads.keep", "self.keep"))
            if name in ENCODING or keeps:
                yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def test_each_module_that_stores_an_encoded_message_or_value_has_a_holder():
    assert set(modules_that_encode()) == WRITERS.keys()


def test_each_kind_of_payload_says_who_may_hold_it():
    assert HOLDERS.keys() == set(PayloadKind)


def reference(kind=PayloadKind.ARGUMENTS, at=None):
    return StoredValue.of(new_name(kind, at, "a"), b"data")


@pytest.fixture
def app(tmp_path):
    address = f"local://{tmp_path}/q.db"
    app = App("shop", broker=address, results=address, payload_threshold=1000)

    @app.task(name="ship", unique="arguments", debounce=1000.0)
    def ship(order):
        return order

    @app.task(name="weigh", unique=lambda data: "one", until="finished")
    def weigh(data):
        return len(data)

    @app.task(name="pass")
    def hand_on(data):
        return data

    app.broker.declare("default")
    yield app
    app.close()


def names(app, kind=PayloadKind.ARGUMENTS):
    return {each.name for each in app.payloads.store.list() if each.kind == kind}


def collect(app, after=LATER):
    (finding,) = orphans._collected(app, app.payloads, time.time() + after)
    return finding


def test_every_column_of_every_table_of_a_local_store_is_read(app, tmp_path):
    """The tables are those of the file: one that a later part adds must be in `TABLES`."""
    app.results.heartbeat  # noqa: B018  # opens the store
    StepHome(app).store()  # which makes its tables when it is first used
    ledger_of(app.results)
    history_of(app.results)
    once_runs_of(app.results)
    parts_of(app.results, app.codec)
    waits_of(app.results, app.codec)
    hidden, seen = [], set()
    connection = sqlite3.connect(tmp_path / "q.db")
    tables = [name for (name,) in connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    )]  # fmt: skip
    assert set(tables) == set(TABLES) | ENGINE
    for table in TABLES:
        columns = connection.execute(f"PRAGMA table_info({table})").fetchall()
        for column in [row[1] for row in columns if row[2] in ("TEXT", "BLOB", "")]:
            stored = reference()
            data = b"\x00" + str(stored).encode() + b"\xff"
            values = [
                data if row[1] == column else (b"" if row[2] == "BLOB" else len(hidden) + 1000)
                for row in columns
            ]
            marks = ", ".join("?" * len(values))
            connection.execute(f"INSERT INTO {table} VALUES ({marks})", values)
            hidden.append((table, column, stored.name))
    connection.commit()
    connection.close()
    for row in app.results.scan():
        seen.update(names_in(row))
    assert [each for each in hidden if each[2] not in seen] == []
    assert {table for table, *_ in hidden} >= {
        "runs",
        "uniques",
        "schedules",
        "occurrences",
        "workflow_documents",
        "dead_index",
    }


def test_the_arguments_of_a_debounced_call_stay(app):
    app.tasks["ship"].delay(LARGE)
    (kept,) = names(app)
    app.payloads.keep(PayloadKind.ARGUMENTS, LARGE)
    assert "removed 1 payload " in collect(app).text
    assert names(app) == {kept}


def test_a_replaced_debounced_call_leaves_nothing(app):
    ship = app.tasks["ship"]
    ids = {ship.with_options().delay(LARGE).id for _ in range(5)}
    assert len(ids) == 1
    assert len(names(app)) == 1
    (holder,) = app.results.uniques.due(1e12, 9)
    assert set(names_in(holder.data)) == names(app)


def test_a_try_that_another_process_was_faster_than_leaves_nothing(app, monkeypatch):
    store = app.results.uniques
    write, refused = store.write, [True]

    def late(*args):
        return None if refused and refused.pop() else write(*args)

    monkeypatch.setattr(store, "write", late)
    app.tasks["ship"].delay(LARGE)
    assert len(names(app)) == 1


def test_a_replaced_call_of_which_another_task_is_the_owner_stays():
    mine, other = (
        StoredValue.of(new_name(PayloadKind.ARGUMENTS, None, o), b"1") for o in ("a", "b")
    )
    value = StoredValue.of(new_name(PayloadKind.VALUE, None, "a"), b"1")
    row = b"--".join(str(each).encode() for each in (mine, other, value))
    assert replaced_names(row, b"", "a") == [mine.name]
    assert replaced_names(row, row, "a") == []


def test_an_unsent_unique_task_keeps_its_arguments(app, monkeypatch):
    monkeypatch.setattr(app.broker, "peek", lambda *args, **options: [])
    app.tasks["weigh"].delay(LARGE)
    (holder,) = app.results.uniques.due(1e12, 9)
    (sent,) = names(app)
    row = payload_of(app.codec.to_envelope(message_with(app, reference_of(app, sent))))
    app.results.uniques.write(holder.key, row, holder.due, holder)
    collect(app)
    assert names(app) == {sent}


def reference_of(app, name):
    data = app.payloads.store.list()
    (found,) = [each for each in data if each.name == name]
    return StoredValue(name, found.size, "0" * 64)


def message_with(app, stored, **options):
    return TaskMessage(
        id="a", task="pass", queue="default", body=b"", payload=str(stored), **options
    )


def test_a_checkpoint_that_only_the_result_store_has_stays(app):
    stored = app.payloads.keep(PayloadKind.CHECKPOINT, LARGE, owner="a")
    message = TaskMessage(id="a", task="pass", queue="default", body=b"")
    key = app_key(message)
    start = Start(key, "pass", "default", 1, "owner", "worker", time.time())
    assert isinstance(app.results.start([start])[0], Owned)
    assert app.results.save(key, "owner", app.codec.encode_value(stored))
    app.payloads.keep(PayloadKind.CHECKPOINT, LARGE, owner="a")
    collect(app)
    assert names(app, PayloadKind.CHECKPOINT) == {stored.name}


def app_key(message):
    return RunKey(*message.key)


def test_a_schedule_and_a_document_of_a_workflow_hold_what_they_refer_to(app):
    stored = [app.payloads.keep(PayloadKind.ARGUMENTS, LARGE, owner="a") for _ in range(3)]
    row = payload_of(app.codec.to_envelope(message_with(app, stored[0])))
    app.results.schedules.commit("nightly", row, None)
    row = payload_of(app.codec.to_envelope(message_with(app, stored[1])))
    app.results.workflows.write([DocumentChange("w", "part-x-0", row)])
    collect(app)
    assert names(app) == {stored[0].name, stored[1].name}


def test_the_results_of_members_of_an_open_workflow_stay(app):
    retention = app.settings.result_retention_seconds
    old = time.time() - retention - UNOWNED_SECONDS - LATER
    app.results.workflows.announce("open", old - 60.0)
    mine = app.payloads.keep(PayloadKind.RESULT, LARGE, old, owner="open")
    app.payloads.keep(PayloadKind.RESULT, LARGE, old, owner="other")
    unnamed = f"{new_name(PayloadKind.RESULT, old).rpartition('/')[0]}/{'0' * 32}"
    app.payloads.store.write(unnamed, LARGE)
    before = f"{new_name(PayloadKind.RESULT, old - LATER).rpartition('/')[0]}/{'0' * 32}"
    app.payloads.store.write(before, LARGE)
    removed = remove_ended(app.payloads, retention, PayloadHolders(None, app.results), time.time())
    assert removed == 2
    assert names(app, PayloadKind.RESULT) == {mine.name, unnamed}
    collect(app)
    assert names(app, PayloadKind.RESULT) == {mine.name, unnamed}
    app.results.workflows.close_workflow("open", old - 60.0, old)
    collect(app)
    assert names(app, PayloadKind.RESULT) == {mine.name, unnamed}, (
        "it is kept for a retention time more"
    )
    (listed,) = app.results.workflows.ended_workflows(9)
    app.results.workflows.delete_workflow(listed)
    assert (
        remove_ended(app.payloads, retention, PayloadHolders(None, app.results), time.time()) == 2
    )


def test_a_members_large_result_carries_its_workflow(app):
    with app.inline() as inline:
        app.payloads.result_threshold = 1000
        workflow = chain(app.tasks["pass"].s(LARGE), app.tasks["weigh"].s()).delay()
        inline.run()
        assert workflow.get(timeout=0) == len(LARGE)
        (stored,) = [each for each in app.payloads.store.list() if each.kind == PayloadKind.RESULT]
        assert (
            stored.owner
            == ListedPayload(new_name(PayloadKind.RESULT, None, workflow.id), 1, 0.0).owner
        )


def test_a_store_that_does_not_show_its_rows_keeps_everything(app):
    class Closed:
        pass

    needed = PayloadHolders(app.broker, Closed()).needed(
        [ListedPayload(new_name(PayloadKind.ARGUMENTS), 1, 0.0)]
    )
    assert needed.hidden == "the result store does not show its rows"


def test_results_alone_ask_no_queue(app):
    needed = PayloadHolders(None, None).needed(
        [ListedPayload(new_name(PayloadKind.RESULT), 1, 0.0)]
    )
    assert needed.names == frozenset()
    assert needed.hidden == ""


def test_only_the_task_itself_owns_what_it_stores():
    mine = new_name(PayloadKind.ARGUMENTS, None, "a")
    assert belongs(mine, "a")
    assert not belongs(mine, "b")
    assert belongs(f"saved/2026112314/{'0' * 32}", "b"), "an older release has named it"
    for kind in (PayloadKind.RESULT, PayloadKind.VALUE):
        assert not belongs(new_name(kind, None, "a"), "a")


def test_an_offloaded_message_carries_its_task():
    store = MemoryPayloads()
    payloads = Payloads(lambda: store, threshold=10, checkpoint_threshold=1, result_threshold=1)
    (sent,) = payloads.offload([TaskMessage(id="a", task="t", queue="q", body=LARGE)])
    assert belongs(StoredValue.parse(sent.payload).name, "a")
    assert not belongs(StoredValue.parse(sent.payload).name, "b")
