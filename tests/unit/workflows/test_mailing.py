"""A stored message is verified like a received one before a worker sends it."""

import dataclasses
import time
from contextlib import closing

import msgpack
import pytest

from aztask import App, TaskFailed, chain, group
from aztask.errors import ConfigurationError
from aztask.message.headers import SIGNATURE, SIGNATURE_2
from aztask.queues.local.payload import envelope_of, payload_of
from aztask.stores.records.base import State
from aztask.workflows.edits import row_name
from aztask.workflows.joins import TaskEnd
from aztask.workflows.place import NodePlace

KEY = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def shop():
    memory = "local://:memory:"
    with closing(App("shop", broker=memory, results=memory, signing_keys=[KEY])) as app:
        app.first = app.task(name="shop.first")(lambda: 1)
        app.second = app.task(name="shop.second")(lambda one: one)
        app.other = app.task(name="shop.other")(lambda one: one)
        yield app


def end_first(app, workflow="w"):
    engine = app.workflows.engine
    plan = engine.graphs.plan(workflow)
    place = NodePlace.of(plan, plan.nodes[1])
    engine.joins.ended([TaskEnd(workflow, place, 0, State.SUCCEEDED, b"\x01")])


def change_stored(app, change):
    """Rewrite the stored message of node 2, as a writer of the result store could.

    The document's own signature is taken away: with a wrong one nothing of it is read.
    """
    database = app.results._database
    with database.transaction() as connection:
        select = "SELECT id, data FROM workflow_documents WHERE workflow='w' AND name LIKE 'part%'"
        number, data = connection.execute(select).fetchone()
        rows = msgpack.unpackb(data)
        rows[1][2] = payload_of(change(envelope_of(rows[1][2])))
        update = "UPDATE workflow_documents SET data = ?, signature = NULL WHERE id = ?"
        connection.execute(update, (msgpack.packb(rows), number))


def sent(app):
    receiver = app.broker.receiver("default", lease=30.0)
    found = receiver.receive(10, 0.0)
    return [app.codec.from_envelope(each.envelope, "default") for each in found]


def test_a_message_goes_out_as_its_starter_signed_it(shop):
    later = shop.second.s().with_options(delay=0.0, expires=60)
    chain(shop.first.s(), later).delay(workflow_id="w")
    (first,) = sent(shop)
    assert (first.id, first.workflow, first.root_id, first.parent_id) == ("w.1", "w", "w", None)
    end_first(shop)
    (second,) = sent(shop)
    assert (second.id, second.parent_id, second.group) == ("w.2", "w.1", "w.0")
    assert NodePlace.read(second.node).takes == 1
    assert second.expires is not None
    assert second.extra == {}, "delay and expiry of the stored message are used up"


@pytest.mark.parametrize(
    "change",
    [
        lambda envelope: dataclasses.replace(envelope, body=envelope.body + b"x"),
        lambda envelope: dataclasses.replace(
            envelope, headers={**envelope.headers, "task": "shop.other"}
        ),
        lambda envelope: dataclasses.replace(
            envelope, headers={**envelope.headers, "aztask-node": "2:0:0:1::"}
        ),
        lambda envelope: dataclasses.replace(
            envelope,
            headers={
                name: value
                for name, value in envelope.headers.items()
                if name not in (SIGNATURE, SIGNATURE_2)
            },
        ),
    ],
    ids=["body", "task", "place", "unsigned"],
)
def test_a_changed_message_is_not_sent_and_its_node_fails(shop, change):
    chain(shop.first.s(), shop.second.s()).delay(workflow_id="w")
    sent(shop)
    change_stored(shop, change)
    end_first(shop)
    assert sent(shop) == []
    result = shop.workflows.result("w")
    assert result.state == "failed"
    with pytest.raises(TaskFailed, match="ContentRefused"):
        result.get(timeout=0)


def test_a_message_of_another_workflow_is_not_sent(shop):
    chain(shop.first.s(), shop.second.s()).delay(workflow_id="v")
    chain(shop.first.s(), shop.second.s()).delay(workflow_id="w")
    sent(shop)
    engine = shop.workflows.engine
    root = engine.graphs.root("v")
    (_, other) = engine.graphs.messages("v", root, [2])[2]
    change_stored(shop, lambda envelope: other)
    end_first(shop)
    assert sent(shop) == []
    assert shop.workflows.result("w").state == "failed"
    assert shop.workflows.result("v").state == "started"


