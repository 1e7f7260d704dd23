import time
from dataclasses import replace

import pytest

from aztask import App, AztaskError, BrokerUnavailable, ConfigurationError, QueueNotFound
from aztask.config import Secret
from aztask.errors import ContentRefused
from aztask.message.codec import Codec
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage
from aztask.message.signatures import SignatureRules
from aztask.operate.deadletters.letters import Positions
from aztask.operate.deadletters.sweep import Sweep
from aztask.operate.deadletters.view import DeadLetters, Selection
from aztask.queues.delivery import Lost
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker
from aztask.settlement import Complete, DeadLetter
from aztask.stores.records.base import Finish, Outcome, Owned, RunKey, Start, State
from aztask.support import clock
from aztask.support.clock import Clock

QUEUE = "default"
ALL = Selection(everything=True)


@pytest.fixture
def app(tmp_path):
    """Broker and results in one file."""
    app = App("shop", broker=f"local://{tmp_path}/q.db", results=f"local://{tmp_path}/q.db")
    yield app
    app.close()


@pytest.fixture
def split_app(tmp_path):
    """Broker and results in two files."""
    app = App("shop", broker=f"local://{tmp_path}/q.db", results=f"local://{tmp_path}/r.db")
    yield app
    app.close()


def bury(
    app, *names, task="shop.add", reason="retries-exhausted", queue=QUEUE, description="it broke"
):
    """Make a dead letter for each task id."""
    for name in names:
        app.send(task, [1, 2], queue=queue, task_id=name, force=True)
        bury_next(app, reason, queue, description)


def bury_next(app, reason="undecodable", queue=QUEUE, description="it broke"):
    receiver = app.broker.receiver(queue, lease=30.0)
    (delivery,) = receiver.receive(1, 1.0)
    receiver.settle([(delivery, DeadLetter(reason, description))])


def live(app, queue=QUEUE):
    """The messages that wait in the queue."""
    return [app.codec.from_envelope(p.envelope, queue) for p in app.broker.peek(queue, limit=1000)]


def run_to_end(app, key, state=State.FAILED):
    """Record a run as ended."""
    start = Start(key, "shop.add", QUEUE, 1, f"owner-{key}", "w", 1.0)
    assert isinstance(app.results.start([start])[0], Owned)
    assert app.results.record([Finish(key, start.owner, Outcome(state, Complete(), at=2.0))])


class TestSelection:
    def test_an_empty_selection_is_refused(self):
        with pytest.raises(ConfigurationError, match="by id, task, reason or signature, or"):
            Selection()

    def test_everything_and_a_condition_exclude_each_other(self):
        with pytest.raises(ConfigurationError, match="exclude each other"):
            Selection(task="shop.add", everything=True)

    def test_conditions_are_joined(self, app):
        bury(app, "a", task="shop.add")
        bury(app, "b", task="shop.mul")
        bury(app, "c", task="shop.add", reason="rejected")
        letters = DeadLetters(app, QUEUE)
        assert [x.id for x in letters.find(Selection(task="shop.add"))] == ["a", "c"]
        assert [x.id for x in letters.find(Selection(reason="rejected"))] == ["c"]
        assert letters.count(Selection(task="shop.mul", reason="rejected")) == 0
        assert letters.count(Selection(frozenset(["a", "b"]), task="shop.mul")) == 1

    def test_by_signature_and_by_position(self, app):
        bury(app, "a", "b", description="KeyError: 'x'")
        bury(app, "c", description="KeyError: 7")
        letters = DeadLetters(app, QUEUE)
        a, _, c = letters.list()
        assert letters.count(Selection(signature="KeyError: <text>")) == 2
        assert letters.count(Selection(signature=c.signature)) == 1
        here = Positions([a.position, c.position])
        assert [x.id for x in letters.find(Selection(positions=here))] == ["a", "c"]
        assert letters.count(Selection(positions=here, signature=a.signature)) == 1
        assert letters.replay(Selection(positions=here)).ids == ["a", "c"]
        assert letters.replay(Selection(positions=here)).lost == 2

    def test_a_dead_letter_has_several_names(self, app):
        bury(app, "a")
        (letter,) = DeadLetters(app, QUEUE).list()
        assert letter.names == ("a", "a:0:0", f"@{letter.position}")
        for name in letter.names:
            assert Selection(frozenset([name])).matches(letter)


