"""The payloads of an app: what is stored apart, and what happens to it when a send fails."""

import threading

import pytest

from aztask import App, chord, group
from aztask.errors import (
    BrokerUnavailable,
    ConfigurationError,
    ContentRefused,
    MessageTooLarge,
    SendUnconfirmed,
)
from aztask.message.message import TaskMessage
from aztask.message.payload import StoredValue
from aztask.stores.payloads.payloads import PARALLEL, Payloads
from aztask.stores.payloads.store import MemoryPayloads

SMALL, LARGE = b"s" * 10, b"l" * 11


class SlowPayloads(MemoryPayloads):
    """Counts how many writes run at once."""

    def __init__(self, fail_at=None):
        super().__init__()
        self.now = self.most = self.writes = 0
        self.fail_at = fail_at
        self._lock = threading.Lock()
        self._together = threading.Barrier(PARALLEL, timeout=5)

    def write(self, name, data):
        with self._lock:
            self.now += 1
            self.writes += 1
            self.most = max(self.most, self.now)
            number = self.writes
        self._together.wait()
        if number == self.fail_at:
            raise BrokerUnavailable("the container is away")
        super().write(name, data)
        with self._lock:
            self.now -= 1


def payloads_in(store):
    return Payloads(lambda: store, threshold=10, checkpoint_threshold=10, result_threshold=10)


def message(number, body):
    return TaskMessage(id=f"t{number}", task="t", queue="q", body=body)


def test_only_large_bodies_are_stored_and_the_order_stays():
    store = MemoryPayloads()
    payloads = payloads_in(store)
    bodies = [SMALL, LARGE, SMALL, LARGE * 2]
    done = payloads.offload(message(number, body) for number, body in enumerate(bodies))
    assert [each.id for each in done] == ["t0", "t1", "t2", "t3"]
    assert [each.body for each in done] == [SMALL, b"", SMALL, b""]
    assert done[0].payload is done[2].payload is None
    assert [payloads.filled(each).body for each in done] == bodies
    assert len(store.stored) == 2


def test_many_are_stored_in_parallel_and_few_are_in_memory():
    store = SlowPayloads()
    made = 0

    def messages():
        nonlocal made
        for number in range(4 * PARALLEL):
            made += 1
            assert made <= store.writes + PARALLEL + 1, "bodies pile up in memory"
            yield message(number, LARGE)

    done = payloads_in(store).offload(messages())
    assert len(done) == len(store.stored) == 4 * PARALLEL
    assert store.most == PARALLEL


def test_if_one_cannot_be_stored_nothing_is_kept():
    store = SlowPayloads(fail_at=2)
    with pytest.raises(BrokerUnavailable):
        payloads_in(store).offload(message(number, LARGE) for number in range(PARALLEL))
    assert store.stored == {}


@pytest.fixture
def app(tmp_path):
    app = App(
        "shop",
        broker=f"local://{tmp_path}/queues.db",
        results=f"local://{tmp_path}/queues.db",
        payload_threshold=1000,
    )

    @app.task(name="echo")
    def echo(value, *more):
        return value

    yield app
    app.close()


def stored(app):
    return sorted(each.kind for each in app.payloads.store.list())


def test_the_default_of_local_is_a_folder_beside_the_file(app, tmp_path):
    app.tasks["echo"].delay(b"x" * 2000)
    (peeked,) = app.broker.peek("default")
    assert peeked.envelope.body == b""
    reference = StoredValue.parse(peeked.envelope.headers["aztask-payload"])
    assert (tmp_path / "queues.db.payloads" / reference.name).stat().st_size > 2000


def test_small_arguments_stay_in_the_message(app):
    app.tasks["echo"].delay(b"x" * 900)
    (peeked,) = app.broker.peek("default")
    assert "aztask-payload" not in peeked.envelope.headers
    assert peeked.envelope.content_type == "application/x-msgpack"
    assert stored(app) == []


@pytest.mark.parametrize("error", [BrokerUnavailable("away"), MessageTooLarge("a header")])
def test_what_was_not_sent_leaves_no_payload(app, monkeypatch, error):
    def refuse(queue, envelopes):
        raise error

    monkeypatch.setattr(app.broker, "send", refuse)
    with pytest.raises(type(error)):
        app.tasks["echo"].delay(b"x" * 2000)
    with pytest.raises(type(error)):
        app.tasks["echo"].map([(b"x" * 2000,), (b"y" * 2000,)])
    assert stored(app) == []