def test_without_a_result_store_one_line_says_why_it_needs_one():
    with closing(App("shop", broker="local://:memory:")) as app:
        task = app.task(name="shop.first")(lambda: 1)
        with pytest.raises(ConfigurationError, match=r"needs a result store.*results=") as error:
            chain(task.s()).delay()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("workflow", ["", "x" * 901, "a\nb", 5])
def test_an_id_that_makes_no_task_id_is_refused(shop, workflow):
    with pytest.raises(ConfigurationError, match="workflow_id takes a text"):
        chain(shop.first.s()).delay(workflow_id=workflow)


def test_a_known_id_is_not_started_again(shop):
    for _ in range(2):
        chain(shop.first.s(), shop.second.s()).delay(workflow_id="w")
    assert len(sent(shop)) == 1


def test_wrong_arguments_are_refused_before_anything_is_sent(shop):
    with pytest.raises(TypeError, match=r"shop\.second"):
        chain(shop.first.s(), shop.second.s(5)).delay(workflow_id="w")
    assert shop.workflows.result("w").state == "pending"


def test_a_starter_sends_what_it_has_made_without_reading_it(shop, monkeypatch):
    """Delayed and expiring ones too: their times begin with the send."""
    monkeypatch.setattr(shop.workflows.engine.graphs, "messages", None)
    monkeypatch.setattr(shop.codec, "from_envelope", None)
    first = [shop.first.si(), shop.first.si().with_options(expires=60, delay=0.0)]
    group(*first).delay(workflow_id="w")
    monkeypatch.undo()
    plain, counted = sent(shop)
    assert (plain.id, plain.expires, plain.extra) == ("w.2", None, {})
    assert counted.id == "w.3"
    assert counted.expires is not None
    assert counted.extra == {}
    stored = shop.workflows.engine.graphs
    assert [*stored.messages("w", stored.root("w"), [2, 3])] == [2, 3], "for a sender that dies"


def test_the_delay_and_the_expiry_of_a_first_node_begin_when_it_is_sent(shop):
    work = shop.task(name="shop.later")(lambda x=0: x)
    calls = [work.s(1).with_options(delay=3600), work.s(2).with_options(expires=60), work.s(3)]
    group(*calls).delay(workflow_id="later")
    stats = shop.broker.stats("default")
    assert (stats.active, stats.scheduled) == (2, 1)
    found = {}
    for each in shop.broker.peek("default", limit=9):
        message = shop.codec.from_envelope(each.envelope, "default", any_age=True)
        found[shop.codec.decode_arguments(message)[0]] = message
    assert found[2,].expires - time.time() == pytest.approx(60.0, abs=30.0)
    assert [found[key,].expires for key in (1, 3)] == [None, None]
    assert [dict(each.extra) for each in found.values()] == [{}] * 3


def test_where_broker_and_results_are_apart_a_start_is_no_transaction_of_the_broker(
    tmp_path, monkeypatch
):
    address = f"local://{tmp_path}/queues.db"
    for results, joint in ((address, 1), (f"local://{tmp_path}/results.db", 0)):
        with closing(App("shop", broker=address, results=results)) as app:
            work = app.task(name="shop.work")(lambda x=0: x)
            begun = []
            transaction = app.broker.transaction
            monkeypatch.setattr(
                app.broker, "transaction", lambda t=transaction, b=begun: (b.append(1), t())[1]
            )
            group(work.s(n) for n in range(2)).delay()
            assert len(begun) == joint


def test_a_file_holds_no_row_before_a_member_ends(shop):
    """Only in a remote store would members race for making it."""
    work = shop.task(name="shop.work")(lambda x=0: x)
    group(work.s(n) for n in range(40)).delay(workflow_id="w")
    plan = shop.workflows.engine.graphs.plan("w")
    rows = [("w", row_name(node.number, 0)) for node in plan.nodes if not node.task]
    assert rows
    assert shop.workflows.engine.store.read(rows) == [None] * len(rows)


def test_members_have_the_session_and_the_order_of_their_calls(shop):
    shop.queue("sessions", sessions=True)
    work = shop.task(name="shop.work", queue="sessions")(lambda x=0: x)
    calls = [
        work.s(1).with_options(session="a"),
        work.s(2).with_options(session="b", ordered=False),
    ]
    group(*calls).delay(workflow_id="w")
    found = {}
    for each in shop.broker.peek("sessions", limit=9):
        message = shop.codec.from_envelope(each.envelope, "sessions", any_age=True)
        found[message.session] = message.ordered
    assert found == {"a": True, "b": False}