class TestLooking:
    def test_everything_that_is_known_is_shown(self, app):
        bury(app, "a")
        (letter,) = DeadLetters(app, QUEUE).list()
        assert (letter.id, letter.task, letter.reason) == ("a", "shop.add", "retries-exhausted")
        assert (letter.description, letter.resubmit_count) == ("it broke", 0)
        assert letter.problem == ""

    def test_what_is_no_task_message_is_shown_all_the_same(self, app):
        app.broker.send(QUEUE, [Envelope(b"\xff", {}, message_id="odd")])
        app.broker.send(QUEUE, [Envelope(b"\xff", {})])
        bury_next(app)
        bury_next(app)
        odd, nameless = DeadLetters(app, QUEUE).list()
        assert (odd.id, odd.task, odd.message) == ("odd", None, None)
        assert "no task header" in odd.problem
        assert nameless.id == f"@{nameless.position}"

    def test_pages_follow_each_other(self, app):
        bury(app, *"abcde")
        letters = DeadLetters(app, QUEUE)
        first = letters.list(limit=2)
        second = letters.list(limit=2, after=first[-1].position)
        assert [x.id for x in (*first, *second)] == ["a", "b", "c", "d"]

    def test_looking_takes_nothing(self, app):
        bury(app, "a")
        letters = DeadLetters(app, QUEUE)
        assert letters.count(ALL) == letters.count(ALL) == 1

    def test_groups_by_task_reason_and_signature(self, app):
        bury(app, "a", "b")
        bury(app, "c", reason="rejected")
        bury(app, "d", description="OSError: no answer from 10.0.0.1:5432 after 31 s")
        bury(app, "e", "f", "g", description="OSError: no answer from 10.0.0.9:5432 after 7 s")
        groups = DeadLetters(app, QUEUE).groups()
        no_answer = "OSError: no answer from <address> after <n> s"
        assert [(g.task, g.reason, g.signature, g.count) for g in groups] == [
            ("shop.add", "retries-exhausted", no_answer, 4),
            ("shop.add", "retries-exhausted", "it broke", 2),
            ("shop.add", "rejected", "it broke", 1),
        ]
        assert groups[0].first_at <= groups[0].last_at

    def test_a_missing_queue_is_said(self, app):
        with pytest.raises(QueueNotFound):
            DeadLetters(app, "nosuch").list()

    def test_acting_on_a_missing_queue_does_not_make_it(self, app):
        with pytest.raises(QueueNotFound):
            DeadLetters(app, "nosuch").replay(ALL)
        assert app.broker.queues() == []


