"""The values that every adapter shares: capabilities, and what a queue is declared with."""

import pytest

from aztask.queues.base import ANY_SESSION, Capabilities, QueueOptions, ReceiverOptions


def test_without_the_capability_there_is_no_defer_strategy():
    assert "defer" in Capabilities("a", defer=True).retry_strategies
    without = Capabilities("a").retry_strategies
    assert set(Capabilities("a", defer=True).retry_strategies) - set(without) == {"defer"}


def test_implied_options_do_not_change_a_queue_that_exists():
    options = QueueOptions(lease=30.0, sessions=True, implied=frozenset({"lease"}))
    assert options.explicit() == QueueOptions(sessions=True)
    assert QueueOptions(lease=30.0).explicit() == QueueOptions(lease=30.0)


def test_an_option_that_is_asked_for_is_no_longer_implied():
    options = QueueOptions(lease=30.0, sessions=True, implied=frozenset({"lease", "sessions"}))
    assert options.with_explicit(lease=60.0) == QueueOptions(
        lease=60.0, sessions=True, implied=frozenset({"sessions"})
    )


def test_a_receiver_takes_the_living_and_settles_unless_told_otherwise():
    options = ReceiverOptions("q", 30.0)
    assert (options.session, options.dead_letter, options.delete) == (None, False, False)
    assert ReceiverOptions("q", 30.0, ANY_SESSION) != options
    with pytest.raises(AttributeError):
        options.lease = 60.0
