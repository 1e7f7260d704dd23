"""The transport's options are checked once, by name."""

import pytest

from aztask.errors import ConfigurationError
from aztask.limits import Limits
from aztask.transport_options import TransportOptions


def test_defaults():
    options = TransportOptions.read({"broker": None, "polling_interval": 3})
    assert (options.lease, options.declare, options.limits) == (60.0, True, Limits())
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


@pytest.mark.parametrize("broker", [None, 5, list, object()])
def test_what_is_no_broker_is_refused_with_an_example(broker):
    with pytest.raises(ConfigurationError, match="transport_options"):
        TransportOptions.read({"broker": broker}).open(None)


def test_a_text_needs_somebody_who_opens_it():
    with pytest.raises(ConfigurationError, match="register"):
        TransportOptions.read({"broker": "local://"}).open(None)