@pytest.mark.parametrize("which", ["app", "split_app"])
class TestReplay:
    def test_what_is_selected_is_sent_as_the_next_generation(self, which, request):
        app = request.getfixturevalue(which)
        bury(app, "a", "b", "c")
        report = DeadLetters(app, QUEUE).replay(Selection(frozenset(["b"])))
        assert (report.done, report.lost, report.ids) == (1, 0, ["b"])
        (message,) = live(app)
        assert (message.key, message.resubmit_count) == (("b", 1, 0), 0)
        assert [x.id for x in DeadLetters(app, QUEUE).list()] == ["a", "c"]

    def test_what_is_not_selected_is_released_uncounted(self, which, request):
        app = request.getfixturevalue(which)
        bury(app, "a", "b")
        before = [x.delivery_count for x in DeadLetters(app, QUEUE).list()]
        for _ in range(3):
            DeadLetters(app, QUEUE).replay(Selection(frozenset(["@999"])))
            DeadLetters(app, QUEUE).purge(Selection(reason="other"))
        DeadLetters(app, QUEUE).replay(Selection(frozenset(["b"])))
        assert [x.delivery_count for x in DeadLetters(app, QUEUE).list()] == before[:1]
        receiver = app.broker.receiver(QUEUE, lease=1.0, dead_letter=True)
        assert len(receiver.receive(5, 0.0)) == 1  # free at once: its lease did not stay

    def test_the_new_run_is_expected(self, which, request):
        app = request.getfixturevalue(which)
        bury(app, "a")
        DeadLetters(app, QUEUE).replay(ALL)
        assert app.results.get("a").key == RunKey("a", 1, 0)
        assert app.result("a").state == "pending"

    def test_a_body_travels_byte_for_byte(self, which, request):
        app = request.getfixturevalue(which)
        bury(app, "a")
        (letter,) = DeadLetters(app, QUEUE).list()
        DeadLetters(app, QUEUE).replay(ALL)
        (message,) = live(app)
        assert message.body == letter.envelope.body

    def test_what_cannot_be_decoded_is_sent_as_it_is(self, which, request):
        app = request.getfixturevalue(which)
        app.broker.send(QUEUE, [Envelope(b"\xffodd", {"x": 1}, message_id="odd", expires_at=1.0)])
        bury_next(app)
        assert DeadLetters(app, QUEUE).replay(Selection(frozenset(["odd"]))).done == 1
        (peeked,) = app.broker.peek(QUEUE)
        assert (peeked.envelope.body, peeked.envelope.headers) == (b"\xffodd", {"x": 1})
        assert peeked.envelope.message_id not in ("", "odd")
        assert peeked.envelope.expires_at is None

    def test_a_newer_generation_that_ended_does_not_swallow_the_replay(self, which, request):
        app = request.getfixturevalue(which)
        bury(app, "a")
        run_to_end(app, RunKey("a", 0, 0))
        run_to_end(app, RunKey("a", 4, 0), State.SUCCEEDED)
        DeadLetters(app, QUEUE).replay(ALL)
        (message,) = live(app)
        assert message.key == ("a", 5, 0)

    def test_copies_of_one_dead_letter_stay_one_invocation(self, which, request):
        app = request.getfixturevalue(which)
        app.broker.declare(QUEUE)
        bury(app, "a")
        (letter,) = DeadLetters(app, QUEUE).list()
        app.broker.send(QUEUE, [letter.envelope])
        bury_next(app)
        DeadLetters(app, QUEUE).replay(ALL)
        assert {message.key for message in live(app)} == {("a", 1, 0)}

    def test_only_what_was_there_at_the_beginning_is_replayed(self, which, request):
        app = request.getfixturevalue(which)
        bury(app, "a", "b")

        def fail_again(report):
            bury_next(app)

        report = DeadLetters(app, QUEUE).replay(ALL, progress=lambda r: r.done and fail_again(r))
        assert report.done == 2
        assert DeadLetters(app, QUEUE).count(ALL) >= 1

    def test_more_than_a_batch(self, which, request):
        app = request.getfixturevalue(which)
        many = [f"t{n}" for n in range(230)]
        bury(app, *many)
        report = DeadLetters(app, QUEUE).replay(ALL)
        assert report.done == 230
        assert sorted(message.id for message in live(app)) == sorted(many)


