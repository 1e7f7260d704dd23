"""Messages of programs without aztask, sent with the services' own clients, on every broker."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.storage.queue import BinaryBase64EncodePolicy, QueueClient
from azurite import Azurite
from bus import bus_site
from harness import Site, site_in, wait_until
from ledger_app import work
from storage import storage_site

from aztask.message.envelope import Envelope
from aztask.operate.deadletters.view import DeadLetters
from aztask.queues.base import QueueOptions
from aztask.testing import RunningEmulator

MODULE = "foreign_app:app"
BODIES = [
    json.dumps({"OrderNumber": 1}).encode(),
    json.dumps({"OrderNumber": 2, "Failures": 2, "Later": "field"}).encode(),
    b"\xef\xbb\xbf" + json.dumps({"OrderNumber": 3}).encode(),
    base64.b64encode(json.dumps({"OrderNumber": 4}).encode()),
]
BAD = [b'{"OrderNumber": "five"}', b"no JSON at all"]
HOPELESS = json.dumps({"OrderNumber": 6, "Failures": 99}).encode()


@dataclass
class Service:
    """A site, and how a program without aztask sends to its queue."""

    site: Site
    send: Callable[[bytes], None]


@pytest.fixture(params=["local", "Storage queue", "Service Bus"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    """Each broker, one after the other."""
    folder = tmp_path / "site"
    if request.param == "local":
        with site_in(folder, module=MODULE) as site:
            yield Service(site, lambda body: site.app().broker.send("default", [Envelope(body)]))
    elif request.param == "Storage queue":
        azurite: Azurite = request.getfixturevalue("azurite")
        with storage_site(folder, azurite) as site:
            site.module = MODULE
            yield Service(site, lambda body: to_storage(azurite.connection_string, body))
    else:
        bus: RunningEmulator = request.getfixturevalue("bus")
        with bus_site(folder, bus, QueueOptions(lease=30.0)) as site:
            site.module = MODULE
            yield Service(site, lambda body: to_bus(bus.connection_string, body))


def to_storage(connection_string: str, body: bytes) -> None:
    """Text as it is where XML can carry it; every second message as base64, as .NET can do."""
    encode = b"\xef" in body or body == BODIES[0]
    policy = BinaryBase64EncodePolicy() if encode else None
    with QueueClient.from_connection_string(
        connection_string, "default", message_encode_policy=policy
    ) as client:
        client.send_message(body if encode else body.decode())


def to_bus(connection_string: str, body: bytes) -> None:
    message = ServiceBusMessage(
        body,
        message_id="the same for all",
        content_type="application/json; charset=utf-8",
        subject="Orders.Placed",
        application_properties={"Diagnostic-Id": "00-1-2-3", "id": "of another kind"},
    )
    with (
        ServiceBusClient.from_connection_string(connection_string) as client,
        client.get_queue_sender("default") as sender,
    ):
        sender.send_messages(message)


def test_foreign_messages_are_handled_retried_and_dead_lettered(service: Service) -> None:
    site, app = service.site, service.site.app()
    for body in [*BODIES, *BAD, HOPELESS]:
        service.send(body)
    app.send(work.name, ["task"], task_id="task")
    worker = site.worker("-Q", "default", "--pool", "threads", "-c", "4", "--lease", "30s")
    assert app.result("task").get(timeout=30) == "task"
    wait_until(lambda: len(site.lines("done")) == 4, 30, "the good ones are done")
    wait_until(lambda: len(DeadLetters(app, "default").list()) == 3, 30, "three dead letters")
    assert site.counts("done") == {"1": 1, "2": 1, "3": 1, "4": 1}
    assert site.counts("handled") == {"1": 1, "2": 3, "3": 1, "4": 1, "6": 4}
    letters = DeadLetters(app, "default").list()
    found = {letter.reason: letter.description for letter in letters}
    assert set(found) == {"undecodable", "retries-exhausted"}
    described = " ".join(letter.description for letter in letters)
    assert "order.OrderNumber is a str, not int" in described
    bodies = {letter.envelope.body for letter in letters}
    assert bodies == {*BAD, HOPELESS}, "the bodies are those that were sent"
    assert worker.stop() == 0, worker.log
