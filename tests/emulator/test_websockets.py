"""AMQP over WebSockets with the SDK, on both ports."""

from __future__ import annotations

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage, TransportType


@pytest.mark.parametrize("port", ["port", "admin_port"])
def test_python(bus, queue, port):
    name = queue()
    client = ServiceBusClient.from_connection_string(
        bus.connection_string,
        transport_type=TransportType.AmqpOverWebsocket,
        custom_endpoint_address=f"http://{bus.host}:{getattr(bus, port)}",
        retry_total=0,
    )
    with client, client.get_queue_sender(name) as sender:
        sender.send_messages(ServiceBusMessage("x" * 200_000))
        with client.get_queue_receiver(name) as receiver:
            (message,) = receiver.receive_messages(1, max_wait_time=5)
            receiver.complete_message(message)
    assert len(str(message)) == 200_000