class TestCrashes:
    def test_a_broker_that_fails_at_the_completion_sends_nothing_in_one_file(
        self, app, monkeypatch
    ):
        bury(app, "a")
        monkeypatch.setattr(Sweep, "_settle", away_at_completion)
        with pytest.raises(BrokerUnavailable):
            DeadLetters(app, QUEUE).replay(ALL)
        assert live(app) == []
        assert app.results.get("a").key.generation == 0
        assert [x.id for x in DeadLetters(app, QUEUE).list()] == ["a"]

    def test_a_lease_that_was_lost_meanwhile_sends_nothing_in_one_file(self, app, monkeypatch):
        bury(app, "a")
        monkeypatch.setattr(
            Sweep, "_settle", lambda self, leases, how: [Lost("gone")] * len(leases)
        )
        report = DeadLetters(app, QUEUE).replay(ALL)
        assert (report.done, report.lost) == (0, 1)
        assert live(app) == []

    def test_a_second_replay_makes_the_same_message_id_in_two_files(self, split_app, monkeypatch):
        app = split_app
        bury(app, "a")
        with monkeypatch.context() as patch:
            patch.setattr(Sweep, "_settle", away_at_completion)
            with pytest.raises(BrokerUnavailable):
                DeadLetters(app, QUEUE).replay(ALL)
        assert [message.key for message in live(app)] == [("a", 1, 0)]  # sent, not completed
        DeadLetters(app, QUEUE).replay(ALL)
        assert {message.key for message in live(app)} == {("a", 1, 0)}
        assert DeadLetters(app, QUEUE).count(ALL) == 0

    def test_what_somebody_else_holds_is_counted(self, app):
        bury(app, "a", "b")
        other = app.broker.receiver(QUEUE, lease=30.0, dead_letter=True)
        assert len(other.receive(1, 1.0)) == 1
        report = DeadLetters(app, QUEUE).replay(ALL)
        assert (report.ids, report.lost) == (["b"], 1)

    def test_duplicate_detection_drops_the_second(self, tmp_path, monkeypatch):
        app = App("shop", broker=f"local://{tmp_path}/q.db")
        app.broker.declare(QUEUE, app.queue_options(QUEUE))
        app.queue(QUEUE, duplicate_window=60.0)
        app.broker.declare(QUEUE, app.queue_options(QUEUE))
        bury(app, "a")
        with monkeypatch.context() as patch:
            patch.setattr(Sweep, "_settle", away_at_completion)
            with pytest.raises(BrokerUnavailable):
                DeadLetters(app, QUEUE).replay(ALL)
        assert DeadLetters(app, QUEUE).replay(ALL).done == 1
        assert [message.key for message in live(app)] == [("a", 1, 0)]
        app.close()


settle = Sweep._settle


def away_at_completion(self, leases, how):
    """The connection goes right before the dead letter is completed, and comes back after."""
    if isinstance(how, Complete):
        raise BrokerUnavailable("the broker is away")
    return settle(self, leases, how)


class InOrderBroker(LocalBroker):
    """Hands dead letters out in order only, as Service Bus does."""

    @property
    def capabilities(self):
        return replace(super().capabilities, dead_by_position=False)


class TestInOrder:
    @pytest.fixture
    def app(self, tmp_path):
        app = App("shop", broker=InOrderBroker(Database(f"{tmp_path}/q.db")))
        yield app
        app.close()

    def test_what_lies_before_is_held_and_released_uncounted(self, app):
        bury(app, *"abcd")
        before = [x.delivery_count for x in DeadLetters(app, QUEUE).list()]
        report = DeadLetters(app, QUEUE).replay(Selection(frozenset("bd")))
        assert (report.done, report.lost, report.ids) == (2, 0, ["b", "d"])
        letters = DeadLetters(app, QUEUE).list()
        assert [x.id for x in letters] == ["a", "c"]
        assert [x.delivery_count for x in letters] == before[:2]
        assert len(app.broker.receiver(QUEUE, lease=1.0, dead_letter=True).receive(5, 0.0)) == 2

    def test_too_many_before_are_said(self, app, monkeypatch):
        monkeypatch.setattr("aztask.operate.deadletters.sweep.HELD_MOST", 2)
        bury(app, *"abcd")
        with pytest.raises(AztaskError, match="more than 2 unselected dead letters of queue"):
            DeadLetters(app, QUEUE).replay(Selection(frozenset("d")))
        assert DeadLetters(app, QUEUE).replay(Selection(frozenset("ab"))).done == 2
        assert DeadLetters(app, QUEUE).replay(Selection(frozenset("d"))).done == 1


