"""What an application does with a queue, run with whichever azure-servicebus is installed.

``python scenario.py SETTINGS``, SETTINGS being JSON: the connection string, the names of a queue and
of a queue with sessions; for versions that speak TLS only also the certificate to trust and the
port that their fixed port 5671 stands for. Prints one JSON object: what was observed, by scenario.
It imports nothing of aztask, for it runs without it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from datetime import UTC, datetime, timedelta

import azure.servicebus
from azure.servicebus import (
    NEXT_AVAILABLE_SESSION,
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusSubQueue,
)
from azure.servicebus.aio import ServiceBusClient as AsyncClient
from azure.servicebus.exceptions import MessageSizeExceededError, MessagingEntityNotFoundError

WAIT = 10
AMQPS_PORT = 5671
LARGE = 300_000  # several frames of the emulator's 64 KiB


def body(message):
    return b"".join(message.body).decode()


def redirect(port):
    """Connect to `port` whenever 5671 is meant: until 7.12.2 the SDK takes no other port."""
    connect = socket.socket.connect

    def redirected(self, address):
        if address[1] == AMQPS_PORT:
            address = (address[0], port, *address[2:])
        return connect(self, address)

    socket.socket.connect = redirected


def take(receiver, count):
    """`count` messages, however many receives they take."""
    messages = []
    while len(messages) < count:
        got = receiver.receive_messages(count - len(messages), max_wait_time=WAIT)
        assert got, f"{len(messages)} messages instead of {count}"
        messages += got
    return messages


def sending_and_settling(client, queue):
    with client.get_queue_sender(queue) as sender, client.get_queue_receiver(queue) as receiver:
        sender.send_messages(ServiceBusMessage("complete"))
        sender.send_messages([ServiceBusMessage("abandon"), ServiceBusMessage("defer")])
        batch = sender.create_message_batch()
        batch.add_message(ServiceBusMessage("dead-letter"))
        batch.add_message(ServiceBusMessage("x" * LARGE))
        sender.send_messages(batch)
        peeked = [body(message)[:20] for message in receiver.peek_messages(10)]
        messages = take(receiver, 5)
        first, second, third, fourth, large = messages
        assert receiver.renew_message_lock(first) > datetime.now(UTC)
        receiver.complete_message(first)
        receiver.abandon_message(second)
        receiver.defer_message(third)
        receiver.dead_letter_message(fourth, reason="bad", error_description="very")
        receiver.complete_message(large)
        (again,) = take(receiver, 1)
        receiver.complete_message(again)
        (deferred,) = receiver.receive_deferred_messages(third.sequence_number)
        receiver.complete_message(deferred)
    with client.get_queue_receiver(queue, sub_queue=ServiceBusSubQueue.DEAD_LETTER) as dead:
        (letter,) = take(dead, 1)
        reasons = (letter.dead_letter_reason, letter.dead_letter_error_description)
        dead.complete_message(letter)
    return {
        "peeked": peeked,
        "received": [body(message)[:20] for message in messages],
        "large": len(body(large)),
        "redelivered": (body(again), again.delivery_count),
        "deferred": body(deferred),
        "dead": (body(letter), *reasons),
    }


def scheduling(client, queue):
    later = datetime.now(UTC) + timedelta(hours=1)
    with client.get_queue_sender(queue) as sender, client.get_queue_receiver(queue) as receiver:
        cancelled, _ = sender.schedule_messages([ServiceBusMessage("no"), ServiceBusMessage("yes")], later)
        sender.cancel_scheduled_messages(cancelled)
        left = [body(message) for message in receiver.peek_messages(10)]
        sender.schedule_messages(ServiceBusMessage("now"), datetime.now(UTC))
        (due,) = take(receiver, 1)
        receiver.complete_message(due)
    return {"left": left, "due": body(due)}


def forwarding_by_hand(client, queue):
    """A message that was received is sent again, and one that has no body."""
    with client.get_queue_sender(queue) as sender, client.get_queue_receiver(queue) as receiver:
        sender.send_messages(ServiceBusMessage("again", application_properties={"k": "v"}))
        (message,) = take(receiver, 1)
        sender.send_messages(message)
        receiver.complete_message(message)
        (copy,) = take(receiver, 1)
        receiver.complete_message(copy)
    return {"copy": body(copy), "properties": len(copy.application_properties)}


def deleting(client, queue):
    """Receive and delete, closed while messages are still buffered."""
    with client.get_queue_sender(queue) as sender:
        sender.send_messages([ServiceBusMessage(str(number)) for number in range(3)])
    with client.get_queue_receiver(queue, receive_mode="receiveanddelete") as receiver:
        return [body(message) for message in take(receiver, 3)]


def sessions(client, queue):
    with client.get_queue_sender(queue) as sender:
        for session in ("one", "two"):
            sender.send_messages(ServiceBusMessage(session, session_id=session))
    with client.get_queue_receiver(queue, session_id="two") as receiver:
        (message,) = take(receiver, 1)
        receiver.session.set_state(b"state")
        renewed = receiver.session.renew_lock() > datetime.now(UTC)
        state = receiver.session.get_state()
        receiver.complete_message(message)
    with client.get_queue_receiver(queue, session_id=NEXT_AVAILABLE_SESSION) as receiver:
        (other,) = take(receiver, 1)
        found = receiver.session.session_id
        receiver.complete_message(other)
    return [body(message), renewed, bytes(state).decode(), body(other), found]


def refusals(client, queue):
    seen = []
    with client.get_queue_sender(queue) as sender:
        try:
            sender.send_messages(ServiceBusMessage("x" * 1_100_000))
        except MessageSizeExceededError:
            seen.append("too large")
    try:
        with client.get_queue_receiver("missing") as receiver:
            receiver.receive_messages(1, max_wait_time=1)
    except MessagingEntityNotFoundError:
        seen.append("missing")
    return seen


async def asynchronous(client, queue, session_queue):
    async with client:
        sender, receiver = client.get_queue_sender(queue), client.get_queue_receiver(queue)
        async with sender, receiver:
            await sender.send_messages([ServiceBusMessage("a"), ServiceBusMessage("b")])
            bodies = []
            while len(bodies) < 2:
                for message in await receiver.receive_messages(2, max_wait_time=WAIT):
                    bodies.append(body(message))
                    await receiver.renew_message_lock(message)
                    await receiver.complete_message(message)
        async with client.get_queue_sender(session_queue) as sender:
            await sender.send_messages(ServiceBusMessage("s", session_id="three"))
        async with client.get_queue_receiver(session_queue, session_id="three") as receiver:
            (message,) = await receiver.receive_messages(1, max_wait_time=WAIT)
            await receiver.complete_message(message)
    return [*bodies, body(message)]


def run(settings):
    connection, queue, session_queue = (
        settings[name] for name in ("connection", "queue", "sessions")
    )
    options = {"retry_total": 0, "logging_enable": True}  # frames are logged, by their positions
    if "certificate" in settings:
        options["connection_verify"] = settings["certificate"]
        redirect(settings["port"])
    with ServiceBusClient.from_connection_string(connection, **options) as client:
        return {
            "version": azure.servicebus.__version__,
            "settling": sending_and_settling(client, queue),
            "sent again": forwarding_by_hand(client, queue),
            "deleting": deleting(client, queue),
            "sessions": sessions(client, session_queue),
            "refusals": refusals(client, queue),
            "scheduling": scheduling(client, queue),
            "async": asyncio.run(
                asynchronous(
                    AsyncClient.from_connection_string(connection, **options), queue, session_queue
                )
            ),
        }


if __name__ == "__main__":
    logging.getLogger("azure").setLevel(logging.DEBUG)
    logging.getLogger("azure").addHandler(logging.NullHandler())
    logging.getLogger("azure").propagate = False
    json.dump(run(json.loads(sys.argv[1])), sys.stdout)
