"""The broker's address in the URL of a Kombu connection."""

import logging
import socket

import kombu
import pytest
from kombu.transport import TRANSPORT_ALIASES

import aztask_kombu
from aztask.celery import transport
from aztask.celery.transport.connection import REQUEST_LOG, check_reachable, quiet_requests
from aztask.celery.transport.options import address_of, broker_of
from aztask.errors import BrokerUnavailable, ConfigurationError
from aztask.queues.base import Capabilities

transport.register()


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("aztask+local:///var/q.db", "local:///var/q.db"),
        ("aztask+local:///var/q.db?durable=full", "local:///var/q.db?durable=full"),
        ("aztask+local://:memory:", "local://:memory:"),
        ("aztask+servicebus://my-namespace", "servicebus://my-namespace"),
        ("aztask+storagequeue://myaccount", "storagequeue://myaccount"),
        ("aztask://", None),
    ],
)
def test_a_url_names_the_broker(url, address):
    connection = kombu.Connection(url)
    assert address_of(connection) == address
    if address is not None:
        assert broker_of(connection, {"AZTASK_BROKER": "local://"}) == address
        assert connection.as_uri() == url


def test_without_an_address_the_option_and_then_the_environment_name_the_broker():
    environment = {"AZTASK_BROKER": "local:///env.db"}
    plain = kombu.Connection("aztask://")
    assert broker_of(plain, environment) == "local:///env.db"
    assert broker_of(plain, {}) is None
    given = kombu.Connection("aztask://", transport_options={"broker": "local:///option.db"})
    assert broker_of(given, environment) == "local:///option.db"


def test_two_addresses_are_refused():
    options = {"broker": "local:///other.db"}
    connection = kombu.Connection("aztask+local:///one.db", transport_options=options)
    with pytest.raises(ConfigurationError, match="another"):
        broker_of(connection, {})


def test_a_bare_name_says_what_to_write():
    with pytest.raises(ConfigurationError, match=r"aztask\+servicebus://my-namespace"):
        address_of(kombu.Connection("aztask://my-namespace"))


def test_a_connection_without_an_address_says_what_to_write(monkeypatch):
    monkeypatch.delenv("AZTASK_BROKER", raising=False)
    with pytest.raises(ConfigurationError, match=r"aztask\+local:///path/queues.db"):
        kombu.Connection("aztask://").connect()


def test_a_copy_of_a_connection_has_the_same_address(tmp_path):
    url = f"aztask+local://{tmp_path}/q.db"
    with kombu.Connection(url) as connection:
        connection.connect()
        with connection.clone() as copy:
            copy.connect()
            assert address_of(copy) == address_of(connection) == f"local://{tmp_path}/q.db"
            assert copy.as_uri() == url


def test_failover_goes_to_the_next_url(tmp_path):
    """Kombu takes the next URL apart; it is put together again, also in a copy."""
    (tmp_path / "file").write_text("no directory")
    dead, live = (f"aztask+local://{tmp_path}/{name}" for name in ("file/q.db", "live.db"))
    with kombu.Connection(f"{dead};{live}") as connection:
        connection.ensure_connection(max_retries=3, interval_start=0, interval_step=0)
        connection.SimpleQueue("orders").put("x")
        assert address_of(connection) == f"local://{tmp_path}/live.db"
        with connection.clone() as copy:
            assert copy.SimpleQueue("orders").get(timeout=5).payload == "x"


def test_a_url_that_cannot_be_right_is_reported_if_it_is_the_only_one(tmp_path):
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(ConfigurationError):
        kombu.Connection(f"aztask+local://{tmp_path}/file/q.db").connect()


class Service:
    """A broker on a host."""

    capabilities = Capabilities(name="servicebus")

    def __init__(self, port):
        self.server = ("127.0.0.1", port)


def test_a_host_that_does_not_answer_is_reported(monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("aztask.celery.transport.connection.getproxies", dict)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_reachable(Service(port), 5.0)
    with pytest.raises(BrokerUnavailable, match=rf"127\.0\.0\.1:{port} does not accept"):
        check_reachable(Service(port), 5.0)
    monkeypatch.setenv("AZTASK_SERVICEBUS_TRANSPORT", "websockets")
    check_reachable(Service(port), 5.0)


def test_the_sdks_request_lines_stay_out_of_the_log():
    log = logging.getLogger(REQUEST_LOG)
    before = log.level
    try:
        log.setLevel(logging.NOTSET)
        quiet_requests(Service(1))
        assert log.level == logging.WARNING
        log.setLevel(logging.DEBUG)
        quiet_requests(Service(1))
        assert log.level == logging.DEBUG
    finally:
        log.setLevel(before)


def test_both_ways_to_register_add_the_same():
    assert aztask_kombu.ALIASES == transport.ALIASES
    assert {TRANSPORT_ALIASES[alias] for alias in transport.ALIASES} == {aztask_kombu.TRANSPORT}
