"""The transport's options are checked once, by name."""

import pytest

from aztask.errors import ConfigurationError
from aztask.message.bounds import MessageLimits
from aztask.transport.options import TransportOptions


def test_defaults():
    options = TransportOptions.read({"broker": None, "polling_interval": 3})
    assert (options.lease, options.declare, options.limits) == (60.0, True, MessageLimits())
    assert options.accept == {
        "application/json", "application/x-msgpack", "application/data", "text/plain",
    }  # fmt: skip


def test_accept_takes_names_and_content_types():
    assert (
        "application/x-own"
        in TransportOptions.read({"accept": ["json", "application/x-own"]}).accept
    )


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
    ],
)
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigurationError):
        TransportOptions.read(options)


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
