"""How a workflow starts: what its messages say, what is stored first, and who holds the lease."""

import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest

from aztask import App, chain, chord, group
from aztask.errors import ForeignId, MessageTooLarge
from aztask.stores.records.base import State
from aztask.stores.records.workflows import ROOT
from aztask.support.clock import Clock
from aztask.workflows import mailing
from aztask.workflows.compiler import compile_graph
from aztask.workflows.engine import WorkflowEngine, engine_for
from aztask.workflows.graph import DELAY, EXPIRES
from aztask.workflows.joins import TaskEnd
from aztask.workflows.place import NodePlace
from aztask.workflows.starting import WorkflowLauncher


@pytest.fixture
def app():
    with closing(App("shop", broker="local://:memory:", results="local://:memory:")) as made:
        made.work = made.task(name="shop.work")(lambda x=0: x)
        made.other = made.task(name="shop.other", queue="others")(lambda x=0: x)
        yield made


def origin(**fields):
    given = {
        "name": "me",
        "root_id": None,
        "parent_id": None,
        "headers_of": lambda node: {},
        "session_of": lambda signature, queue: (None, True),
        "lease_of": lambda queue: None,
        **fields,
    }
    return SimpleNamespace(**given)


class Starts:
    """A starter whose clock stands still."""

    def __init__(self, app):
        self.app, self.engine, self.at = app, app.workflows.engine, 1_800_000_000.0
        self.clock = Clock(monotonic=lambda: self.at, wall=lambda: self.at)
        self.starter = WorkflowLauncher(self.engine, app.broker, app.codec, self.clock)

    def start(self, graph, **fields):
        compiled = compile_graph(graph, lambda signature: signature.task.queue or "default",
                                 blocked=False)  # fmt: skip
        return self.starter.start("w", compiled, origin(**fields))

    def stored(self):
        """The messages of all tasks by their node numbers."""
        graphs = self.engine.graphs
        nodes = [node.number for node in graphs.plan("w").nodes if node.task]
        found = graphs.messages("w", graphs.root("w"), nodes)
        return {
            number: self.app.codec.from_envelope(envelope, queue, stored="any")
            for number, (queue, envelope) in found.items()
        }


@pytest.fixture
def starts(app):
    return Starts(app)


def test_each_message_names_the_part_before_it_and_its_group(app, starts):
    graph = chain(
        app.work.s(1), chord([app.work.s(), app.work.s()], app.work.s()), on_error=app.work.s()
    )
    assert starts.start(graph, parent_id="above", root_id="top")
    messages = starts.stored()
    parents = {number: (each.parent_id, each.group) for number, each in messages.items()}
    assert parents == {
        1: ("above", "w.0"), 3: ("w.1", "w.2"), 4: ("w.1", "w.2"), 5: ("w.2", "w.0"),
        6: ("w.0", None),
    }  # fmt: skip
    assert {each.root_id for each in messages.values()} == {"top"}
    assert {each.workflow for each in messages.values()} == {"w"}
    assert {each.origin for each in messages.values()} == {"me"}
    plan = starts.engine.graphs.plan("w")
    assert {n: each.node for n, each in messages.items()} == {
        n: str(NodePlace.of(plan, plan.nodes[n])) for n in messages
    }


def test_a_workflow_that_no_task_started_is_its_own_root(app, starts):
    assert starts.start(chain(app.work.s(1), app.other.s()))
    messages = starts.stored()
    assert {each.root_id for each in messages.values()} == {"w"}
    assert [messages[n].parent_id for n in (1, 2)] == [None, "w.1"]
    assert [messages[n].queue for n in (1, 2)] == ["default", "others"]


def test_calls_that_are_alike_share_what_they_have_in_common(app, starts):
    asked = []

    def session_of(signature, queue):
        asked.append(queue)
        return None, True

    calls = [app.work.s(n) for n in range(5)] + [app.other.s(n) for n in range(5)]
    assert starts.start(group(*calls), session_of=session_of, lease_of=lambda queue: 7.0)
    assert asked == ["default", "others"]
    messages = starts.stored()
    assert {each.lease_seconds for each in messages.values()} == {7.0}
    arguments = [app.codec.decode_arguments(each)[0] for each in messages.values()]
    assert arguments == [(n,) for n in range(5)] * 2