class TestPurge:
    def test_all(self, app):
        bury(app, "a", "b")
        assert DeadLetters(app, QUEUE).purge(ALL).done == 2
        assert DeadLetters(app, QUEUE).list() == []

    def test_only_what_is_selected(self, app):
        bury(app, "a", "b", "c")
        report = DeadLetters(app, QUEUE).purge(Selection(frozenset(["a", "c"])))
        assert report.ids == ["a", "c"]
        assert [x.id for x in DeadLetters(app, QUEUE).list()] == ["b"]
        assert live(app) == []


class TestRate:
    def test_the_pace_is_kept(self, app):
        bury(app, *"abcdef")
        times = Times()
        letters = DeadLetters(app, QUEUE, clock=times.clock)
        letters.replay(ALL, rate=2.0)
        assert times.now == pytest.approx(3.0)  # six at two a second

    @pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
    def test_nonsense_is_refused(self, app, rate):
        with pytest.raises(ConfigurationError, match="rate takes messages a second"):
            DeadLetters(app, QUEUE).replay(ALL, rate=rate)


class Times:
    """A clock that only sleep moves. The leases themselves run on the engine's own clock."""

    def __init__(self):
        self.now = 0.0
        real = Clock()
        start = real.monotonic()
        self.clock = Clock(lambda: start + self.now, real.wall, self.sleep)

    def sleep(self, seconds):
        self.now += seconds


class TestSigned:
    def test_a_replay_is_signed_anew(self, tmp_path):
        keys = {"signing_keys": [Secret("k" * 32)]}
        app = App("shop", broker=f"local://{tmp_path}/q.db", **keys)
        bury(app, "a")
        DeadLetters(app, QUEUE).replay(ALL)
        assert [message.key for message in live(app)] == [("a", 1, 0)]  # live() verifies it
        app.close()

    def test_without_the_key_nothing_is_sent(self, tmp_path):
        address = f"local://{tmp_path}/q.db"
        signing = App("shop", broker=address, signing_keys=[Secret("k" * 32)])
        bury(signing, "a")
        signing.close()
        plain = App("shop", broker=address)
        with pytest.raises(ConfigurationError, match="no signing key"):
            DeadLetters(plain, QUEUE).replay(ALL)
        assert plain.broker.peek(QUEUE) == []
        assert DeadLetters(plain, QUEUE).count(ALL) == 1
        plain.close()


# -- refused for their signature -------------------------------------------------------------------

KEY = "a-key-that-no-attacker-knows-0123456789"
MAX_AGE = 3600.0


@pytest.fixture
def keyed(tmp_path):
    """An app with keys, which refuses messages that are older than an hour."""
    app = App(
        "shop", broker=f"local://{tmp_path}/q.db", results=f"local://{tmp_path}/r.db",
        signing_keys=[KEY], signature_max_age=MAX_AGE,
    )  # fmt: skip
    app.broker.declare(QUEUE)
    yield app
    app.close()


def recorded(app, task_id, age, **options):
    """A message that was signed some seconds ago."""
    codec = Codec(
        signing_keys=[KEY.encode()],
        signatures=SignatureRules(now=lambda: time.time() - age, **options),
    )
    body, content_type, encoding = codec.encode_arguments([1, 2], {})
    return codec.to_envelope(TaskMessage(task_id, "shop.add", QUEUE, body, content_type, encoding))


def unsigned(task_id):
    codec = Codec()
    body, content_type, encoding = codec.encode_arguments([1, 2], {})
    return codec.to_envelope(TaskMessage(task_id, "shop.add", QUEUE, body, content_type, encoding))


