"""Beside Azure's own telemetry: its SDK adds no span of its own, and its exporter gets the wait."""

from __future__ import annotations

import gzip
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from azure.core.settings import settings
from azure.core.tracing import ext
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from bus import broker_at
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from waiting import wait_until

from aztask import App
from aztask.context import Context, TaskLease
from aztask.queues.base import QueueOptions
from aztask.support.clock import boot_seconds
from aztask.telemetry.otel import instrument
from aztask.testing import RunningEmulator


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """The Azure SDK's tracing is on, and all spans of this process are kept."""
    # the plugin may be installed in another directory than azure-core
    for path in sys.path:
        folder = Path(path) / "azure/core/tracing/ext"
        if folder.is_dir() and str(folder) not in ext.__path__:
            ext.__path__.append(str(folder))
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    settings.tracing_implementation = "opentelemetry"
    yield kept
    settings.tracing_implementation.unset_value()  # type: ignore[attr-defined]


@pytest.fixture
def app(bus: RunningEmulator) -> Iterator[App]:
    manager = broker_at(bus)
    if "default" in manager.queues():
        manager.delete("default")
    manager.declare("default", QueueOptions(lease=60.0))
    manager.close()
    made = App("shop", broker=bus.connection_string)
    made.task(name="shop.add")(lambda a, b: a + b)
    yield made
    made.close()


def names(exporter: InMemorySpanExporter) -> list[str]:
    found = [span.name for span in exporter.get_finished_spans()]
    exporter.clear()
    return found


def test_the_sdk_makes_no_spans_of_its_own(
    app: App, bus: RunningEmulator, exporter: InMemorySpanExporter
) -> None:
    app.send("shop.add", [1, 2])
    assert "ServiceBus.send" in names(exporter), "the SDK's tracing is on"
    instrument(app, tracer_provider=trace.get_tracer_provider())
    app.send("shop.add", [1, 2])
    assert names(exporter) == ["send default"]
    app.tasks["shop.add"].map([(1, 2), (3, 4)])
    assert names(exporter) == ["create default", "create default", "send default"]
    app.send("shop.add", [1, 2], delay=60)
    found = names(exporter)  # the first delay asks for the service's time, by peeking
    assert [name for name in found if name != "ServiceBus.peek"] == ["send default"]
    with (
        ServiceBusClient.from_connection_string(bus.connection_string) as client,
        client.get_queue_sender("default") as sender,
    ):
        sender.send_messages(ServiceBusMessage(b"x"))
    assert names(exporter) == ["ServiceBus.message", "ServiceBus.send"], "others are traced as ever"


def test_a_message_has_both_headers_of_its_span(app: App, exporter: InMemorySpanExporter) -> None:
    instrument(app, tracer_provider=trace.get_tracer_provider())
    app.send("shop.add", [1, 2])
    (span,) = exporter.get_finished_spans()
    assert span.context is not None
    (peeked,) = app.broker.peek("default")
    parent = peeked.envelope.headers["traceparent"]
    assert parent.split("-")[1:3] == [
        format(span.context.trace_id, "032x"),
        format(span.context.span_id, "016x"),
    ]
    assert peeked.envelope.headers["Diagnostic-Id"] == parent
    assert span.attributes is not None
    assert span.attributes["messaging.system"] == "servicebus"
    assert span.attributes["server.address"] == "127.0.0.1"


class Receiver:
    """Stands in for Azure Monitor: takes what its exporter sends."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        items = self.items

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                found = json.loads(body)
                items.extend(found)
                answer = json.dumps(
                    {"itemsReceived": len(found), "itemsAccepted": len(found), "errors": []}
                ).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def test_azure_monitor_gets_the_time_since_enqueued(
    app: App, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("APPLICATIONINSIGHTS_STATSBEAT_DISABLED_ALL", "true")
    monkeypatch.setenv("APPLICATIONINSIGHTS_SDKSTATS_DISABLED", "true")
    exporting = pytest.importorskip("azure.monitor.opentelemetry.exporter")
    azure = exporting.AzureMonitorTraceExporter(
        connection_string="InstrumentationKey=00000000-0000-0000-0000-000000000001;"
        f"IngestionEndpoint=http://127.0.0.1:{receiver.server.server_port}",
        disable_offline_storage=True,
    )
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(azure))
    instrument(app, tracer_provider=provider)
    app.send("shop.add", [1, 2], task_id="order-1")
    (delivery,) = app.broker.receiver("default", lease=60.0).receive(1, 10.0)
    message = app.codec.from_envelope(delivery.envelope, "default")
    run = Context(
        message,
        delivery_count=1,
        lease=TaskLease(boot_seconds() + 60, ask=lambda _: None),
        save=lambda _: None,
        enqueued_at=delivery.enqueued_at - 90.0,
    )
    with app.hooks.run.around(run):
        pass
    wait_until(lambda: len(receiver.items) == 2, 10, "both spans were sent")
    dependency, request = (item["data"]["baseData"] for item in receiver.items)
    assert [item["data"]["baseType"] for item in receiver.items] == [
        "RemoteDependencyData",
        "RequestData",
    ]
    assert dependency["name"] == "send default"
    assert request["name"] == "process default"
    assert request["source"] == "127.0.0.1/default"
    assert 90_000 <= request["measurements"]["timeSinceEnqueued"] < 120_000
    assert {item["tags"]["ai.operation.id"] for item in receiver.items} == {
        receiver.items[0]["tags"]["ai.operation.id"]
    }
    provider.shutdown()
