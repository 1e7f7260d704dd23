"""What goes into a queue and what comes out: where nothing was said, and what is refused."""

from __future__ import annotations

import math

import pytest

from aztask.errors import ConfigurationError
from aztask.queues.engine import (
    DUPLICATE,
    TIME_TO_LIVE_EXPIRED,
    Database,
    Engine,
    NewMessage,
    StoredSettings,
)
from aztask.support.clock import Clock


def test_a_new_message_of_nothing_but_its_payload():
    assert NewMessage(b"x") == (b"x", "", None, None, None, 0)
    assert NewMessage(b"x")._fields == (
        *("payload", "message_id", "session", "due", "expires_at", "partition"),
    )


def test_settings_where_nothing_was_said():
    assert StoredSettings() == StoredSettings(60.0, 100, 0.0, None, False, False)
    assert StoredSettings().lease_seconds == 60.0
    assert StoredSettings().max_deliveries == 100


def test_the_four_states_have_names():
    database = Database(":memory:")
    engine = Engine(database, clock=Clock(monotonic=lambda: 1000.0, wall=lambda: 9000.0))
    engine.create_queue("q")
    engine.send("q", [NewMessage(b"%d" % n) for n in range(3)])
    (first, second) = engine.receive("q", 2)
    engine.defer("q", [(first.seq, first.token)])
    engine.send("q", [NewMessage(b"x", due=9001.0)])
    assert [each.state for each in engine.peek("q")] == [
        "deferred",
        "leased",
        "active",
        "scheduled",
    ]
    assert engine.stats("q") == (1, 1, 1, 1, 0)
    assert second.lease_until == 1060.0
    database.close()


@pytest.mark.parametrize("name", ["lease_seconds", "max_deliveries", "time_to_live"])
def test_the_wrong_setting_is_named_and_small_ones_are_taken(name):
    with pytest.raises(ConfigurationError, match=f"^{name} must be a number above 0, not 0"):
        StoredSettings(**{name: 0})
    assert getattr(StoredSettings(**{name: 0.5}), name) == 0.5
    assert StoredSettings(time_to_live=None).time_to_live is None


def test_no_window_is_a_window_of_nothing():
    assert StoredSettings(duplicate_window=0.0).duplicate_window == 0.0
    assert StoredSettings(duplicate_window=0.5).duplicate_window == 0.5


@pytest.mark.parametrize("value", [-0.5, -1, math.nan, math.inf])
def test_a_setting_that_cannot_be_is_refused(value):
    for name in ("lease_seconds", "max_deliveries", "time_to_live", "duplicate_window"):
        with pytest.raises(ConfigurationError, match=f"^{name} must be "):
            StoredSettings(**{name: value})


def test_what_is_told_of_messages_is_told_as_the_service_does():
    """The reason of a message that expired is Service Bus's own; no message has the number 0."""
    assert TIME_TO_LIVE_EXPIRED == "TTLExpiredException"
    assert DUPLICATE == 0
