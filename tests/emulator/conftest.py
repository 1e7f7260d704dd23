"""All tests of this folder share one emulator and one client; each test makes its own queues.

The SDK takes half a second to open a link, so tests share senders and receivers where they can.
Every client has ``retry_total=0``, because some retries of the SDK take 11 seconds.
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
    """Make a queue: ``queue(lock_seconds=2)`` returns its name."""

    def make(**settings):
        name = f"queue-{next(_numbers)}"
        bus.create_queue(name, **settings)
        return name

    return make


@pytest.fixture(scope="session")
def link(client):
    """Open a sender and a receiver of a queue in parallel; close all of them at the end.

    The SDK takes half a second to open each of them, and half a second to close it.
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
