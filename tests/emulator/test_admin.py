"""The administration API, with the SDK's own client."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from azure.core.exceptions import HttpResponseError, ResourceExistsError, ResourceNotFoundError
from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import ServiceBusError
from azure.servicebus.management import CorrelationRuleFilter, SqlRuleFilter


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


def test_an_update_replaces_a_queue(admin):
    admin.create_queue("replaced-target")
    admin.create_queue(
        "replaced",
        requires_session=True,
        requires_duplicate_detection=True,
        duplicate_detection_history_time_window=timedelta(minutes=1),
        default_message_time_to_live=timedelta(days=2),
        dead_lettering_on_message_expiration=True,
        forward_dead_lettered_messages_to="replaced-target",
        user_metadata="mine",
        max_size_in_megabytes=2048,
        status="SendDisabled",
    )
    queue = admin.get_queue("replaced")
    queue.forward_dead_lettered_messages_to = None
    queue.user_metadata = None
    queue.default_message_time_to_live = None
    queue.dead_lettering_on_message_expiration = None
    queue.max_size_in_megabytes = None
    queue.status = None
    queue.requires_session = None
    queue.requires_duplicate_detection = None
    queue.duplicate_detection_history_time_window = timedelta(minutes=2)
    admin.update_queue(queue)
    got = admin.get_queue("replaced")
    assert (got.forward_dead_lettered_messages_to, got.user_metadata) == (None, None)
    assert got.default_message_time_to_live > timedelta(days=10_000_000)
    assert (got.dead_lettering_on_message_expiration, got.max_size_in_megabytes) == (False, 1024)
    assert got.status == "Active"
    assert (got.requires_session, got.requires_duplicate_detection) == (True, True)
    assert got.duplicate_detection_history_time_window == timedelta(minutes=2)
    with pytest.raises(HttpResponseError, match="sessions cannot be changed"):
        admin.update_queue(got, requires_session=False)
    with pytest.raises(HttpResponseError, match="duplicate detection"):
        admin.update_queue(got, requires_duplicate_detection=False)


def test_forwarding_ends_with_the_update_that_clears_it(admin, client):
    for name in ("forwarded-to", "forwarding"):
        admin.create_queue(name, forward_to="forwarded-to" if name == "forwarding" else None)
    queue = admin.get_queue("forwarding")
    queue.forward_to = None
    admin.update_queue(queue)
    assert admin.get_queue("forwarding").forward_to is None
    with client.get_queue_sender("forwarding") as sender:
        sender.send_messages(ServiceBusMessage("stays"))
    with client.get_queue_receiver("forwarding") as receiver:
        assert [str(one) for one in receiver.receive_messages(1, max_wait_time=5)] == ["stays"]


def test_an_update_replaces_a_topic_and_a_subscription(admin):
    window = timedelta(minutes=3)
    admin.create_topic("replaced-topic", user_metadata="mine")
    admin.create_subscription(
        "replaced-topic", "one", max_delivery_count=3, user_metadata="mine", lock_duration="PT20S"
    )
    topic = admin.get_topic("replaced-topic")
    topic.user_metadata = None
    topic.duplicate_detection_history_time_window = window
    admin.update_topic(topic)
    got = admin.get_topic("replaced-topic")
    assert (got.user_metadata, got.requires_duplicate_detection) == (None, False)
    assert got.duplicate_detection_history_time_window == window
    admin.create_rule("replaced-topic", "one", "mine", filter=SqlRuleFilter("a = 1"))
    subscription = admin.get_subscription("replaced-topic", "one")
    subscription.user_metadata = subscription.max_delivery_count = None
    admin.update_subscription("replaced-topic", subscription)
    got = admin.get_subscription("replaced-topic", "one")
    assert (got.user_metadata, got.max_delivery_count) == (None, 10)
    assert got.lock_duration == timedelta(seconds=20)
    rules = [rule.name for rule in admin.list_rules("replaced-topic", "one")]
    assert rules == ["$Default", "mine"]


def test_an_update_replaces_a_rule(admin):
    admin.create_topic("replaced-rules")
    admin.create_subscription("replaced-rules", "one")
    for name in ("first", "second"):
        rule_filter = CorrelationRuleFilter(label="l", correlation_id="c", properties={"k": 1})
        admin.create_rule("replaced-rules", "one", name, filter=rule_filter)
    rule = admin.get_rule("replaced-rules", "one", "first")
    rule.filter = CorrelationRuleFilter(label="other")
    admin.update_rule("replaced-rules", "one", rule)
    got = admin.get_rule("replaced-rules", "one", "first")
    assert (got.filter.label, got.filter.correlation_id) == ("other", None)
    assert not got.filter.properties
    assert got.created_at_utc == rule.created_at_utc
    names = [each.name for each in admin.list_rules("replaced-rules", "one")]
    assert names == ["$Default", "first", "second"]
    admin.delete_rule("replaced-rules", "one", "first")
    with pytest.raises(ResourceNotFoundError):
        admin.update_rule("replaced-rules", "one", rule)


def test_a_queue_may_forward_to_itself(admin, client):
    """The service allows this for an existing queue; its messages end up in the dead letters."""
    with pytest.raises(ResourceNotFoundError):
        admin.create_queue("circle", forward_to="circle")
    queue = admin.create_queue("circle")
    queue.forward_to = "circle"
    admin.update_queue(queue)
    assert admin.get_queue("circle").forward_to.endswith("/circle")
    with client.get_queue_sender("circle") as sender:
        sender.send_messages(ServiceBusMessage("round"))
    with client.get_queue_receiver("circle", sub_queue="deadletter") as receiver:
        (letter,) = receiver.receive_messages(1, max_wait_time=5)
        assert str(letter) == "round"
        receiver.complete_message(letter)


def test_updates_without_a_name_are_refused(admin):
    admin.create_topic("nameless")
    subscription = admin.create_subscription("nameless", "one")
    rule = admin.get_rule("nameless", "one", "$Default")
    subscription.name = rule.name = ""
    with pytest.raises(HttpResponseError):
        admin.update_subscription("nameless", subscription)
    with pytest.raises(HttpResponseError):
        admin.update_rule("nameless", "one", rule)


@pytest.mark.parametrize("detection", [True, False])
def test_message_ids_are_remembered_for_seven_days_at_most(admin, detection):
    with pytest.raises(HttpResponseError, match="to 604800 s"):
        admin.create_queue(
            "long-memory",
            requires_duplicate_detection=detection,
            duplicate_detection_history_time_window=timedelta(days=8),
        )
