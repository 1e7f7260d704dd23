"""A sweep: dead letters under leases, replaced, removed or given back."""

import pytest

from aztask import App, AztaskError
from aztask.message.envelope import Envelope
from aztask.operate.deadletters import sweep as module
from aztask.operate.deadletters.letters import DeadLetterView
from aztask.operate.deadletters.sweep import HeldLetter, Replacement, Sweep
from aztask.queues.base import shared_transaction
from aztask.settlement import DeadLetter


@pytest.fixture
def app(tmp_path):
    app = App("shop", broker=f"local://{tmp_path}/q.db", results=f"local://{tmp_path}/q.db")
    app.broker.declare("default")
    app.broker.send("default", [Envelope(b"x", message_id=name) for name in "abc"])
    receiver = app.broker.receiver("default", lease=30.0)
    receiver.settle([(each, DeadLetter("rejected")) for each in receiver.receive(3, 1.0)])
    receiver.close()
    yield app
    app.close()


def counts(app):
    stats = app.broker.stats("default")
    return stats.active, stats.leased, stats.dead


def held(lease):
    delivery = lease.delivery
    view = DeadLetterView(
        "default", delivery.position, delivery.envelope, "rejected", "", 1.0, 1, None
    )
    return HeldLetter(view, lease)


def test_what_is_taken_and_not_settled_is_given_back_uncounted(app):
    with Sweep(app, "default") as sweep:
        assert len(sweep.take(2)) == 2
    assert counts(app) == (0, 0, 3)
    with Sweep(app, "default") as sweep:
        assert {lease.delivery.delivery_count for lease in sweep.take(3)} == {2}


def test_replacements_are_sent_and_dead_letters_are_gone(app):
    with Sweep(app, "default") as sweep:
        first, second, _ = map(held, sweep.take(3))
        sweep.replace([(first, Replacement(Envelope(b"y", message_id="new"), None))])
        sweep.remove([second])
        assert sweep.settled(first)
        assert (sweep.report.done, sweep.report.ids) == (2, ["a", "b"])
    assert counts(app) == (1, 0, 1)


def test_what_somebody_else_settled_is_counted_as_lost(app):
    with Sweep(app, "default") as sweep:
        (taken,) = map(held, sweep.take(1))
        sweep.remove([taken])
        sweep.remove([taken])
        assert (sweep.report.done, sweep.report.lost) == (1, 1)


def test_the_number_held_aside_is_bounded(app, monkeypatch):
    monkeypatch.setattr(module, "HELD_MOST", 2)
    with Sweep(app, "default") as sweep:
        sweep.keep_aside(2)
        with pytest.raises(AztaskError, match="more than 2 unselected dead letters"):
            sweep.keep_aside(1)


def test_one_file_is_one_transaction(app, tmp_path):
    assert shared_transaction(app.broker, app.results) is app.broker
    other = App("shop", broker=f"local://{tmp_path}/q.db", results=f"local://{tmp_path}/r.db")
    assert shared_transaction(other.broker, other.results) is None
    other.close()
