"""Payloads that nothing refers to, and those that must stay."""

import time

import pytest

from aztask import App
from aztask.errors import BrokerUnavailable, ConfigurationError
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage
from aztask.operate import orphans
from aztask.operate.orphans import payload_findings
from aztask.stores.payloads.holders import PayloadHolders
from aztask.stores.payloads.store import PayloadKind
from aztask.support.finding import Level

LARGE = b"x" * 2000
LATER = 3 * 3600.0


@pytest.fixture
def app(tmp_path):
    app = App("shop", broker=f"local://{tmp_path}/q.db", payload_threshold=1000)
    app.task(name="weigh")(len)
    yield app
    app.close()


def collected(app, after=LATER):
    (finding,) = orphans._collected(app, app.payloads, time.time() + after)
    return finding


def left(app):
    return sorted(each.kind for each in app.payloads.store.list())


def test_what_a_message_refers_to_stays(app):
    app.tasks["weigh"].delay(LARGE)
    app.tasks["weigh"].with_options(delay=9000, queue="other").delay(LARGE)
    app.payloads.keep(PayloadKind.ARGUMENTS, LARGE)
    assert collected(app).text.startswith("removed 1 payload of 2")
    assert left(app) == ["args", "args"]


def test_it_stays_even_when_it_is_older_than_any_lifetime(app):
    app.tasks["weigh"].delay(LARGE)
    collected(app, after=1000 * 86400.0)
    assert left(app) == ["args"]


def test_a_checkpoint_in_a_message_stays(app):
    stored = app.payloads.keep(PayloadKind.CHECKPOINT, LARGE)
    app.payloads.keep(PayloadKind.CHECKPOINT, LARGE)
    body, *_ = app.codec.encode_arguments((1,), {})
    saved = app.codec.encode_value(stored)
    message = TaskMessage(id="a", task="weigh", queue="default", body=body, saved=saved)
    app.broker.send("default", [app.codec.to_envelope(message)])
    collected(app)
    assert [each.name for each in app.payloads.store.list()] == [stored.name]


def test_young_ones_stay(app):
    app.payloads.keep(PayloadKind.ARGUMENTS, LARGE)
    assert "removed 0" in collected(app, after=3500.0).text
    assert left(app) == ["args"]


def test_without_a_full_view_only_the_oldest_go(app, monkeypatch):
    app.payloads.keep(PayloadKind.ARGUMENTS, LARGE)

    def refuse():
        raise ConfigurationError("no permission to list queues")

    monkeypatch.setattr(app.broker, "queues", refuse)
    finding = collected(app)
    assert finding.level is Level.WARNING
    assert "no permission to list queues" in finding.advice
    assert "30 days old" in finding.advice
    assert left(app) == ["args"]
    collected(app, after=31 * 86400.0)
    assert left(app) == []


def test_an_unreachable_broker_removes_nothing(app, monkeypatch):
    app.payloads.keep(PayloadKind.ARGUMENTS, LARGE)

    def away(*args, **options):
        raise BrokerUnavailable("away")

    monkeypatch.setattr(app.broker, "peek", away)
    app.broker.declare("default")
    monkeypatch.setattr(orphans.time, "time", lambda: time.monotonic() + 4e9)
    findings = list(payload_findings(app, collect=True))
    assert [each.level for each in findings] == [Level.OK, Level.PROBLEM]
    assert left(app) == ["args"]


def test_a_message_that_is_replayed_while_it_reads_is_seen(app):
    """It moves from the dead letters to the queue, behind the reader's back."""
    app.tasks["weigh"].delay(LARGE)
    (peeked,) = app.broker.peek("default")

    class Moving:
        capabilities = app.broker.capabilities
        turn = 0

        def queues(self):
            return ["default"]

        def peek(self, queue, *, dead_letter=False, after=None, limit=100):
            if after is not None:
                return []
            self.turn += 1
            return [peeked] if self.turn == 3 else []

    store = app.payloads.store
    assert len(PayloadHolders(Moving(), None).needed(list(store.list())).names) == 1


def test_doctor_says_where_payloads_are(app, tmp_path):
    (finding,) = payload_findings(app)
    assert (
        finding.text == f"arguments of more than 1,000 bytes are stored in {tmp_path}/q.db.payloads"
    )


def test_without_a_store_doctor_says_how_to_get_one():
    app = App("shop", broker="local://:memory:")
    (finding,) = payload_findings(app, collect=True)
    assert finding.level is Level.OK
    assert "AZTASK_PAYLOADS" in finding.text


def test_a_hostile_reference_is_skipped(app):
    for reference in ("../../etc/passwd", 7, "x" * 100_000):
        app.broker.send("default", [Envelope(b"", headers={"aztask-payload": reference})])
    app.payloads.keep(PayloadKind.ARGUMENTS, LARGE)
    assert "removed 1" in collected(app).text
