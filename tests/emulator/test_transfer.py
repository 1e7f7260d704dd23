"""What a forwarding target refuses goes to the transfer dead letters of its source."""

from __future__ import annotations

import pytest
from azure.servicebus import ServiceBusMessage, ServiceBusSubQueue

WAIT = 10
PLACE = ServiceBusSubQueue.TRANSFER_DEAD_LETTER
NO_SESSION = (
    "Session ID is null.",
    "Session enabled entity doesn't allow a message whose session identifier is null.",
)


def lost(receiver):
    """Receive the one message; it was the only one."""
    (letter,) = receiver.receive_messages(1, max_wait_time=WAIT)
    (peeked,) = receiver.peek_messages(2, sequence_number=1)
    assert peeked.message_id == letter.message_id
    receiver.renew_message_lock(letter)
    receiver.complete_message(letter)
    assert receiver.peek_messages(1, sequence_number=1) == []
    return letter


def test_from_a_queue_to_a_queue_with_sessions(bus, queue, client):
    target = queue(sessions=True)
    source = queue(forward_to=target)
    with client.get_queue_sender(source) as sender:
        sender.send_messages(ServiceBusMessage("none", message_id="m"))
        sender.send_messages(ServiceBusMessage("some", session_id="s"))
    with client.get_queue_receiver(target, session_id="s") as receiver:
        (some,) = receiver.receive_messages(1, max_wait_time=WAIT)
        assert str(some) == "some"
    with bus.administration_client() as admin:
        counts = admin.get_queue_runtime_properties(source)
        assert counts.transfer_dead_letter_message_count == 1
        assert counts.active_message_count == counts.dead_letter_message_count == 0
    with client.get_queue_receiver(source, sub_queue=PLACE) as receiver:
        letter = lost(receiver)
    assert (str(letter), letter.message_id) == ("none", "m")
    assert (letter.dead_letter_reason, letter.dead_letter_error_description) == NO_SESSION


def test_a_dead_letter_to_a_queue_with_sessions(queue, client):
    source = queue(forward_dead_letters_to=queue(sessions=True))
    with client.get_queue_sender(source) as sender:
        sender.send_messages(ServiceBusMessage("dead"))
    with client.get_queue_receiver(source) as receiver:
        (message,) = receiver.receive_messages(1, max_wait_time=WAIT)
        receiver.dead_letter_message(message, reason="bad", error_description="very bad")
    with client.get_queue_receiver(source, sub_queue=PLACE) as receiver:
        letter = lost(receiver)
    assert letter.dead_letter_reason == NO_SESSION[0]
    first = "It was a dead letter before: bad: very bad"
    assert letter.dead_letter_error_description == f"{NO_SESSION[1]} {first}"


def test_from_a_queue_to_a_topic_one_of_whose_subscriptions_has_sessions(bus, queue, client):
    """The message reaches the topic. It is a dead letter of that subscription alone."""
    with bus.administration_client() as admin:
        admin.create_topic("transfer-a")
        admin.create_subscription("transfer-a", "plain")
        admin.create_subscription("transfer-a", "s", requires_session=True)
    source = queue(forward_to="transfer-a")
    with client.get_queue_sender(source) as sender:
        sender.send_messages(ServiceBusMessage("none"))
    dead = {"sub_queue": ServiceBusSubQueue.DEAD_LETTER}
    with client.get_subscription_receiver("transfer-a", "s", **dead) as receiver:
        assert lost(receiver).dead_letter_reason == NO_SESSION[0]
    with client.get_subscription_receiver("transfer-a", "plain") as receiver:
        assert str(lost(receiver)) == "none"


def test_from_a_subscription_to_a_queue_with_sessions(bus, queue, client):
    target = queue(sessions=True)
    with bus.administration_client() as admin:
        admin.create_topic("transfer-b")
        admin.create_subscription("transfer-b", "s", forward_to=target)
        with client.get_topic_sender("transfer-b") as sender:
            sender.send_messages(ServiceBusMessage("none"))
        with client.get_subscription_receiver("transfer-b", "s", sub_queue=PLACE) as receiver:
            assert lost(receiver).dead_letter_reason == NO_SESSION[0]
        counts = admin.get_subscription_runtime_properties("transfer-b", "s")
        assert counts.transfer_dead_letter_message_count == 0


@pytest.mark.parametrize("action", ["delete", "disable"])
def test_to_a_queue_that_is_gone_or_disabled(bus, queue, client, action):
    target = queue()
    source = queue(forward_to=target)
    with bus.administration_client() as admin:
        if action == "delete":
            admin.delete_queue(target)
        else:
            properties = admin.get_queue(target)
            properties.status = "SendDisabled"
            admin.update_queue(properties)
    with client.get_queue_receiver(source, sub_queue=PLACE) as receiver:
        with client.get_queue_sender(source) as sender:  # while the receiver waits
            sender.send_messages(ServiceBusMessage("lost"))
        letter = lost(receiver)
    reasons = {"delete": "MessagingEntityNotFound", "disable": "MessagingEntityDisabled"}
    assert letter.dead_letter_reason == reasons[action]
