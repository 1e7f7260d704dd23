"""The administration plane, with the SDK's own client."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from azure.core.exceptions import HttpResponseError, ResourceExistsError, ResourceNotFoundError
from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import ServiceBusError


@pytest.fixture(scope="module")
def admin(bus):
    with bus.administration_client() as admin:
        yield admin


def test_queues_from_creation_to_deletion(admin):
    created = admin.create_queue(
        "orders",
        lock_duration="PT30S",
        max_delivery_count=3,
        default_message_time_to_live=timedelta(days=2),
        dead_lettering_on_message_expiration=True,
        requires_duplicate_detection=True,
        duplicate_detection_history_time_window=timedelta(minutes=1),
        user_metadata="mine & yours",
        max_size_in_megabytes=2048,
    )
    got = admin.get_queue("Orders")
    assert (got.lock_duration, got.max_delivery_count) == (timedelta(seconds=30), 3)
    assert got.default_message_time_to_live == timedelta(days=2)
    assert got.duplicate_detection_history_time_window == timedelta(minutes=1)
    assert (got.user_metadata, got.max_size_in_megabytes) == ("mine & yours", 2048)
    assert created.requires_session is False
    got.max_delivery_count = 5
    got.lock_duration = timedelta(minutes=2)
    admin.update_queue(got)
    assert admin.get_queue("orders").max_delivery_count == 5
    with pytest.raises(ResourceExistsError):
        admin.create_queue("orders")
    with pytest.raises(HttpResponseError, match="lock duration"):
        admin.create_queue("orders2", lock_duration="PT10M")
    admin.delete_queue("orders")
    with pytest.raises(ResourceNotFoundError):
        admin.get_queue("orders")
    with pytest.raises(ResourceNotFoundError):
        admin.delete_queue("orders")


def test_lists_come_in_pages(admin):
    names = {f"page-{number:03}" for number in range(120)}
    for name in names:
        admin.create_queue(name)
    listed = {queue.name for queue in admin.list_queues()}
    assert names <= listed
    for name in names:
        admin.delete_queue(name)
    assert not names & {queue.name for queue in admin.list_queues_runtime_properties()}


def test_runtime_properties(admin, client):
    admin.create_queue("counted")
    with (
        client.get_queue_sender("counted") as sender,
        client.get_queue_receiver("counted") as receiver,
    ):
        sender.send_messages([ServiceBusMessage(f"{n}") for n in range(4)])
        sender.schedule_messages(ServiceBusMessage("later"), datetime.now(UTC) + timedelta(hours=1))
        (message,) = receiver.receive_messages(1, max_wait_time=5)
        receiver.dead_letter_message(message)
        runtime = admin.get_queue_runtime_properties("counted")
        assert runtime.active_message_count == 3
        assert runtime.dead_letter_message_count == 1
        assert runtime.scheduled_message_count == 1
        assert runtime.total_message_count == 5
        admin.delete_queue("counted")
        with pytest.raises(ServiceBusError):
            sender.send_messages(ServiceBusMessage("too late"))


def test_forwarding_targets(admin):
    admin.create_queue("target")
    with pytest.raises(HttpResponseError):
        admin.create_queue("source", forward_to="missing")
    admin.create_queue("source", forward_to="target", forward_dead_lettered_messages_to="target")
    assert admin.get_queue("source").forward_to.endswith("/target")


def test_topics_and_subscriptions(admin):
    admin.create_topic("t", default_message_time_to_live="PT1H")
    admin.create_subscription("t", "one", requires_session=True, lock_duration="PT20S")
    admin.create_subscription("t", "two")
    assert [one.name for one in admin.list_subscriptions("t")] == ["one", "two"]
    one = admin.get_subscription("t", "one")
    assert one.requires_session
    one.max_delivery_count = 7
    admin.update_subscription("t", one)
    assert admin.get_subscription("t", "one").max_delivery_count == 7
    assert "t" in [topic.name for topic in admin.list_topics()]
    topic = admin.get_topic("t")
    topic.user_metadata = "meta"
    admin.update_topic(topic)
    assert admin.get_topic("t").user_metadata == "meta"
    admin.delete_subscription("t", "two")
    admin.delete_topic("t")
    with pytest.raises(ResourceNotFoundError):
        admin.get_subscription("t", "one")


def test_the_namespace(admin):
    assert admin.get_namespace_properties().namespace_type == "Messaging"


def test_malformed_requests_do_not_stop_it(bus, admin):
    async def send(data):
        reader, writer = await asyncio.open_connection(bus.host, bus.admin_port)
        writer.write(data)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return answer

    for data in (
        b"\x00\xff" * 100 + b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"PUT /q HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
        b"PUT /q HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"PUT /q HTTP/1.1\r\nContent-Length: 5\r\n\r\nab",
        b"PUT /q HTTP/1.1\r\nContent-Length: 5\r\n\r\n<x><x",
        b"PUT /q HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"PUT /q HTTP/1.1\r\nContent-Length: 30\r\n\r\n<!DOCTYPE x [<!ENTITY a 'b'>]>",
        b"GET /" + b"x" * 100_000,
        b"DELETE /q HTTP/1.1\r\n\r\n",
        b"",
    ):
        answer = asyncio.run(send(data))
        assert not answer or answer.split()[1].startswith(b"4"), data[:60]
    assert admin.get_namespace_properties().name
