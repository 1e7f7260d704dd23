"""Which way to a namespace is taken."""

import pytest
from azure.servicebus import TransportType

from aztask.address.addresses import ServiceBusAddress
from aztask.errors import ConfigurationError
from aztask.queues.servicebus.client import ConnectionOptions

NAMESPACE = ServiceBusAddress("shop.servicebus.windows.net")
EMULATOR = ServiceBusAddress("127.0.0.1", 5672, emulator=True)


def test_the_usual_way():
    way = ConnectionOptions.find(NAMESPACE, None, None, {})
    assert way == ConnectionOptions()
    assert way.options() == {"transport_type": TransportType.Amqp}


def test_the_environment_says_another():
    way = ConnectionOptions.find(
        NAMESPACE,
        None,
        None,
        {
            "AZTASK_SERVICEBUS_TRANSPORT": "websockets",
            "AZTASK_SERVICEBUS_ENDPOINT": "gateway.example:8443",
            "SSL_CERT_FILE": "/etc/authorities.pem",
        },
    )
    assert way.options() == {
        "transport_type": TransportType.AmqpOverWebsocket,
        "custom_endpoint_address": "sb://gateway.example:8443",
        "connection_verify": "/etc/authorities.pem",
    }


def test_what_the_caller_says_wins():
    environ = {"AZTASK_SERVICEBUS_TRANSPORT": "websockets", "AZTASK_SERVICEBUS_ENDPOINT": "a:1"}
    assert ConnectionOptions.find(NAMESPACE, False, "b:2", environ) == ConnectionOptions(
        False, "b:2"
    )


def test_a_transport_that_there_is_not():
    with pytest.raises(ConfigurationError, match="Did you mean 'websockets'"):
        ConnectionOptions.find(NAMESPACE, None, None, {"AZTASK_SERVICEBUS_TRANSPORT": "websocket"})


@pytest.mark.parametrize(("websockets", "endpoint"), [(True, None), (None, "a:1")])
def test_the_emulator_is_reached_directly(websockets, endpoint):
    with pytest.raises(ConfigurationError, match="over plain AMQP"):
        ConnectionOptions.find(EMULATOR, websockets, endpoint, {})


def test_websockets_need_a_library(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r'pip install "aztask\[websockets\]"'):
        ConnectionOptions.find(NAMESPACE, True, None, {})
