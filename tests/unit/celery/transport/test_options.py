"""The transport's options are checked once, by name."""

import pytest

from aztask.celery.transport.options import TransportOptions
from aztask.errors import ConfigurationError
from aztask.message.bounds import MessageLimits


def test_defaults():
    options = TransportOptions.read({"broker": None, "polling_interval": 3})
    assert (options.lease, options.declare, options.limits) == (None, True, MessageLimits())
    assert (options.leases, options.sessions, options.translate_names) == ({}, frozenset(), False)
    assert options.accept == frozenset()


def test_accept_takes_names_and_content_types():
    options = TransportOptions.read({"accept": ["json", "application/x-own"]})
    assert options.accept == {"application/json", "application/x-own"}


@pytest.mark.parametrize(
    "options",
    [
        {"accept": ["pickle"]},
        {"accept": "application/x-python-serialize"},
        {"accept": ["application/x-yaml"]},
        {"accept": [7]},
        {"accept": 7},
        {"lease": 0},
        {"lease": float("nan")},
        {"declare": "no"},
        {"limits": 5},
        {"leases": 5},
        {"leases": {"slow": 0}},
        {"leases": {5: 60}},
        {"sessions": 5},
        {"sessions": [5]},
        {"translate_names": 1},
    ],
)
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigurationError):
        TransportOptions.read(options)


def test_queues_have_leases_and_sessions_of_their_own():
    options = TransportOptions.read({"lease": 30, "leases": {"slow": 300}, "sessions": "orders"})
    assert (options.lease, options.leases) == (30.0, {"slow": 300.0})
    assert options.sessions == {"orders"}


def test_the_options_name_the_broker_before_the_url_does():
    assert TransportOptions.read({}, "local://").broker == "local://"
    assert TransportOptions.read({"broker": "given"}, "local://").broker == "given"


@pytest.mark.parametrize("broker", [None, 5, list, object(), "nonsense", "redis://x"])
def test_what_is_no_broker_is_refused(broker):
    with pytest.raises(ConfigurationError):
        TransportOptions.read({"broker": broker}).open()


def test_a_broker_that_was_opened_here_is_closed_here(tmp_path):
    broker, close = TransportOptions.read({"broker": f"local://{tmp_path}/q.db"}).open()
    broker.declare("q")
    close()
    assert (tmp_path / "q.db").exists()
    given, leave = TransportOptions.read({"broker": broker}).open()
    assert given is broker
    leave()
