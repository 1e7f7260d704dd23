"""Dead letters are grouped again without decoding those that were read before."""

import pytest

from aztask import App
from aztask.operate.deadletters import DeadLetters, Selection, letters
from aztask.operate.deadletters.letters import ReadLetters
from aztask.settlement import DeadLetter


@pytest.fixture
def shop(tmp_path, monkeypatch):
    app = App("shop", broker=f"local://{tmp_path}/queues.db")

    @app.task
    def charge(order):
        """Charge an order."""

    app.broker.declare("default")
    decoded = []
    read = App.message_in

    def counts(self, envelope, *given, **more):
        decoded.append(envelope.message_id)
        return read(self, envelope, *given, **more)

    monkeypatch.setattr(App, "message_in", counts)
    app.decoded = decoded
    yield app
    app.close()


def die(app, count, error):
    """So many dead letters of an error."""
    app.tasks["shop.charge"].map([(number,) for number in range(count)])
    receiver = app.broker.receiver("default", lease=30.0)
    found = receiver.receive(count, 1.0)
    receiver.settle([(each, DeadLetter("rejected", error)) for each in found])
    receiver.close()
    app.decoded.clear()


def grouped(app, read):
    """The groups, which are those without what was read before; how many were decoded."""
    found = DeadLetters(app, "default").groups(read)
    decoded = len(app.decoded)
    assert found == DeadLetters(app, "default").groups()
    app.decoded.clear()
    return {each.signature: each.count for each in found}, decoded


def test_only_new_dead_letters_are_decoded(shop):
    read = ReadLetters()
    die(shop, 5, "ValueError: no amount")
    assert grouped(shop, read) == ({"ValueError: no amount": 5}, 5)
    assert grouped(shop, read) == ({"ValueError: no amount": 5}, 0)
    die(shop, 2, "KeyError: order")
    assert grouped(shop, read) == ({"ValueError: no amount": 5, "KeyError: order": 2}, 2)


def test_those_that_are_gone_are_forgotten(shop):
    read = ReadLetters()
    die(shop, 5, "ValueError: no amount")
    die(shop, 2, "KeyError: order")
    grouped(shop, read)
    DeadLetters(shop, "default").purge(Selection(signature="KeyError: order"))
    assert grouped(shop, read)[0] == {"ValueError: no amount": 5}
    assert len(read.of("default")) == 5


def test_what_is_kept_has_a_bound(shop, monkeypatch):
    monkeypatch.setattr(letters, "MOST_READ", 6)
    read = ReadLetters()
    read.keep("other", dict.fromkeys(range(2), (1.0, ("t", "r", "s"))))
    die(shop, 5, "ValueError: no amount")
    grouped(shop, read)
    assert not read.of("default")
    assert grouped(shop, read) == ({"ValueError: no amount": 5}, 5)
    read.keep("other", {})
    grouped(shop, read)
    assert len(read.of("default")) == 5
