"""Azure Functions beside aztask: bindings of the package azure-functions, and events of Event Grid.

`Host` does for the host of Functions, which is not here, what its documentation says about queues.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from azure.core.messaging import CloudEvent
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.storage.queue import QueueClient
from azurite import Azurite
from harness import ROOT

from aztask import App
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.testing import RunningEmulator

func = pytest.importorskip("azure.functions", reason="pip install azure-functions")
from azure.functions.meta import Datum  # noqa: E402
from azure.functions.queue import QueueMessageInConverter, QueueMessageOutConverter  # noqa: E402
from azure.functions.servicebus import ServiceBusMessageInConverter  # noqa: E402

ENCODINGS = ("base64", "none")


def module_of(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def functions() -> ModuleType:
    return module_of(ROOT / "examples" / "functions" / "function_app.py", "function_app")


class Host:
    """What the host does between a function and its queues.

    Source: learn.microsoft.com, "Azure Queue storage trigger and bindings for Azure Functions":
    `messageEncoding` is ``base64`` by default, for what is read and what is written; bytes are
    written as base64 either way, because a queue's message is text.
    """

    def __init__(self, module: ModuleType, account: str, encoding: str = "base64") -> None:
        self.account, self.encoding = account, encoding
        self.functions = {each.get_function_name(): each for each in module.app.get_functions()}

    def bindings(self, name: str) -> dict[str, dict[str, Any]]:
        return {each.name: each.get_dict_repr() for each in self.functions[name].get_bindings()}

    def post(self, name: str, value: Any) -> Any:
        """Call a function for a request, and put its output into the queue of its binding."""
        given: list[Any] = []

        class Output(func.Out):  # type: ignore[misc, name-defined]
            def set(self, value: Any) -> None:
                given.append(value)

            def get(self) -> Any:
                return given[-1]

        request = func.HttpRequest(
            method="POST", url="/api", body=json.dumps(value).encode(), headers={}
        )
        response = self.functions[name].get_user_function()(request, Output())
        binding = self.bindings(name)["message"]
        assert binding["type"] == "queue" and binding["connection"] == "AzureWebJobsStorage"
        for each in given:
            self.put(
                binding["queueName"], QueueMessageOutConverter.encode(each, expected_type=None)
            )
        return response

    def put(self, queue: str, datum: Any) -> None:
        text = datum.value
        if datum.type == "bytes":
            text = base64.b64encode(text).decode()
        elif self.encoding == "base64":
            text = base64.b64encode(text.encode()).decode()
        with QueueClient.from_connection_string(self.account, queue) as client:
            client.send_message(text)

    def trigger(self, name: str) -> None:
        """Take the next message of a queue trigger, as bytes: its `dataType` is binary."""
        binding = self.bindings(name)["message"]
        assert binding["type"] == "queueTrigger" and binding["dataType"] == func.DataType.BINARY
        with QueueClient.from_connection_string(self.account, binding["queueName"]) as client:
            message = client.receive_message()
            assert message is not None
            data = base64.b64decode(message.content, validate=True)
            about = {
                "Id": Datum(message.id, "string"),
                "DequeueCount": Datum(str(message.dequeue_count), "string"),
                "PopReceipt": Datum(message.pop_receipt, "string"),
            }
            given = QueueMessageInConverter.decode(Datum(data, "bytes"), trigger_metadata=about)
            self.functions[name].get_user_function()(given)
            client.delete_message(message)


class Shop:
    """An example's app on one service, and its workers."""

    def __init__(self, example: str, module: str, folder: Path, **environment: str) -> None:
        self.source, self.module, self.folder = ROOT / "examples" / example, module, folder
        self.environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{self.source}"}
        self.environment.update(environment)

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "aztask", "-A", f"{self.module}:app", *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def work(self, *queues: str) -> str:
        return self.run("worker", "--burst", "-c", "1", "--pool", "threads", "-Q", ",".join(queues))


@pytest.fixture
def on_azurite(azurite: Azurite, tmp_path: Path) -> Shop:
    """The queues are made anew for each test."""
    shop = Shop("functions", "shop", tmp_path, AZTASK_BROKER=azurite.connection_string)
    for queue in ("orders", "pictures", "for-functions"):
        shop.run("queues", "create", queue)
        shop.run("queues", "purge", queue, "--yes")
    return shop


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_json_of_an_output_binding_is_for_a_handler(
    encoding: str, functions: ModuleType, on_azurite: Shop, azurite: Azurite
) -> None:
    host = Host(functions, azurite.connection_string, encoding)
    assert host.post("order", {"number": 7, "article": "tea"}).status_code == 202
    assert "order 7: tea" in on_azurite.work("orders")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_bytes_of_an_output_binding_are_a_task(
    encoding: str, functions: ModuleType, on_azurite: Shop, azurite: Azurite
) -> None:
    host = Host(functions, azurite.connection_string, encoding)
    task_id = host.post("picture", {"name": "cat.png"}).get_body().decode()
    assert "cat.png at 200" in on_azurite.work("pictures")
    assert "cat.png at 200" in on_azurite.run("result", task_id)