@pytest.mark.parametrize("reason", ["undecodable", "retries-exhausted"])
@pytest.mark.parametrize("old", [True, False], ids=["both versions", "version 2"])
def test_a_message_that_was_too_old_is_not_replayed_unless_asked_for(keyed, reason, old):
    """An attacker kept it, sent it again, and may have given the reason as well."""
    keyed.broker.send(QUEUE, [recorded(keyed, "t", 2 * MAX_AGE, old=old)])
    bury_next(keyed, reason)
    letters = DeadLetters(keyed, QUEUE)
    report = letters.replay(ALL)
    assert (report.done, report.refused, report.lost, live(keyed)) == (0, 1, 0, [])
    report = letters.replay(ALL, refused=True)
    assert (report.done, report.refused) == (1, 0)
    (message,) = live(keyed)
    assert (message.id, message.generation) == ("t", 1)
    assert letters.list() == []


def test_a_message_that_waited_too_long_in_its_queue_is_known_by_its_reason(keyed):
    keyed.broker.send(QUEUE, [recorded(keyed, "t", 60.0)])
    text = "the message is 4000 s old, and queue default accepts at most 3600 s (signature_max_age)"
    bury_next(keyed, "undecodable", description=text)
    assert DeadLetters(keyed, QUEUE).replay(ALL).refused == 1


def test_a_message_that_was_young_when_it_came_is_replayed_whatever_its_age_is_now(
    keyed, monkeypatch
):
    bury(keyed, "t")
    later = time.time() + 10 * MAX_AGE
    monkeypatch.setattr(clock, "wall", lambda: later)
    report = DeadLetters(keyed, QUEUE).replay(ALL)
    assert (report.done, report.refused) == (1, 0)


def test_an_unsigned_message_is_not_replayed_unless_asked_for(keyed):
    keyed.broker.send(QUEUE, [unsigned("stranger")])
    bury_next(keyed, description="the message is not signed")
    letters = DeadLetters(keyed, QUEUE)
    assert [letters.replay(ALL).refused for _ in range(2)] == [1, 1]
    assert len(letters.list()) == 1
    report = letters.replay(ALL, refused=True)
    assert (report.done, report.refused) == (1, 0)
    assert [(each.id, each.task) for each in live(keyed)] == [("stranger", "shop.add")], "signed"


def test_what_is_unsigned_and_cannot_be_read_is_sent_as_it_is(keyed):
    keyed.broker.send(QUEUE, [Envelope(b"no message", {"task": 5}, "m1")])
    bury_next(keyed)
    assert DeadLetters(keyed, QUEUE).replay(ALL, refused=True).done == 1
    (sent,) = keyed.broker.peek(QUEUE)
    assert sent.envelope.body == b"no message"


def test_a_wrong_signature_is_sent_as_it_is_and_refused_again(keyed):
    """So that a replay works once the missing key is configured, and not before."""
    codec = Codec(signing_keys=[b"another key of 16 bytes"])
    message = Codec().from_envelope(unsigned("t"), QUEUE)
    keyed.broker.send(QUEUE, [codec.to_envelope(message)])
    bury_next(keyed)
    for refused in (False, True):
        assert DeadLetters(keyed, QUEUE).replay(ALL, refused=refused).done == 1
        with pytest.raises(ContentRefused, match="does not match"):
            live(keyed)
        bury_next(keyed)


def test_without_keys_nothing_is_refused(app):
    app.broker.declare(QUEUE)
    app.broker.send(QUEUE, [unsigned("t")])
    bury_next(app)
    assert DeadLetters(app, QUEUE).replay(ALL).done == 1


def test_the_message_of_a_handler_is_replayed_as_it_is_unsigned(keyed):
    keyed.handler(queue=QUEUE, model=dict, name="shop.order")(lambda order: None)
    keyed.broker.send(QUEUE, [Envelope(b'{"order": 1}', {}, "m1", "application/json")])
    bury_next(keyed, "retries-exhausted")
    assert DeadLetters(keyed, QUEUE).replay(ALL).done == 1
