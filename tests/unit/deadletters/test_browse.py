"""Dead letters of a queue, from the service or from the index beside it."""

import pytest

from aztask import App
from aztask.message.envelope import Envelope
from aztask.operate.deadletters import letters
from aztask.operate.deadletters.letters import DeadLetterBrowser
from aztask.settlement import DeadLetter
from aztask.support.clock import SYSTEM_CLOCK


@pytest.fixture
def app(tmp_path):
    app = App("shop", broker=f"local://{tmp_path}/q.db", results=f"local://{tmp_path}/r.db")
    app.broker.declare("default")
    yield app
    app.close()


def bury(app, *names):
    app.broker.send("default", [Envelope(b"x", message_id=name) for name in names])
    receiver = app.broker.receiver("default", lease=30.0)
    deliveries = receiver.receive(len(names), 1.0)
    receiver.settle([(delivery, DeadLetter("rejected")) for delivery in deliveries])


def test_all_pages_of_a_service_that_pages(app, monkeypatch):
    monkeypatch.setattr(letters, "PAGE", 2)
    bury(app, "a", "b", "c", "d", "e")
    browser = DeadLetterBrowser(app, "default", SYSTEM_CLOCK)
    assert not browser.whole
    assert [each.envelope.message_id for each in browser.all()] == ["a", "b", "c", "d", "e"]


def test_without_an_index_nothing_has_to_be_noted(app):
    bury(app, "a")
    browser = DeadLetterBrowser(app, "default", SYSTEM_CLOCK)
    receiver = app.broker.receiver("default", lease=30.0, dead_letter=True)
    browser.met(receiver.receive(1, 1.0))
    browser.gone([])
    browser.met_all()
    browser.emptied()
    receiver.close()


def test_beyond_what_the_service_shows_the_index_is_asked(app, monkeypatch):
    """As on a Storage queue, whose first messages are shown and the others noted."""
    bury(app, "a", "b")
    monkeypatch.setattr(letters, "index_for", lambda broker, results: results.dead_index)
    browser = DeadLetterBrowser(app, "default", SYSTEM_CLOCK)
    receiver = app.broker.receiver("default", lease=30.0, dead_letter=True)
    browser.met(receiver.receive(2, 1.0))
    receiver.close()
    monkeypatch.setattr(
        browser, "_peek", lambda: app.broker.peek("default", dead_letter=True, limit=1)
    )
    shown, noted = browser.all()
    assert (shown.envelope.message_id, noted.envelope.message_id) == ("a", "b")
    assert noted.position == "b"
    browser.emptied()
    assert list(app.results.dead_index.notes("default")) == []