def test_calls_with_options_have_their_own(app, starts):
    calls = [
        app.work.si(1),
        app.work.si(2).with_options(delay=5),
        app.work.si(3).with_options(expires=6),
        app.work.si(4),
    ]
    assert starts.start(chain(app.work.si(0), group(*calls)))
    extras = [dict(each.extra) for each in starts.stored().values()]
    assert extras == [{}, {}, {DELAY: 5.0}, {EXPIRES: 6.0}, {}]


def test_headers_of_hooks_are_in_the_messages_of_their_nodes(app, starts):
    headers = {1: {"tenant": "acme", "traceparent": "00-a-b-01"}, 2: {"x": 1}}
    graph = chain(app.work.s(1), app.work.s().with_options(delay=5), app.work.s())
    assert starts.start(graph, headers_of=lambda node: headers.get(node, {}))
    messages = starts.stored()
    assert [dict(messages[n].extra) for n in (1, 2, 3)] == [
        {"tenant": "acme"}, {"x": 1, DELAY: 5.0}, {},
    ]  # fmt: skip
    assert [messages[n].traceparent for n in (1, 2, 3)] == ["00-a-b-01", None, None]


def test_a_start_holds_a_lease_of_thirty_seconds_until_all_is_sent(app, starts, monkeypatch):
    seen = []
    send = app.broker.send

    def look(queue, envelopes):
        root = starts.engine.graphs.root("w")
        seen.append((root.starting_until - starts.at, root.at == starts.at, root.tasks))
        send(queue, envelopes)

    monkeypatch.setattr(app.broker, "send", look)
    assert starts.start(chain(app.work.s(1), app.work.s()))
    assert seen == [(30.0, True, 2)]
    root = starts.engine.graphs.root("w")
    assert (root.starting_until, root.state, root.cancelled_at) == (None, State.STARTED, None)
    (listed,) = starts.engine.store.open_workflows(5)
    assert (listed.workflow, listed.at) == ("w", starts.at)


def test_a_slow_start_renews_its_lease_every_ten_seconds(app, starts, monkeypatch):
    monkeypatch.setattr(mailing, "BATCH", 1)
    until, changes = [], []
    send, change = app.broker.send, starts.engine.documents.change

    def slow(queue, envelopes):
        until.append(starts.engine.graphs.root("w").starting_until - 1_800_000_000.0)
        send(queue, envelopes)
        starts.at += 4.0

    def counted(edits):
        changes.append(starts.at - 1_800_000_000.0)
        change(edits)

    monkeypatch.setattr(app.broker, "send", slow)
    monkeypatch.setattr(starts.engine.documents, "change", counted)
    assert starts.start(group(*(app.work.s(n) for n in range(8))))
    # It is first asked after the first batch, and renews ten seconds behind that.
    assert changes == [16.0, 28.0, 32.0]
    assert until == [30.0] * 4 + [46.0] * 3 + [58.0]


def test_a_known_id_is_not_started_again_and_nothing_is_sent(app, starts):
    assert starts.start(chain(app.work.s(1)))
    before = starts.engine.graphs.root("w")
    assert not starts.start(chain(app.work.s(2), app.work.s()))
    assert starts.engine.graphs.root("w") == before
    assert app.broker.stats("default").active == 1


def test_of_two_senders_that_start_one_id_the_first_root_counts(app, starts, monkeypatch):
    other = Starts(app)
    root, asked = starts.engine.graphs.root, []

    def late(workflow):
        if not asked:
            asked.append(workflow)
            assert other.start(chain(app.work.s(1)))
            return None  # as it was a moment before
        return root(workflow)

    monkeypatch.setattr(starts.engine.graphs, "root", late)
    assert not starts.start(chain(app.work.s(2), app.work.s()))
    assert root("w").tasks == 1
    assert app.broker.stats("default").active == 1


def test_another_owner_that_was_faster_is_an_error(app, starts, monkeypatch):
    write, root = starts.engine.store.write, starts.engine.graphs.root
    lost = []

    def lose(changes):
        if changes[0].name == ROOT:
            lost.append(1)
            return [None]
        return write(changes)

    def foreign(workflow):
        if lost:
            raise ForeignId("workflow w belongs to another app")
        return root(workflow)

    monkeypatch.setattr(starts.engine.store, "write", lose)
    monkeypatch.setattr(starts.engine.graphs, "root", foreign)
    with pytest.raises(ForeignId):
        starts.start(chain(app.work.s(1)))
    assert lost == [1]


