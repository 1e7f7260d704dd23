"""Messages on their way through chains of forwarding, while the local Service Bus is killed.

Nothing that was accepted vanishes: each message is active, a dead letter or a transfer dead letter
somewhere, or its completion was asked for.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from azure.core.exceptions import AzureError
from azure.servicebus import (
    NEXT_AVAILABLE_SESSION,
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusSubQueue,
)
from azure.servicebus.exceptions import OperationTimeoutError, ServiceBusError
from emulatorprocess import kill, start, stop
from harness import wait_until

from aztask.queues.servicebus.admin import administration_client

SEED = int(os.environ.get("CHAOS_SEED", "20260719"))
MESSAGES = int(os.environ.get("CHAOS_TASKS", "2000")) // 10
ROUNDS = 3
ERRORS = (ServiceBusError, AzureError, OSError, ValueError)
DEAD, TRANSFER = ServiceBusSubQueue.DEAD_LETTER, ServiceBusSubQueue.TRANSFER_DEAD_LETTER
QUEUES = ("end", "gone", "chain-2", "chain-1", "chain-0", "to-topic", "to-gone", "dying", "plain")
SOURCES = ("chain-0", "chain-1", "to-topic", "to-gone", "dying", "topic")
SUBSCRIPTIONS = ("all", "sessions", "onward")


def build(admin) -> None:
    """Chains that end in a queue with sessions, and one whose target is refused now and then."""
    admin.create_queue("end", requires_session=True, max_delivery_count=100)
    admin.create_queue("gone")
    admin.create_queue("plain")
    for name, target in [("chain-2", "end"), ("chain-1", "chain-2"), ("chain-0", "chain-1")]:
        admin.create_queue(name, forward_to=target)
    admin.create_queue("to-gone", forward_to="gone")
    admin.create_queue("dying", forward_dead_lettered_messages_to="end")
    admin.create_topic("topic")
    admin.create_subscription("topic", "all")
    admin.create_subscription("topic", "onward", forward_to="chain-1")
    admin.create_topic("refusing")
    admin.create_subscription("refusing", "all")
    admin.create_subscription("refusing", "sessions", requires_session=True)
    admin.create_queue("to-topic", forward_to="refusing")


class Traffic:
    """Sends and receives until the service dies."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._number = 0
        self.accepted: dict[str, tuple[str, bool]] = {}
        self.unsure: set[str] = set()
        self.completing: set[str] = set()

    def send(self, client: ServiceBusClient, count: int) -> None:
        """Send so many, with and without a session, to sources that the dice choose."""
        senders = {
            name: (client.get_topic_sender if name == "topic" else client.get_queue_sender)(name)
            for name in SOURCES
        }
        for _ in range(count):
            source, session = self._dice.choice(SOURCES), self._dice.random() < 0.6
            self._number += 1
            name = f"m{self._number}"
            message = ServiceBusMessage("x", message_id=name, session_id="s" if session else None)
            self.unsure.add(name)
            senders[source].send_messages(message, timeout=5)
            self.unsure.remove(name)
            self.accepted[name] = (source, session)

    def receive(self, client: ServiceBusClient) -> None:
        """Dead-letter what is in ``dying``; complete or abandon some of what has arrived."""
        dice = random.Random(self._dice.random())
        end = {"session_id": NEXT_AVAILABLE_SESSION}
        while not self._over.wait(0.05):
            with client.get_queue_receiver("dying") as receiver:
                for message in receiver.receive_messages(20, max_wait_time=0.5):
                    receiver.dead_letter_message(message, reason="bad")
            with (
                suppress(OperationTimeoutError),  # there is no session yet
                client.get_queue_receiver("end", max_wait_time=1, **end) as receiver,
            ):
                for message in receiver.receive_messages(5, max_wait_time=0.5):
                    self._settle(receiver, message, dice.choice(["complete", "dead", "abandon"]))

    def _settle(self, receiver, message, how: str) -> None:
        if how == "complete":
            self.completing.add(message.message_id)
            receiver.complete_message(message)
        elif how == "dead":
            receiver.dead_letter_message(message, reason="worse")
        else:
            receiver.abandon_message(message)

    def round(self, ready: dict[str, str], count: int, *, refusing: bool) -> None:
        """Send and receive, in threads that end when the service does; see `until_killed`."""
        self._over = threading.Event()
        with administration_client(ready["admin_connection_string"]) as admin:
            gone = admin.get_queue("gone")
            gone.status = "SendDisabled" if refusing else "Active"
            admin.update_queue(gone)
        self._client = ServiceBusClient.from_connection_string(
            ready["connection_string"], retry_total=0
        )
        self._threads = [
            threading.Thread(target=self._until_it_dies, args=(self.send, count)),
            threading.Thread(target=self._until_it_dies, args=(self.receive,)),
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        with suppress(*ERRORS):
            self._client.close()

    def wait_for(self, count: int) -> None:
        """Wait until so many more are accepted."""
        goal = len(self.accepted) + count
        wait_until(
            lambda: len(self.accepted) >= goal or not self._threads[0].is_alive(), 120, "all sent"
        )

    def _until_it_dies(self, work, *arguments: object) -> None:
        with suppress(*ERRORS):
            work(self._client, *arguments)


def places(ready: dict[str, str]) -> dict[tuple[str, str], list[str]]:
    """{(entity, kind): message ids} of all that is stored."""
    found: dict[tuple[str, str], list[str]] = {}
    entities = [(name,) for name in QUEUES]
    entities += [
        ("topic", "all"),
        ("topic", "onward"),
        ("refusing", "all"),
        ("refusing", "sessions"),
    ]
    with ServiceBusClient.from_connection_string(ready["connection_string"]) as client:
        for entity in entities:
            receiver = (
                client.get_queue_receiver
                if len(entity) == 1
                else (client.get_subscription_receiver)
            )
            for kind in (None, DEAD, TRANSFER):
                options = {"sub_queue": kind} if kind else {}
                if kind is None and entity[-1] in ("end", "sessions"):
                    options["session_id"] = "s"
                try:
                    opened = receiver(*entity, **options).__enter__()
                except ServiceBusError:  # it has no such session
                    continue
                ids, number = [], 1
                while page := opened.peek_messages(200, sequence_number=number):
                    ids += [each.message_id for each in page]
                    number = page[-1].sequence_number + 1
                opened.close()
                found["/".join(entity), kind.value if kind else "active"] = ids
    return found


def counts(ready: dict[str, str]) -> list[tuple[int, int, int]]:
    """What the service counts: active, dead letters and transfer dead letters of each entity."""
    with administration_client(ready["admin_connection_string"]) as admin:
        entities = [admin.get_queue_runtime_properties(name) for name in QUEUES]
        entities += [
            each
            for topic in ("topic", "refusing")
            for each in admin.list_subscriptions_runtime_properties(topic)
        ]
    return [
        (
            each.active_message_count,
            each.dead_letter_message_count,
            each.transfer_dead_letter_message_count,
        )
        for each in entities
    ]


def counted_at_rest(ready: dict[str, str]) -> int:
    """How many there are, once no message moves on: the service forwards what a kill left."""
    looks = [counts(ready)]

    def rests() -> bool:
        time.sleep(1.0)
        looks.append(counts(ready))
        return looks[-1] == looks[-2]

    wait_until(rests, 120, "what was left is forwarded")
    return sum(map(sum, looks[-1]))


@pytest.mark.timeout(300)
def test_nothing_that_was_accepted_vanishes_on_its_way(tmp_path: Path, capsys) -> None:
    dice = random.Random(SEED)
    traffic, data = Traffic(dice), str(tmp_path / "bus.db")
    process, ready = start("--data", data)
    try:
        with administration_client(ready["admin_connection_string"]) as admin:
            build(admin)
        for number in range(ROUNDS):
            traffic.round(ready, MESSAGES // ROUNDS, refusing=number % 2 == 1)
            traffic.wait_for(dice.randint(MESSAGES // ROUNDS // 2, MESSAGES // ROUNDS - 1))
            kill(process)
            traffic.join()
            process, ready = start("--data", data)
        total = counted_at_rest(ready)
        found = places(ready)
        assert total == sum(len(ids) for ids in found.values())
    finally:
        stop(process)
    stored = Counter(each for ids in found.values() for each in ids)
    assert len(traffic.accepted) >= MESSAGES // 3
    for name, (source, session) in traffic.accepted.items():
        # a topic stores two copies, unless it refuses the message as a whole
        copies = 2 if source == "topic" or (source == "to-topic" and session) else 1
        least = copies - 1 if name in traffic.completing else copies
        assert least <= stored[name] <= copies, (name, source, session, SEED)
    assert set(stored) <= set(traffic.accepted) | traffic.unsure
    with capsys.disabled():
        kinds = Counter()
        for (_, kind), ids in found.items():
            kinds[kind] += len(ids)
        print(
            f"\nforwarding seed {SEED}: accepted {len(traffic.accepted)} / completed "
            f"{len(traffic.completing)} / {dict(kinds)} ({ROUNDS} kills)"
        )
