"""Sequence numbers: from 1 in each entity, without gaps, and with the partition on top."""

from __future__ import annotations

import datetime

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.exceptions import ServiceBusError
from azure.servicebus.management import SqlRuleFilter
from emulatorprocess import kill, start

from aztask.testing import administration_client

SCHEDULED = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)


def test_a_queue_begins_at_1_beside_others(queue, link):
    first, second = queue(), queue()
    sender, receiver = link(first)
    other, _ = link(second)
    other.send_messages([ServiceBusMessage("other")] * 3)
    assert sender.schedule_messages([ServiceBusMessage("s")] * 2, SCHEDULED) == [1, 2]
    sender.send_messages(ServiceBusMessage("a"))
    other.send_messages(ServiceBusMessage("other"))
    sender.send_messages([ServiceBusMessage("b"), ServiceBusMessage("c")])
    sender.cancel_scheduled_messages([2])
    with pytest.raises(ServiceBusError):
        sender.cancel_scheduled_messages([2])
    assert [one.sequence_number for one in receiver.peek_messages(10)] == [1, 3, 4, 5]
    assert [one.sequence_number for one in receiver.peek_messages(1, sequence_number=4)] == [4]
    got = receiver.receive_messages(3, max_wait_time=5)
    assert [one.sequence_number for one in got] == [3, 4, 5]
    receiver.defer_message(got[0])
    (deferred,) = receiver.receive_deferred_messages([3])
    assert (str(deferred), deferred.sequence_number) == ("a", 3)
    receiver.dead_letter_message(got[1], reason="r")
    dead = link(first, send=False, sub_queue="deadletter")
    assert [one.sequence_number for one in dead.peek_messages(10)] == [4]


def test_subscriptions_count_their_own_and_show_the_topic_s(bus, client):
    with bus.administration_client() as admin:
        admin.create_topic("numbers")
        for name in ("all", "few"):
            admin.create_subscription("numbers", name)
        admin.delete_rule("numbers", "few", "$Default")
        rule = SqlRuleFilter("sys.Label = 'few' AND sys.SequenceNumber > 1")
        admin.create_rule("numbers", "few", "some", filter=rule)
    with client.get_topic_sender("numbers") as sender:
        for label in ("few", "many", "few"):
            sender.send_messages(ServiceBusMessage("x", subject=label))
    with (
        client.get_subscription_receiver("numbers", "all") as every,
        client.get_subscription_receiver("numbers", "few") as few,
    ):
        first = few.receive_messages(1, max_wait_time=5)
        seen = [(m.sequence_number, m.enqueued_sequence_number) for m in every.peek_messages(10)]
        assert seen == [(1, 1), (2, 2), (3, 3)]
        assert [(m.sequence_number, m.enqueued_sequence_number) for m in first] == [(1, 3)]
        assert [m.enqueued_sequence_number for m in few.peek_messages(10, sequence_number=1)] == [3]


def test_the_partition_is_in_the_top_16_bits(bus, client):
    with bus.administration_client() as admin:
        admin.create_queue("parts", enable_partitioning=True)
        assert admin.get_queue("parts").enable_partitioning
    with (
        client.get_queue_sender("parts") as sender,
        client.get_queue_receiver("parts") as receiver,
    ):
        sent = [ServiceBusMessage(str(n), message_id=f"id-{n}") for n in range(40)]
        sent += [ServiceBusMessage("key", partition_key="one") for _ in range(3)]
        sender.send_messages(sent)
        (scheduled,) = sender.schedule_messages([sent[0]], SCHEDULED)
        numbers = [one.sequence_number for one in receiver.peek_messages(100)]
        assert numbers == sorted(numbers)
        assert scheduled in numbers
        sender.cancel_scheduled_messages(scheduled)
        assert {number >> 48 for number in numbers} == set(range(1, 17))
        for partition in range(1, 17):
            own = [number & (1 << 48) - 1 for number in numbers if number >> 48 == partition]
            assert own == list(range(1, len(own) + 1))
        assert [one.sequence_number for one in receiver.peek_messages(100)] == []
        numbers.remove(scheduled)
        last = [
            one.sequence_number for one in receiver.peek_messages(9, sequence_number=numbers[35])
        ]
        assert last == numbers[35:]
        got = receiver.receive_messages(43, max_wait_time=5)
        assert sorted(one.sequence_number for one in got) == numbers
        keyed = [one.sequence_number for one in got if str(one) == "key"]
        assert keyed == list(range(keyed[0], keyed[0] + 3)), "in the order of their partition"
        first = got[0]
        receiver.defer_message(first)
        (again,) = receiver.receive_deferred_messages([first.sequence_number])
        assert str(again) == str(first)


def test_the_copies_of_a_partitioned_topic_have_partitions(bus, client):
    with bus.administration_client() as admin:
        admin.create_topic("partedtopic", enable_partitioning=True)
        admin.create_subscription("partedtopic", "s")
    with (
        client.get_topic_sender("partedtopic") as sender,
        client.get_subscription_receiver("partedtopic", "s") as receiver,
    ):
        sender.send_messages(ServiceBusMessage("x", partition_key="one"))
        (got,) = receiver.receive_messages(1, max_wait_time=5)
        assert got.sequence_number >> 48 == got.enqueued_sequence_number >> 48 > 0


def test_partitions_count_on_after_kill_9(tmp_path):
    data = str(tmp_path / "bus.db")
    given = []
    for run in range(2):
        process, ready = start("--data", data)
        with (
            administration_client(ready["admin_connection_string"]) as admin,
            ServiceBusClient.from_connection_string(ready["connection_string"]) as client,
        ):
            if not run:
                admin.create_queue("parts", enable_partitioning=True)
            with client.get_queue_sender("parts") as sender:
                messages = [ServiceBusMessage("x", partition_key=key) for key in "aabb"]
                sender.send_messages(messages)
            with client.get_queue_receiver("parts") as receiver:
                got = receiver.receive_messages(4, max_wait_time=5)
                given += [one.sequence_number for one in got]
                for one in got:
                    receiver.complete_message(one)
            kill(process)
    assert len({number >> 48 for number in given}) == 2
    assert sorted(number & (1 << 48) - 1 for number in given) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_no_number_is_given_again_after_kill_9(tmp_path):
    data = str(tmp_path / "bus.db")
    expected = 1
    for _ in range(3):
        process, ready = start("--data", data, "--queue", "q")
        with (
            ServiceBusClient.from_connection_string(ready["connection_string"]) as client,
            client.get_queue_sender("q") as sender,
            client.get_queue_receiver("q") as receiver,
        ):
            sender.send_messages([ServiceBusMessage("x"), ServiceBusMessage("y")])
            got = receiver.receive_messages(2, max_wait_time=5)
            assert [one.sequence_number for one in got] == [expected, expected + 1]
            for one in got:
                receiver.complete_message(one)
            kill(process)
        expected += 2
