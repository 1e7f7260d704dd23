"""One trace from an HTTP request to the run of a replayed dead letter, over real processes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from bus import bus_site
from harness import HERE, ROOT, Site, site_in, wait_until
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from spanfile import Span, spans
from storage import storage_site

from aztask import App, chain, group
from aztask.errors import TaskFailed
from aztask.queues.base import QueueOptions
from aztask.telemetry.otel import instrument

ARGUMENTS = ("-Q", "default", "-c", "2", "--log-format", "json")
SYSTEMS = {"local": "aztask", "storage": "azure_storage_queue", "servicebus": "servicebus"}


class Traced:
    """A site, and what this process and its workers have traced."""

    def __init__(self, site: Site, kind: str) -> None:
        self.kind = kind
        self.site = site
        self.path = site.folder / "spans"
        site.module = "traced_app"
        site.extra["SPANS"] = str(self.path)
        site.extra["PYTHONPATH"] = f"{ROOT}:{HERE}:{HERE.parent}"
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.app = App("traced", broker=site.broker, results=site.results)
        instrument(self.app, tracer_provider=self.provider)

    def here(self, name: str) -> list[object]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def spans(self, name: str) -> list[Span]:
        return [span for span in spans(self.path) if span.name == name]

    def dlq(self, *arguments: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "aztask", "-A", "traced_app", "dlq", *arguments],
            env=self.site.environment,
            cwd=self.site.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=True,
        )

    def requested(self, task: str, task_id: str) -> int:
        """Send a task in the handler of an HTTP request; returns the request's trace id."""
        tracer, app = self.provider.get_tracer("web"), self.app

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                with tracer.start_as_current_span("POST /orders", kind=SpanKind.SERVER):
                    app.send(task, task_id=task_id)
                self.send_response(202)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/orders"
        urllib.request.urlopen(url, data=b"", timeout=10).close()
        thread.join()
        server.server_close()
        (request,) = self.here("POST /orders")
        return request.context.trace_id


@pytest.fixture(params=["local", "storage", "servicebus"])
def traced(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Traced]:
    """An instrumented app on each broker."""
    with ExitStack() as stack:
        folder = tmp_path / "site"
        if request.param == "local":
            site = stack.enter_context(site_in(folder))
        elif request.param == "storage":
            azurite = request.getfixturevalue("azurite")
            site = stack.enter_context(storage_site(folder, azurite))
        else:
            bus = request.getfixturevalue("bus")
            options = QueueOptions(lease=60.0, duplicate_window=600.0)
            site = stack.enter_context(bus_site(folder, bus, options))
        made = Traced(site, request.param)
        yield made
        made.app.close()


def test_one_trace_from_a_request_to_the_run_after_a_replay(traced: Traced) -> None:
    trace = traced.requested("traced.fails_until_replayed", "order-1")
    worker = traced.site.worker(*ARGUMENTS)
    result = traced.app.result("order-1")
    with pytest.raises(TaskFailed):
        result.get(timeout=30)
    wait_until(lambda: traced.spans("dead_letter default"), 10, "the dead letter has a span")
    traced.dlq("replay", "order-1", "-Q", "default", "--yes")
    wait_until(lambda: result.state == "succeeded", 30, "the replayed task ran")
    assert result.get(timeout=5) == format(trace, "032x"), "the task's own spans join the trace"
    wait_until(lambda: traced.spans("complete default"), 10, "the settlement has a span")
    assert worker.stop() == 0, worker.log

    (send,) = traced.here("send default")
    assert send.kind is SpanKind.PRODUCER
    assert send.context.trace_id == trace
    ours = [span for span in spans(traced.path) if span.trace == trace]
    runs = [span for span in ours if span.name == "process default"]
    assert [span.status for span in runs] == ["ERROR", "ERROR", "ERROR", "UNSET"]
    assert [span.attributes["aztask.resubmit_count"] for span in runs] == [0, 1, 2, 0]
    assert {span.parent for span in runs} == {send.context.span_id}
    assert {span.kind for span in runs} == {"CONSUMER"}
    assert [span.parent for span in ours if span.name == "charge"] == [span.id for span in runs]
    settled = [
        span.name for span in ours if span.attributes.get("messaging.operation.type") == "settle"
    ]
    assert settled == [
        "resubmit default",
        "resubmit default",
        "dead_letter default",
        "complete default",
    ]
    assert all(
        span.pid == worker.process.pid
        for span in ours
        if "default" in span.name and span not in runs
    )
    assert all(span.pid != worker.process.pid for span in runs)
    assert {span.attributes["messaging.system"] for span in runs} == {SYSTEMS[traced.kind]}
    (error,) = [attributes for name, attributes in runs[0].events if name == "exception"]
    assert error["exception.type"] == "OSError"
    assert "hunter2" not in json.dumps(error)
    for span in runs:
        ((linked, sender, attributes),) = span.links
        assert (linked, sender) == (trace, send.context.span_id)
        assert abs(attributes["enqueuedTime"] - span.start / 1e6) < 30_000
    lines = [json.loads(line) for line in worker.log.splitlines()]
    charging = [line for line in lines if line["message"] == "charging"]
    assert {line["trace_id"] for line in charging} == {format(trace, "032x")}
    failures = [line for line in lines if "failed, retry" in line["message"]]
    assert [line["span_id"] for line in failures] == [format(run.id, "016x") for run in runs[:2]]


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Traced]:
    """An instrumented app on the embedded queue."""
    with site_in(tmp_path / "site") as site:
        made = Traced(site, "local")
        yield made
        made.app.close()