def test_what_may_have_been_sent_keeps_its_payload(app, monkeypatch):
    def maybe(queue, envelopes):
        raise SendUnconfirmed("no answer", envelopes)

    monkeypatch.setattr(app.broker, "send", maybe)
    with pytest.raises(SendUnconfirmed):
        app.tasks["echo"].delay(b"x" * 2000)
    assert stored(app) == ["args"]


def test_inline_runs_with_large_arguments_results_and_values(app):
    with app.inline() as inline:
        assert app.tasks["echo"].delay(b"x" * 2000).get() == b"x" * 2000
        value = app.put({"weights": list(range(1000))})
        for argument in (value, [value]):
            got = app.tasks["echo"].delay(argument).get()
            assert got in ({"weights": list(range(1000))}, [{"weights": list(range(1000))}])
        assert "args" not in stored(app)
        assert inline.dead_letters() == []
    assert stored(app) == []  # outside there is another store


def test_an_altered_payload_is_a_dead_letter(app):
    with app.inline(run=False) as inline:
        app.tasks["echo"].delay(b"x" * 2000)
        memory = app.payloads.store
        (name,) = memory.stored
        memory.stored[name] = memory.stored[name].replace(b"x", b"y")
        inline.run()
        (letter,) = inline.dead_letters()
        assert letter.reason == "payload-damaged"
        assert "SHA-256" in letter.description
        assert list(memory.stored) == [name]  # a dead letter keeps what it has


def test_a_missing_payload_is_a_dead_letter(app):
    with app.inline(run=False) as inline:
        app.tasks["echo"].delay(app.put(b"x"))
        app.payloads.store.stored.clear()
        inline.run()
        (letter,) = inline.dead_letters()
        assert letter.reason == "payload-missing"


def test_an_unreachable_store_puts_the_task_off_without_counting(app, monkeypatch):
    with app.inline(run=False) as inline:
        result = app.tasks["echo"].delay(b"x" * 2000)
        away = True
        read = MemoryPayloads.read

        def maybe(self, reference):
            if away:
                raise BrokerUnavailable("the container is away")
            return read(self, reference)

        monkeypatch.setattr(MemoryPayloads, "read", maybe)
        inline.run()
        assert (result.state, inline.dead_letters()) == ("snoozed", [])
        assert "the container is away" in str(result.error)
        away = False
        inline.advance(10)
        assert result.get() == b"x" * 2000
        (_, record) = app.results.history(result.id)
        assert record.key.hop == 1


def test_a_worker_without_a_store_dead_letters_with_one_line(app, monkeypatch):
    with app.inline(run=False) as inline:
        app.tasks["echo"].delay(b"x" * 2000)
        letters = _without_payloads(app, inline, monkeypatch)
        assert letters[0].reason == "undecodable"
        assert "stored apart" in letters[0].description
        assert "\n" not in letters[0].description


def _without_payloads(app, inline, monkeypatch):
    fetching = inline._worker._attempts.fetching
    monkeypatch.setattr(fetching, "_payloads", None)
    inline.run()
    return inline.dead_letters()


def test_put_needs_a_store_and_a_lifetime(app):
    none = App("none", broker="local://:memory:")
    with pytest.raises(ConfigurationError, match="has no store for values"):
        none.put(1)
    for keep in (0, -1, 1e9):
        with pytest.raises(ConfigurationError, match="keep"):
            app.put(1, keep=keep)


def test_a_graph_takes_stored_values_and_refuses_large_arguments(app):
    task = app.tasks["echo"]
    with app.inline():
        value = app.put(b"w" * 5000)
        assert group([task.s(value), task.s(1)]).delay().get() == [b"w" * 5000, 1]
        assert (task.s(value) | task.s()).delay().get() == b"w" * 5000
        members = [task.s(b"m" * 2000), task.s(2)]
        assert chord(members, task.s()).delay().get() == [b"m" * 2000, 2]
        with pytest.raises(ContentRefused):
            (task.s(b"x" * (17 << 20)) | task.s()).delay()
