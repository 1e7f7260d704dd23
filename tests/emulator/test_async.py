"""The asynchronous SDK: the same operations, on its own transport."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.aio import AutoLockRenewer, ServiceBusClient
from azure.servicebus.exceptions import (
    MessageLockLostError,
    ServiceBusAuthenticationError,
    ServiceBusError,
)

WAIT = 5


def test_queue_operations(bus, queue):
    name = queue(lock_seconds=4)

    async def run():
        async with (
            ServiceBusClient.from_connection_string(bus.connection_string, retry_total=0) as client,
            client.get_queue_sender(name) as sender,
            client.get_queue_receiver(name) as receiver,
            client.get_queue_receiver(name, sub_queue="deadletter") as dead,
        ):
            await sender.send_messages([ServiceBusMessage(f"{n}") for n in range(5)])
            batch = await sender.create_message_batch()
            batch.add_message(ServiceBusMessage(b"x" * 300_000))
            await sender.send_messages(batch)
            got = await receiver.receive_messages(6, max_wait_time=WAIT)
            assert [str(one) for one in got[:5]] == ["0", "1", "2", "3", "4"]
            assert len(b"".join(got[5].body)) == 300_000
            await receiver.complete_message(got[0])
            await receiver.abandon_message(got[1])
            await receiver.defer_message(got[2])
            await receiver.dead_letter_message(got[3], reason="r", error_description="d")
            async with AutoLockRenewer() as renewer:
                renewer.register(receiver, got[4], max_lock_renewal_duration=20)
                await receiver.renew_message_lock(got[5])
                await asyncio.sleep(4.3)
                await receiver.complete_message(got[4])
            with pytest.raises(MessageLockLostError):
                await receiver.complete_message(got[5])
            (letter,) = await dead.receive_messages(1, max_wait_time=WAIT)
            assert letter.dead_letter_reason == "r"
            await dead.complete_message(letter)
            (deferred,) = await receiver.receive_deferred_messages(got[2].sequence_number)
            await receiver.complete_message(deferred)
            later = datetime.now(UTC) + timedelta(hours=1)
            numbers = await sender.schedule_messages(ServiceBusMessage("later"), later)
            peeked = await receiver.peek_messages(10, sequence_number=1)
            assert len(peeked) == 3
            await sender.cancel_scheduled_messages(numbers)
            with pytest.raises(ServiceBusError):
                await sender.cancel_scheduled_messages(numbers)
            with pytest.raises(ServiceBusAuthenticationError):
                await client.get_queue_receiver("nowhere").__aenter__()

    asyncio.run(run())


def test_sessions(bus, queue):
    name = queue(sessions=True)

    async def run():
        async with (
            ServiceBusClient.from_connection_string(bus.connection_string, retry_total=0) as client,
            client.get_queue_sender(name) as sender,
        ):
            await sender.send_messages(ServiceBusMessage("a", session_id="s"))
            async with client.get_queue_receiver(name, session_id="s") as receiver:
                await receiver.session.set_state("state")
                assert await receiver.session.get_state() == b"state"
                await receiver.session.renew_lock()
                async for message in receiver:
                    assert str(message) == "a"
                    await receiver.complete_message(message)
                    break
            assert [one async for one in client.list_queue_sessions(name)] == ["s"]

    asyncio.run(run())