OLD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_messages_of_other_senders_and_of_tasks(local: Traced) -> None:
    plain = local.site.app()
    plain.send("traced.add", [1, 2], task_id="untraced")
    plain.around_send(with_header)
    plain.send("traced.add", [1, 2], task_id="azure")
    local.app.send("traced.both", [1, 2], task_id="both")
    local.app.send("traced.waits", task_id="async")
    worker = local.site.worker(*ARGUMENTS)
    names = ("untraced", "azure", "both", local.app.result("both").get(timeout=30), "async")
    for name in names:
        local.app.result(name).get(timeout=30)
    assert worker.stop() == 0, worker.log
    runs = {
        span.attributes["messaging.message.conversation_id"]: span
        for span in local.spans("process default")
    }
    receives = {span.id: span for span in local.spans("receive default")}
    assert runs["untraced"].parent in receives, "it is in the trace of its receive"
    assert format(runs["azure"].trace, "032x") == OLD.split("-")[1]
    (sent,) = local.spans("send default")
    assert (sent.parent, sent.trace) == (runs["both"].id, runs["both"].trace)
    assert runs[names[3]].parent == sent.id, "what a task sends is in its trace"
    assert local.app.result("async").get() == format(runs["async"].id, "016x")
    linked = {linked for span in receives.values() for _, linked, _ in span.links}
    assert sent.id in linked


def test_all_tasks_of_a_workflow_are_in_the_trace_of_its_start(local: Traced) -> None:
    app = local.app
    add = app.task(name="traced.add")(lambda a, b: a + b)
    with local.provider.get_tracer("web").start_as_current_span("request") as request:
        result = chain(group(add.s(1, 2), add.s(3, 4)), add.s([5])).delay(workflow_id="report")
    worker = local.site.worker(*ARGUMENTS)
    assert result.get(timeout=30) == [3, 7, 5]
    assert worker.stop() == 0, worker.log
    (sent,) = local.here("send default")
    assert sent.parent.span_id == request.get_span_context().span_id
    assert sent.kind is SpanKind.PRODUCER
    assert sent.attributes["aztask.workflow"] == "report"
    runs = local.spans("process default")
    assert [run.parent for run in runs] == [sent.context.span_id] * 3


def test_hooks_may_set_headers_of_each_task_of_a_workflow(local: Traced) -> None:
    app = local.site.app()
    add = app.task(name="traced.add")(lambda a, b: a + b)

    @app.around_send
    def numbered(sending):
        sending.each = [
            {"traceparent": OLD[:-2] + f"0{index}"} for index, _ in enumerate(sending.ids)
        ]
        yield

    result = chain(add.s(1, 2), add.s(3)).delay(workflow_id="numbered")
    worker = local.site.worker(*ARGUMENTS)
    assert result.get(timeout=30) == 6
    assert worker.stop() == 0, worker.log
    traces = {format(span.trace, "032x") for span in local.spans("process default")}
    assert traces == {OLD.split("-")[1]}


def with_header(sending):
    sending.headers["Diagnostic-Id"] = OLD
    yield


@pytest.mark.parametrize(("task", "error"), [("exits", "WorkerCrashed"), ("hangs", "TaskKilled")])
def test_a_run_that_is_killed_has_a_span(local: Traced, task: str, error: str) -> None:
    local.app.send(f"traced.{task}", task_id="x")
    worker = local.site.worker(*ARGUMENTS)
    with pytest.raises(TaskFailed):
        local.app.result("x").get(timeout=30)
    assert worker.stop() == 0, worker.log
    runs = local.spans("process default")
    assert [span.attributes["error.type"] for span in runs] == [error] * 3
    assert {span.pid for span in runs} == {worker.process.pid}
    (send,) = local.here("send default")
    assert {span.parent for span in runs} == {send.context.span_id}
    if task == "hangs":
        assert all(0.2 < (span.end - span.start) / 1e9 < 20 for span in runs)
