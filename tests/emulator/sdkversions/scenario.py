"""What an application does with queues, run with whichever azure-servicebus is installed.

``python scenario.py SETTINGS``, where SETTINGS is JSON: ``connection``, a connection string, and
``certificate`` and ``port`` for versions that speak TLS only. Each function of `SCENARIOS` and
`ASYNC_SCENARIOS` uses the queue of its own name. Prints one JSON object: what each one observed.
It imports nothing of aztask, because it runs without it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import azure.servicebus
from azure.servicebus import (
    NEXT_AVAILABLE_SESSION,
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusSubQueue,
)
from azure.servicebus.aio import ServiceBusClient as AsyncClient
from azure.servicebus.exceptions import MessageSizeExceededError, ServiceBusAuthenticationError

WAIT = 10
FIXED_PORT = 5671
LARGE = 300_000  # several frames of the emulator's 64 KiB


def body(message):
    return None if message.body is None else b"".join(message.body).decode()


def redirect(port):
    """Make versions before 7.14 work on a free port of the loopback interface.

    They connect to 5671 only. And their async client sets TCP_MAXSEG of a connected socket to the
    value that it has, which Linux refuses above 32767: on loopback it is 65483, so that this client
    reaches no server there.
    """
    connect, set_option = socket.socket.connect, socket.socket.setsockopt

    def redirected(self, address):
        if address[1] == FIXED_PORT:
            address = (address[0], port, *address[2:])
        return connect(self, address)

    def set_but_segment_size(self, level, option, *value):
        if (level, option) != (socket.SOL_TCP, socket.TCP_MAXSEG):
            set_option(self, level, option, *value)

    socket.socket.connect = redirected
    socket.socket.setsockopt = set_but_segment_size


def take(receiver, count):
    """Receive `count` messages, in as many calls as that takes."""
    messages = []
    while len(messages) < count:
        got = receiver.receive_messages(count - len(messages), max_wait_time=WAIT)
        assert got, f"{len(messages)} messages instead of {count}"
        messages += got
    return messages


def settling(client, queue):
    """Send a single message, a list and a batch; settle each message in a different way."""
    with client.get_queue_sender(queue) as sender, client.get_queue_receiver(queue) as receiver:
        sender.send_messages(ServiceBusMessage("complete"))
        sender.send_messages([ServiceBusMessage("abandon"), ServiceBusMessage("defer")])
        batch = sender.create_message_batch()
        batch.add_message(ServiceBusMessage("dead-letter"))
        batch.add_message(ServiceBusMessage("x" * LARGE))
        sender.send_messages(batch)
        peeked = [body(message)[:12] for message in receiver.peek_messages(10)]
        messages = take(receiver, 5)
        first, second, third, fourth, large = messages
        renewed = receiver.renew_message_lock(first) > datetime.now(UTC)
        receiver.complete_message(first)
        receiver.abandon_message(second)
        receiver.defer_message(third)
        receiver.dead_letter_message(fourth, reason="bad", error_description="very")
        receiver.complete_message(large)
        (again,) = take(receiver, 1)
        receiver.complete_message(again)
        (deferred,) = receiver.receive_deferred_messages(third.sequence_number)
        receiver.complete_message(deferred)
        left = len(receiver.peek_messages(10))
    return {
        "peeked": peeked,
        "received": [body(message)[:12] for message in messages],
        "large": len(body(large)),
        "renewed": renewed,
        "redelivered": [body(again), again.delivery_count],
        "deferred": body(deferred),
        "left": left,
    }


def dead_letters(client, queue):
    with client.get_queue_sender(queue) as sender, client.get_queue_receiver(queue) as receiver:
        sender.send_messages(ServiceBusMessage("x"))
        (message,) = take(receiver, 1)
        receiver.dead_letter_message(message, reason="bad", error_description="very")
    with client.get_queue_receiver(queue, sub_queue=ServiceBusSubQueue.DEAD_LETTER) as receiver:
        (letter,) = take(receiver, 1)
        receiver.complete_message(letter)
    return [body(letter), letter.dead_letter_reason, letter.dead_letter_error_description]


def scheduling(client, queue):
    later = datetime.now(UTC) + timedelta(hours=1)
    with client.get_queue_sender(queue) as sender, client.get_queue_receiver(queue) as receiver:
        messages = [ServiceBusMessage("cancelled"), ServiceBusMessage("scheduled")]
        cancelled, _ = sender.schedule_messages(messages, later)
        sender.cancel_scheduled_messages(cancelled)
        left = [body(message) for message in receiver.peek_messages(10)]
        sender.schedule_messages(ServiceBusMessage("due"), datetime.now(UTC))
        (due,) = take(receiver, 1)
        receiver.complete_message(due)
    return [*left, body(due)]


def sending_again(client, queue):
    """Send a received message again; send and receive a message without a body."""
    with client.get_queue_sender(queue) as sender, client.get_queue_receiver(queue) as receiver:
        sender.send_messages(ServiceBusMessage("again", application_properties={"k": "v"}))
        (message,) = take(receiver, 1)
        sender.send_messages(message)
        receiver.complete_message(message)
        (copy,) = take(receiver, 1)
        receiver.complete_message(copy)
        sender.send_messages(ServiceBusMessage(None))
        (empty,) = take(receiver, 1)
        receiver.complete_message(empty)
    return [body(copy), len(copy.application_properties), body(empty)]


def receiving_and_deleting(client, queue):
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
        state = bytes(receiver.session.get_state()).decode()
        receiver.complete_message(message)
    with client.get_queue_receiver(queue, session_id=NEXT_AVAILABLE_SESSION) as receiver:
        (other,) = take(receiver, 1)
        found = receiver.session.session_id
        receiver.complete_message(other)
    return [body(message), renewed, state, body(other), found]


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
    except ServiceBusAuthenticationError:  # the service refuses the token for it
        seen.append("missing")
    return seen


async def async_messages(client, queue):
    bodies = []
    sender, receiver = client.get_queue_sender(queue), client.get_queue_receiver(queue)
    async with sender, receiver:
        await sender.send_messages([ServiceBusMessage("a"), ServiceBusMessage("b")])
        while len(bodies) < 2:
            for message in await receiver.receive_messages(2, max_wait_time=WAIT):
                bodies.append(body(message))
                await receiver.renew_message_lock(message)
                await receiver.complete_message(message)
    return bodies


async def async_sessions(client, queue):
    async with client.get_queue_sender(queue) as sender:
        await sender.send_messages(ServiceBusMessage("s", session_id="three"))
    async with client.get_queue_receiver(queue, session_id="three") as receiver:
        (message,) = await receiver.receive_messages(1, max_wait_time=WAIT)
        await receiver.complete_message(message)
    return body(message)


SCENARIOS = (
    *(settling, dead_letters, scheduling, sending_again, receiving_and_deleting),
    *(sessions, refusals),
)
ASYNC_SCENARIOS = (async_messages, async_sessions)


async def run_async(connection, options):
    async with AsyncClient.from_connection_string(connection, **options) as client:
        found = await asyncio.gather(*(each(client, each.__name__) for each in ASYNC_SCENARIOS))
    return zip((each.__name__ for each in ASYNC_SCENARIOS), found, strict=True)


def run(settings):
    connection = settings["connection"]
    options = {"retry_total": 0, "logging_enable": True}  # logging reads fields by position
    if "certificate" in settings:
        options["connection_verify"] = settings["certificate"]
        redirect(settings["port"])
    seen = {"version": azure.servicebus.__version__}
    with (
        ServiceBusClient.from_connection_string(connection, **options) as client,
        ThreadPoolExecutor(len(SCENARIOS)) as pool,  # each mostly waits for links to open and close
    ):
        running = {each.__name__: pool.submit(each, client, each.__name__) for each in SCENARIOS}
        seen |= asyncio.run(run_async(connection, options))
        seen |= {name: future.result() for name, future in running.items()}
    return seen


if __name__ == "__main__":
    logger = logging.getLogger("azure")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    json.dump(run(json.loads(sys.argv[1])), sys.stdout)
