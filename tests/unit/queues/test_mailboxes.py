"""Mailboxes: which messages belong into one, and when one ends."""

import pytest

from aztask.message.envelope import Envelope
from aztask.queues.base import KEPT_SECONDS, PREFIX, Binding, queue_name
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker
from aztask.queues.local.mailboxes import LIFETIME


@pytest.mark.parametrize(
    ("pattern", "key", "fits"),
    [
        ("#", "", True),
        ("#", "worker.online", True),
        ("worker.#", "worker", True),
        ("worker.#", "worker.a.b", True),
        ("worker.#", "task.sent", False),
        ("worker.*", "worker.online", True),
        ("worker.*", "worker", False),
        ("worker.*", "worker.a.b", False),
        ("#.failed", "task.late.failed", True),
        ("#.failed", "failed", True),
        ("*.#.z", "a.z", True),
        ("*.#.z", "z", False),
        ("", "", True),
        ("", "a", False),
        ("a.b", "axb", False),
    ],
)
def test_the_pattern_of_a_topic(pattern, key, fits):
    assert Binding("events", pattern, "topic").matches("events", key) is fits


def test_other_kinds_of_exchanges():
    assert Binding("control").matches("control", "anything")
    assert not Binding("control").matches("other", "anything")
    direct = Binding("replies", "me", "direct")
    assert direct.matches("replies", "me")
    assert not direct.matches("replies", "you")


def test_a_mailbox_may_have_any_name():
    assert queue_name("celery@host.celery.pidbox").startswith(PREFIX)
    assert len({queue_name(name) for name in ("a", "A", "a.b", "\ud800", "ä")}) == 5


class Time:
    """A clock that the test moves."""

    def __init__(self):
        self.now = 1000.0

    def wall(self):
        return self.now

    monotonic = wall


@pytest.fixture
def site(tmp_path):
    clock = Time()
    database = Database(str(tmp_path / "queues.db"))
    broker = LocalBroker(database, clock=clock)
    yield broker, broker.mailboxes(), clock
    database.close()


def bodies(mailboxes, name):
    receiver = mailboxes.receiver(name, delete=True)
    return [each.envelope.body for each in receiver.receive(10, 0.0)]


def test_each_mailbox_that_is_bound_gets_a_copy(site):
    _, mailboxes, _ = site
    mailboxes.open("a", [Binding("control"), Binding("replies", "a", "direct")])
    mailboxes.open("b", [Binding("control")])
    assert mailboxes.publish("control", "", Envelope(b"all"))
    assert mailboxes.publish("replies", "a", Envelope(b"one"))
    assert not mailboxes.publish("replies", "b", Envelope(b"none"))
    assert bodies(mailboxes, "a") == [b"all", b"one"]
    assert bodies(mailboxes, "b") == [b"all"]


def test_the_last_bindings_count(site):
    _, mailboxes, _ = site
    mailboxes.open("a", [Binding("old"), Binding("both")])
    mailboxes.open("a", [Binding("new"), Binding("both")])
    assert [mailboxes.publish(name, "", Envelope(b"x")) for name in ("old", "new", "both")] == [
        False,
        True,
        True,
    ]


def test_a_mailbox_that_is_not_kept_gets_nothing_and_is_removed(site):
    broker, mailboxes, clock = site
    mailboxes.open("dead", [Binding("control")])
    mailboxes.open("alive", [Binding("control")])
    clock.now += LIFETIME - 1
    mailboxes.open("alive", [Binding("control")])
    clock.now += 2
    assert mailboxes.publish("control", "", Envelope(b"x"))
    mailboxes.open("alive", [Binding("control")])
    assert broker.engine.queues() == [queue_name("alive")]
    assert bodies(mailboxes, "alive") == [b"x"]


def test_a_deleted_mailbox_gets_nothing(site):
    broker, mailboxes, _ = site
    mailboxes.open("a", [Binding("control")])
    mailboxes.delete("a")
    mailboxes.delete("a")
    assert not mailboxes.publish("control", "", Envelope(b"x"))
    assert broker.engine.queues() == []


def test_mailboxes_are_not_listed_among_the_queues(site):
    broker, mailboxes, _ = site
    broker.declare("orders")
    mailboxes.open("a", [Binding("control")])
    assert broker.queues() == ["orders"]


def test_notes_are_kept_for_mailboxes_that_are_opened_later(site):
    broker, mailboxes, clock = site
    mailboxes.keep("control", ["a", "b"])
    clock.now += KEPT_SECONDS / 2
    mailboxes.keep("control", ["b", "c"])
    mailboxes.keep("other", ["d"])
    assert sorted(mailboxes.kept("control")) == ["a", "b", "c"]
    assert mailboxes.kept("other") == ["d"]
    clock.now += KEPT_SECONDS / 2 + 1
    assert sorted(mailboxes.kept("control")) == ["b", "c"]
    mailboxes.open("worker", [Binding("control")])
    assert broker.engine.queues() == [queue_name("worker")]
    assert sorted(mailboxes.kept("control")) == ["b", "c"]


def test_the_oldest_notes_go_when_there_are_too_many(site, monkeypatch):
    _, mailboxes, clock = site
    monkeypatch.setattr("aztask.queues.local.mailboxes.MOST_KEPT", 3)
    for note in "abcd":
        mailboxes.keep("control", [note])
        clock.now += 1
    assert sorted(mailboxes.kept("control")) == ["b", "c", "d"]
    mailboxes.keep("control", list("vwxyz"))
    assert sorted(mailboxes.kept("control")) == ["x", "y", "z"]


def test_notes_are_no_mailboxes_also_for_a_release_that_does_not_know_them(site):
    _, mailboxes, _ = site
    mailboxes.keep("control", ["a", ""])
    assert not mailboxes.publish("control", "a", Envelope(b"x"))
    assert not mailboxes.publish("control", "", Envelope(b"x"))
