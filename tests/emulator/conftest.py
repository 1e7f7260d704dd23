"""One emulator and one client for all tests of this folder: each test makes queues of its own.

Opening a link costs the SDK half a second, so tests share senders and receivers where they can,
and every client has ``retry_total=0``: one retry trap of the SDK takes 11 seconds.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
from azure.servicebus import ServiceBusClient

from aztask.testing import emulator

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def bus():
    with emulator() as running:
        yield running


@pytest.fixture(scope="session")
def client(bus):
    with ServiceBusClient.from_connection_string(bus.connection_string, retry_total=0) as client:
        yield client


@pytest.fixture
def queue(bus):
    """Makes queues: ``queue(lock_seconds=2)`` returns the new one's name."""

    def make(**settings):
        name = f"queue-{next(_numbers)}"
        bus.create_queue(name, **settings)
        return name

    return make


@pytest.fixture(scope="session")
def link(client):
    """Opens a sender and a receiver of a queue, at the same time; closes all of them at the end.

    Each takes half a second to open and to close, which is the SDK's doing.
    """
    opened = []
    with ThreadPoolExecutor(16) as pool:

        def open_(name, *, send=True, **options):
            links = [client.get_queue_sender(name)] if send else []
            links.append(client.get_queue_receiver(name, **options))
            list(pool.map(lambda one: one.__enter__(), links))
            opened.extend(links)
            return tuple(links) if send else links[0]

        yield open_
        list(pool.map(lambda one: one.close(), opened))
