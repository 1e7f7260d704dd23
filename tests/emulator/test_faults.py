"""Faults on demand, as an application meets them."""

from __future__ import annotations

import logging
import time

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.exceptions import ServiceBusConnectionError, ServiceBusServerBusyError
from rawclient import RawClient, attach_frame, message, transfer_frame

from aztask.testing import Faults, emulator


def test_a_busy_service_is_tried_again():
    with (
        emulator(queues=["q"], faults=Faults(busy=1.0)) as bus,
        ServiceBusClient.from_connection_string(bus.connection_string, retry_total=0) as client,
        client.get_queue_sender("q") as sender,
        pytest.raises(ServiceBusServerBusyError),
    ):
        sender.send_messages(ServiceBusMessage("x"))


def test_a_dropped_answer_loses_no_work():
    with emulator(queues=["q"], faults=Faults(drop=1.0)) as bus:
        client = RawClient(bus.port)
        client.write(attach_frame("q") + transfer_frame(0, message(b"x")))
        with pytest.raises((EOFError, ConnectionResetError)):
            while True:
                client.until("Disposition")
        client.socket.close()
        assert bus._emulator.broker.engine.stats("q").active == 1


def test_latency_delays_every_answer_and_keeps_their_order():
    with emulator(queues=["q"], faults=Faults(latency=0.1)) as bus:
        started = time.monotonic()
        client = RawClient(bus.port)
        client.attach("q")
        answers = client.send([b"x"] * 50)
        client.socket.close()
        assert time.monotonic() - started > 0.25  # the handshake, the link, the messages
        assert [each.first for each in answers] == list(range(50))


def test_a_restart_breaks_all_connections_and_clients_come_back():
    with emulator(queues=["q"], faults=Faults(restart=1.0)) as bus:
        client = RawClient(bus.port)
        with pytest.raises((EOFError, ConnectionResetError)):
            client.until("Close")
        client.socket.close()
        with (
            # One send may meet more restarts than the default's three retries, and a wait that
            # doubles with each would be longer than this test's time.
            ServiceBusClient.from_connection_string(
                bus.connection_string, retry_total=100, retry_mode="fixed", retry_backoff_factor=0.1
            ) as sdk,
            sdk.get_queue_sender("q") as sender,
        ):
            end = time.monotonic() + 3
            sent = 0
            while time.monotonic() < end:
                sender.send_messages(ServiceBusMessage("x"))
                sent += 1
        assert bus._emulator.broker.engine.stats("q").active >= sent


def test_a_connection_error_without_retries():
    with (
        emulator(queues=["q"], faults=Faults(drop=1.0)) as bus,
        ServiceBusClient.from_connection_string(bus.connection_string, retry_total=0) as client,
        pytest.raises(ServiceBusConnectionError),
        client.get_queue_sender("q") as sender,
    ):
        sender.send_messages(ServiceBusMessage("x"))


def test_the_sdk_comes_back_after_its_idle_links_were_detached(caplog):
    """Sender and receiver, each after a pause."""
    caplog.set_level(logging.INFO, "azure")
    with (
        emulator(queues=["q"], faults=Faults(idle=1.0)) as bus,
        ServiceBusClient.from_connection_string(bus.connection_string) as client,
        client.get_queue_sender("q") as sender,
        client.get_queue_receiver("q") as receiver,
    ):
        for body in ("one", "two", "three"):
            sender.send_messages(ServiceBusMessage(body))
            assert [str(each) for each in receiver.peek_messages()] == [body]
            (got,) = receiver.receive_messages(1, max_wait_time=5)
            assert str(got) == body
            receiver.renew_message_lock(got)
            receiver.complete_message(got)
            time.sleep(2.5)
            linked = [
                address
                for endpoint in list(bus._emulator.server.endpoints)
                for address in endpoint.client.addresses()
            ]
            assert not {"to q", "from q"} & set(linked)
        assert bus._emulator.broker.engine.stats("q").active == 0
    assert "AmqpMessageConsumer.IdleTimerExpired" in caplog.text