@pytest.mark.parametrize("serializer", ["msgpack", "json"])
def test_a_queue_trigger_reads_what_aztask_has_sent(
    serializer: str,
    functions: ModuleType,
    on_azurite: Shop,
    azurite: Azurite,
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = App("sender", broker=azurite.connection_string, serializer=serializer)
    app.send("shop.notify", ["ann"], {"number": 7}, queue="for-functions", task_id="t-1")
    app.close()
    with caplog.at_level(logging.INFO):
        Host(functions, azurite.connection_string).trigger("queued")
    assert "task shop.notify, id t-1: ['ann'] {'number': 7}" in caplog.text


@pytest.mark.parametrize("serializer", ["msgpack", "json"])
def test_a_service_bus_trigger_reads_what_aztask_has_sent(
    serializer: str,
    functions: ModuleType,
    bus: RunningEmulator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(ADMIN_VARIABLE, bus.admin_connection_string)
    queue = f"for-functions-{serializer}"
    with closing(App("sender", broker=bus.connection_string, serializer=serializer)) as app:
        app.broker.declare(queue)
        app.send("shop.notify", ["ann"], {"number": 7}, queue=queue, task_id="t-1")
    host = Host(functions, "")
    binding = host.bindings("bussed")["message"]
    assert (binding["type"], binding["queueName"]) == ("serviceBusTrigger", "for-functions")
    with (
        ServiceBusClient.from_connection_string(bus.connection_string) as client,
        client.get_queue_receiver(queue, max_wait_time=10) as receiver,
    ):
        message = next(receiver)
        properties = {
            name.decode(): value.decode() if isinstance(value, bytes) else value
            for name, value in (message.application_properties or {}).items()
        }
        about = {
            "MessageId": Datum(message.message_id, "string"),
            "ContentType": Datum(message.content_type, "string"),
            "ApplicationProperties": Datum(json.dumps(properties, default=str), "json"),
            "UserProperties": Datum(json.dumps(properties, default=str), "json"),
        }
        data = Datum(b"".join(message.body), "bytes")
        given = ServiceBusMessageInConverter.decode(data, trigger_metadata=about)
        with caplog.at_level(logging.INFO):
            host.functions["bussed"].get_user_function()(given)
        receiver.complete_message(message)
    assert "task shop.notify, id t-1: ['ann'] {'number': 7}" in caplog.text


def test_what_a_function_gives_up_is_a_dead_letter_of_the_queue(
    functions: ModuleType, on_azurite: Shop, azurite: Azurite
) -> None:
    """After five tries the host moves it into QUEUE-poison, where aztask's dead letters are."""
    Host(functions, azurite.connection_string).put(
        "for-functions-poison", Datum(json.dumps({"number": 7}), "string")
    )
    (letter,) = map(
        json.loads, on_azurite.run("dlq", "list", "-Q", "for-functions", "--json").splitlines()[:1]
    )
    assert letter["queue"] == "for-functions"


# -- Event Grid ------------------------------------------------------------------------------------


@pytest.fixture
def grid() -> ModuleType:
    return module_of(ROOT / "examples" / "eventgrid" / "grid.py", "grid")


def test_the_events_are_what_the_sdk_reads(grid: ModuleType) -> None:
    event = CloudEvent.from_dict(grid.cloud_event(1))
    assert (event.type, event.subject) == (
        "Microsoft.Storage.BlobCreated",
        "/blobServices/default/containers/pictures/blobs/cat-1.png",
    )


def test_events_in_storage_queues_start_one_task_each(
    grid: ModuleType, azurite: Azurite, tmp_path: Path
) -> None:
    """Event Grid writes base64 of the event into a Storage queue."""
    shop = Shop("eventgrid", "pictures_here", tmp_path, AZTASK_BROKER=azurite.connection_string)
    check_events(shop, grid, lambda queue, event: to_storage(azurite, queue, event))


def to_storage(azurite: Azurite, queue: str, event: dict[str, Any]) -> None:
    with QueueClient.from_connection_string(azurite.connection_string, queue) as client:
        client.send_message(base64.b64encode(json.dumps(event).encode()).decode())


def test_events_in_service_bus_queues_start_one_task_each(
    grid: ModuleType, bus: RunningEmulator, tmp_path: Path
) -> None:
    """Into Service Bus it writes the event, and says about it in properties."""

    def send(queue: str, event: dict[str, Any]) -> None:
        cloud = "specversion" in event
        properties = {} if cloud else {"aeg-event-type": "Notification", "aeg-delivery-count": "0"}
        kind = "application/cloudevents+json; charset=utf-8" if cloud else "application/json"
        with (
            ServiceBusClient.from_connection_string(bus.connection_string) as client,
            client.get_queue_sender(queue) as sender,
        ):
            sender.send_messages(
                ServiceBusMessage(
                    json.dumps(event), content_type=kind, application_properties=properties
                )
            )

    names = {"AZTASK_BROKER": bus.connection_string, ADMIN_VARIABLE: bus.admin_connection_string}
    shop = Shop("eventgrid", "pictures_here", tmp_path, **names)
    check_events(shop, grid, send)


def check_events(shop: Shop, grid: ModuleType, send: Callable[[str, dict[str, Any]], None]) -> None:
    """The example with the service in the place of its file."""
    source = (shop.source / "pictures.py").read_text()
    (shop.folder / "pictures_here.py").write_text(source.replace(' broker="local://",', ""))
    for queue in ("grid-events", "cloud-events", "pictures"):
        shop.run("queues", "create", queue)
    send("grid-events", grid.grid_event(1))
    send("grid-events", grid.grid_event(1))
    send("grid-events", {**grid.grid_event(3), "eventType": "Microsoft.Storage.BlobDeleted"})
    send("cloud-events", grid.cloud_event(2))
    send("cloud-events", grid.cloud_event(2))
    send("cloud-events", {**grid.cloud_event(4), "data": "no map"})
    log = shop.work("grid-events", "cloud-events") + shop.work("pictures")
    made = [line for line in log.splitlines() if line.startswith("thumbnail of ")]
    url = "https://shop.blob.core.windows.net/pictures"
    assert sorted(made) == [f"thumbnail of {url}/cat-{n}.png, 524288 bytes" for n in (1, 2)]
    letters = shop.run("dlq", "list", "-Q", "cloud-events", "--json").splitlines()
    assert len([line for line in letters if "undecodable" in line]) == 1