def test_a_message_that_the_broker_refuses_stores_nothing(app, starts, monkeypatch):
    def refuse(envelope):
        raise MessageTooLarge("it is too large")

    monkeypatch.setattr(app.broker, "check", refuse)
    with pytest.raises(MessageTooLarge):
        starts.start(chain(app.work.s(1)))
    assert starts.engine.store.open_workflows(5) == []
    assert starts.engine.graphs.recent_root("w") is None


def test_a_start_that_fails_is_not_remembered_as_started(app, starts, monkeypatch):
    def fail(queue, envelopes):
        raise RuntimeError("no connection")

    monkeypatch.setattr(app.broker, "send", fail)
    with pytest.raises(RuntimeError):
        starts.start(chain(app.work.s(1)))
    assert starts.engine.graphs.recent_root("w") is None, "its transaction was rolled back"


# -- the parts of the engine, and its mail ---------------------------------------------------------


def test_the_engine_uses_the_clock_the_codec_and_the_reports_that_it_is_given(app):
    at = [1_800_000_000.0]
    clock = Clock(monotonic=lambda: at[0], wall=lambda: at[0])
    posted = []
    outlet = SimpleNamespace(sender=lambda: app.broker, posted=posted.extend)
    engine = engine_for(app.results, outlet, app.codec, clock)
    chain(app.work.s(1), app.work.s().with_options(expires=60)).delay(workflow_id="w")
    plan = engine.graphs.plan("w")
    ended = TaskEnd("w", NodePlace.of(plan, plan.nodes[1]), 0, State.SUCCEEDED, b"\x05")
    engine.joins.ended([ended])
    ((message, envelope),) = posted
    assert message.id == "w.2"
    sent = app.codec.from_envelope(envelope, "default", any_age=True)
    assert sent.expires == at[0] + 60.0
    engine.joins.ended([ended._replace(place=NodePlace.of(plan, plan.nodes[2]))])
    assert engine.graphs.root("w").ended_at == at[0]
    assert isinstance(engine, WorkflowEngine)


def test_messages_go_out_in_batches_of_500_for_each_queue(app, starts, monkeypatch):
    sent, progress = [], []
    monkeypatch.setattr(
        app.broker, "send", lambda queue, envelopes: sent.append((queue, len(envelopes)))
    )
    calls = [app.work.s(n) for n in range(501)] + [app.other.s(1)]
    assert starts.start(group(*calls))
    assert sent == [("default", 500), ("default", 1), ("others", 1)]
    sent.clear()
    graphs = starts.engine.graphs
    nodes = [(node.number, 0) for node in graphs.plan("w").nodes if node.task]
    refused = starts.engine.mailer.send(
        "w", graphs.root("w"), nodes, SimpleNamespace(sent=lambda: progress.append(len(sent)))
    )
    assert refused == []
    assert sent == [("default", 500), ("default", 1), ("others", 1)]
    assert progress == [1, 2, 3], "after each batch"


def test_a_refused_message_holds_up_no_other(app, starts, monkeypatch):
    assert starts.start(chain(app.work.s(0), group(*(app.work.si(n) for n in range(3)))))
    app.broker.purge("default")
    read = app.codec.from_envelope

    def refuse(envelope, queue, *, stored):
        message = read(envelope, queue, stored=stored)
        return replace(message, workflow="other") if message.id == "w.4" else message

    monkeypatch.setattr(app.codec, "from_envelope", refuse)
    graphs = starts.engine.graphs
    refused = starts.engine.mailer.send("w", graphs.root("w"), [(3, 0), (4, 0), (5, 2)])
    assert refused == [(4, "it belongs to workflow other")]
    monkeypatch.undo()
    receiver = app.broker.receiver("default", lease=30.0)
    found = [app.codec.from_envelope(d.envelope, "default") for d in receiver.receive(9, 0.0)]
    assert sorted((each.id, each.generation) for each in found) == [("w.3", 0), ("w.5", 2)]


@pytest.mark.parametrize("name", ["delay", "expires"])
def test_of_messages_that_were_just_made_those_with_times_are_made_anew(app, starts, name):
    first = app.work.s(1).with_options(**{name: 60})
    assert starts.start(group(first, app.work.s(2)))
    found = {}
    for each in app.broker.peek("default", limit=9):
        message = app.codec.from_envelope(each.envelope, "default", any_age=True)
        found[message.id] = message
    assert [dict(each.extra) for each in found.values()] == [{}, {}]
    if name == "expires":
        assert found["w.2"].expires == pytest.approx(time.time() + 60.0, abs=30.0)
    else:
        assert found["w.2"].expires is None
    assert found["w.3"].expires is None
