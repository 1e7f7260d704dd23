"""Spans and metrics of an app's hooks, in memory."""

from __future__ import annotations

import contextvars
from types import SimpleNamespace

import pytest
from opentelemetry import baggage, context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    DEFAULT_OFF,
    DEFAULT_ON,
    ParentBased,
    Sampler,
)
from opentelemetry.trace import SpanContext, SpanKind, StatusCode, get_current_span

from aztask import App
from aztask.errors import BrokerUnavailable
from aztask.hooks import KilledRun, Receiving, Settling
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage
from aztask.queues.delivery import Delivery, Lost, Settled
from aztask.settlement import Complete, DeadLetter, Resubmit
from aztask.stores.events.event import Event
from aztask.support.quiet import is_quiet
from aztask.telemetry.labels import MOST_ERRORS, OTHER, UNKNOWN, TaskLabels
from aztask.telemetry.otel import instrument
from aztask.telemetry.otel.attributes import MessagingAttributes
from aztask.telemetry.otel.instruments import Instruments
from aztask.telemetry.otel.propagation import (
    context_of,
    span_of,
    traceparent_of,
    write_context,
)

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE = 0x0AF7651916CD43DD8448EB211C80319C


class Bench:
    """An instrumented app, its spans and its metrics."""

    def __init__(self, folder, **options):
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(**options)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider(metric_readers=[self.reader])
        self.app = App("shop", broker=f"local://{folder}/queues.db")
        self.app.task(name="shop.add")(lambda a, b: a + b)
        instrument(self.app, tracer_provider=self.provider, meter_provider=self.meters)

    def spans(self, name=""):
        return [each for each in self.exporter.get_finished_spans() if name in each.name]

    def messages(self):
        peeked = self.app.broker.peek("default")
        return [self.app.codec.from_envelope(each.envelope, "default") for each in peeked]

    def points(self, name):
        data = self.reader.get_metrics_data()
        return [
            point
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path)
    yield made
    made.app.close()
    made.meters.shutdown()


def message(**fields):
    return TaskMessage("t", "shop.add", "default", b"", **fields)


def delivery(name="m"):
    return Delivery(
        "default", Envelope(b"", message_id=name), 1, "", 1, 1_700_000_000.25, 0.0, 60.0
    )


# -- sends -----------------------------------------------------------------------------------


def in_run(bench, sent, work):
    """Call `work` as a worker calls a task: inside of the hooks, with variables of its own."""
    run = SimpleNamespace(message=sent, delivery_count=1, enqueued_at=1.0)

    def call():
        with bench.app.hooks.run.around(run):
            work()

    contextvars.copy_context().run(call)


def test_a_single_send_is_the_span_that_the_message_carries(bench):
    with bench.provider.get_tracer("web").start_as_current_span("request") as request:
        result = bench.app.tasks["shop.add"].delay(1, 2)
    (span,) = bench.spans("send default")
    assert span.kind is SpanKind.PRODUCER
    assert span.parent.span_id == request.get_span_context().span_id
    assert span.attributes == {
        "messaging.system": "aztask",
        "messaging.destination.name": "default",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.message.conversation_id": result.id,
        "aztask.task": "shop.add",
    }
    (sent,) = bench.messages()
    assert span_of(sent).span_id == span.context.span_id
    assert sent.extra == {}, "no further header"


def test_each_message_of_a_batch_has_a_span_of_its_own(bench):
    with bench.provider.get_tracer("web").start_as_current_span("request") as request:
        bench.app.tasks["shop.add"].map([(1, 2), (3, 4)])
    created = bench.spans("create default")
    (span,) = bench.spans("send default")
    assert [each.kind for each in created] == [SpanKind.PRODUCER] * 2
    assert span.kind is SpanKind.CLIENT
    assert span.parent.span_id == request.get_span_context().span_id
    assert {each.parent.span_id for each in created} == {span.context.span_id}
    assert [each.attributes["aztask.task"] for each in (*created, span)] == ["shop.add"] * 3
    assert span.attributes["messaging.batch.message_count"] == 2
    assert [link.context.span_id for link in span.links] == [
        each.context.span_id for each in created
    ]
    assert [span_of(each).span_id for each in bench.messages()] == [
        each.context.span_id for each in created
    ]


def test_a_batch_outside_of_a_span_is_one_trace(bench):
    bench.app.tasks["shop.add"].map([(1, 2), (3, 4)])
    (span,) = bench.spans("send default")
    assert span.parent is None
    assert {span_of(each).trace_id for each in bench.messages()} == {span.context.trace_id}


def test_an_unsampled_batch_has_one_context_and_asks_the_sampler_once(tmp_path):
    asked = []

    class Asked(ParentBased):
        def should_sample(self, *arguments, **options):
            asked.append(arguments[2])
            return super().should_sample(*arguments, **options)

    bench = Bench(tmp_path, sampler=Asked(ALWAYS_OFF))
    bench.app.tasks["shop.add"].map([(1, 2), (3, 4)])
    assert asked == ["send default"]
    first, second = map(span_of, bench.messages())
    assert first == second
    assert first.is_valid and not first.trace_flags.sampled
    bench.app.close()


def test_a_send_below_an_unsampled_span_carries_that_span(tmp_path):
    bench = Bench(tmp_path, sampler=DEFAULT_OFF)
    with bench.provider.get_tracer("web").start_as_current_span("request") as request:
        bench.app.tasks["shop.add"].delay(1, 2)
        bench.app.tasks["shop.add"].map([(1, 2), (3, 4)])
    carried = {(span_of(each).trace_id, span_of(each).span_id) for each in bench.messages()}
    own = request.get_span_context()
    assert carried == {(own.trace_id, own.span_id)}
    bench.app.close()


def test_a_batch_whose_spans_are_recorded_below_an_unsampled_one_has_them(tmp_path):
    """A sampler that does not follow the parent is asked for each span."""

    class Creates(Sampler):
        def should_sample(self, parent_context, trace_id, name, *rest, **options):
            sampled = ALWAYS_ON if name.startswith("create") else ALWAYS_OFF
            return sampled.should_sample(parent_context, trace_id, name, *rest, **options)

        def get_description(self):
            return "Creates"

    bench = Bench(tmp_path, sampler=Creates())
    bench.app.tasks["shop.add"].map([(1, 2), (3, 4)])
    assert [span.name for span in bench.spans()] == ["create default"] * 2
    bench.app.close()


def test_a_task_of_an_unsampled_run_sends_on_in_the_same_trace(tmp_path):
    bench = Bench(tmp_path, sampler=DEFAULT_OFF)
    parent = message(traceparent=PARENT[:-1] + "0")

    def work():
        assert get_current_span().get_span_context() == span_of(parent)
        bench.app.tasks["shop.add"].delay(1, 2)

    in_run(bench, parent, work)
    (sent,) = bench.messages()
    assert sent.traceparent == parent.traceparent
    bench.app.close()


def test_baggage_reaches_an_unsampled_run(tmp_path):
    bench = Bench(tmp_path, sampler=DEFAULT_OFF)
    parent = message(traceparent=PARENT[:-1] + "0", extra={"baggage": "tenant=acme"})

    def work():
        assert baggage.get_all() == {"tenant": "acme"}

    in_run(bench, parent, work)
    bench.app.close()


@pytest.mark.parametrize(("sampler", "written"), [(DEFAULT_ON, True), (DEFAULT_OFF, False)])
def test_the_older_header_is_written_for_sampled_traces(tmp_path, sampler, written):
    bench = Bench(tmp_path, sampler=sampler)
    headers = {}
    with bench.provider.get_tracer("web").start_as_current_span("request") as request:
        span = request.get_span_context()
        write_context(headers, span, context.get_current(), also_old=True)
    assert ("Diagnostic-Id" in headers) is written
    assert headers["traceparent"] == traceparent_of(span)
    bench.app.close()


def test_state_and_baggage_travel_with_the_message(bench):
    token = context.attach(baggage.set_baggage("tenant", "acme"))
    bench.app.tasks["shop.add"].delay(1, 2)
    context.detach(token)
    (sent,) = bench.messages()
    assert sent.extra == {"baggage": "tenant=acme"}
    assert baggage.get_all(context_of(sent)) == {"tenant": "acme"}


def test_without_an_sdk_nothing_is_written(tmp_path):
    app = App("bare", broker=f"local://{tmp_path}/queues.db")
    instrument(app)
    app.send("bare.add", [1])
    (sent,) = app.broker.peek("default")
    assert "traceparent" not in sent.envelope.headers
    app.close()


def test_what_is_not_sampled_is_carried_too(tmp_path):
    bench = Bench(tmp_path, sampler=ALWAYS_OFF)
    bench.app.tasks["shop.add"].map([(1, 2), (3, 4)])
    assert bench.spans() == []
    carried = [span_of(each) for each in bench.messages()]
    assert [each.is_valid and not each.trace_flags.sampled for each in carried] == [True, True]
    bench.app.close()


def test_a_send_that_fails_marks_its_span(bench):
    @bench.app.around_send
    def refused(sending):
        assert is_quiet()
        raise BrokerUnavailable("no route, password=hunter2")
        yield

    with pytest.raises(BrokerUnavailable):
        bench.app.tasks["shop.add"].delay(1, 2)
    (span,) = bench.spans("send default")
    assert span.status.status_code is StatusCode.ERROR
    assert "hunter2" not in span.to_json()
    (point,) = bench.points("messaging.client.operation.duration")
    assert point.attributes["error.type"] == "aztask.errors.BrokerUnavailable"
    assert not is_quiet()


def test_a_second_instrumentation_changes_nothing(bench):
    instrument(bench.app, tracer_provider=bench.provider)
    bench.app.tasks["shop.add"].delay(1, 2)
    assert len(bench.spans()) == 1


# -- what a message carries ------------------------------------------------------------------


def test_a_damaged_context_is_replaced_by_that_of_the_receive(bench):
    carried = [message(traceparent="nonsense"), message(extra={"Diagnostic-Id": PARENT})]
    receiving = Receiving("default", carried, [delivery()] * 2, 2, 10.0, 10.5)
    bench.app.hooks.receive.notify(receiving)
    assert receiving.traceparents.keys() == {0}


@pytest.mark.parametrize(
    ("fields", "valid"),
    [
        ({"traceparent": PARENT}, True),
        ({"extra": {"Diagnostic-Id": PARENT}}, True),
        ({"traceparent": PARENT, "extra": {"Diagnostic-Id": "|old.1."}}, True),
        ({"extra": {"Diagnostic-Id": "|old.1."}}, False),
        ({"traceparent": "nonsense"}, False),
        ({"traceparent": PARENT.upper()}, False),
        ({"traceparent": PARENT.replace("b7", "zz")}, False),
        ({"traceparent": f"00-{'0' * 32}-b7ad6b7169203331-01"}, False),
        ({"traceparent": f"01{PARENT[2:]}"}, True),
        ({"traceparent": PARENT, "extra": {"tracestate": "a=b"}}, True),
        ({"extra": {"Diagnostic-Id": 5, "tracestate": b"x", "baggage": ["x"]}}, False),
        ({"traceparent": PARENT, "extra": {"tracestate": 7, "baggage": 7}}, True),
        ({}, False),
    ],
)
def test_any_header_is_read_without_an_error(fields, valid):
    span = span_of(message(**fields))
    assert span.is_valid is valid
    if valid:
        assert span.trace_id == TRACE


@pytest.mark.parametrize("encrypt", [True, False])
def test_with_encryption_no_span_holds_a_value(tmp_path, encrypt):
    """Neither the arguments nor the text of an error that quotes them."""
    keys = {"encryption_keys": ["k" * 40], "signing_keys": ["s" * 40], "id_key": "i" * 40}
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app = App("shop", broker=f"local://{tmp_path}/queues.db", encrypt=encrypt, **keys)
    charge = app.task(name="shop.charge")(lambda card: None)
    instrument(app, tracer_provider=provider, meter_provider=MeterProvider())
    charge.delay("4111-1111")
    (peeked,) = app.broker.peek("default")
    sent = app.codec.from_envelope(peeked.envelope, "default")

    def refuse():
        raise ValueError("the card 4111-1111 was refused")

    with pytest.raises(ValueError, match="4111"):
        in_run(SimpleNamespace(app=app), sent, refuse)
    told = "".join(span.to_json() for span in exporter.get_finished_spans())
    assert "shop.charge" in told
    assert "ValueError" in told
    assert ("4111" in told) is not encrypt, "the text of an error is in a span of its run"
    app.close()


# -- receives and settlements ----------------------------------------------------------------


def test_a_receive_links_to_the_senders_and_gives_others_its_context(bench):
    receiving = Receiving(
        "default", [message(traceparent=PARENT), message()], [delivery()] * 2, 3, 10.0, 10.5
    )
    bench.app.hooks.receive.notify(receiving)
    (span,) = bench.spans("receive default")
    assert span.kind is SpanKind.CLIENT
    assert span.attributes["messaging.batch.message_count"] == 3
    assert (span.start_time, span.end_time) == (10_000_000_000, 10_500_000_000)
    ((link),) = span.links
    assert link.context.trace_id == TRACE
    assert link.attributes == {"enqueuedTime": 1_700_000_000_250}
    assert receiving.traceparents.keys() == {1}
    assert span_of(message(traceparent=receiving.traceparents[1])) == replace_remote(span.context)
    (consumed,) = bench.points("messaging.client.consumed.messages")
    assert consumed.value == 3


def replace_remote(span):
    """The same context as its receiver knows it."""
    return SpanContext(span.trace_id, span.span_id, True, span.trace_flags, span.trace_state)


def settle(bench, settlements, answers, error=None):
    carried = [message(traceparent=PARENT) for _ in settlements]
    settling = Settling("default", carried, [delivery() for _ in settlements], settlements)
    with bench.app.hooks.settle.around(settling):
        assert is_quiet()
        if error is not None:
            raise error
        settling.answers = answers


def test_many_completions_are_one_span(bench):
    settle(bench, [Complete()] * 3, [Settled()] * 3)
    (span,) = bench.spans()
    assert span.name == "complete default"
    assert span.parent is None
    assert len(span.links) == 3
    assert span.attributes["messaging.batch.message_count"] == 3


def test_dead_letters_and_retries_are_in_the_traces_of_their_messages(bench):
    settle(
        bench,
        [Complete(), DeadLetter("retries-exhausted", "key=hunter2"), Resubmit(delay=5.0)],
        [Settled()] * 3,
    )
    assert [span.name for span in bench.spans()] == [
        "complete default",
        "dead_letter default",
        "resubmit default",
    ]
    assert {span.context.trace_id for span in bench.spans()} == {TRACE}
    (dead,) = bench.spans("dead_letter")
    assert dead.attributes["aztask.dead_letter.reason"] == "retries-exhausted"
    (retry,) = bench.spans("resubmit")
    assert retry.attributes["aztask.delay"] == 5.0


@pytest.mark.parametrize(("sampler", "spans"), [(DEFAULT_OFF, 0), (ALWAYS_ON, 3)])
def test_an_unsampled_message_has_spans_only_if_the_sampler_asks_for_them(tmp_path, sampler, spans):
    bench = Bench(tmp_path, sampler=sampler)
    unsampled = message(traceparent=PARENT[:-1] + "0")
    settling = Settling("default", [unsampled], [delivery()], [DeadLetter("poison", "x")])
    with bench.app.hooks.settle.around(settling):
        settling.answers = [Settled()]
    run = KilledRun(unsampled, delivery(), 1.0, 2.0, "WorkerLost", "killed")
    bench.app.hooks.killed.notify(run)

    def work():
        assert get_current_span().get_span_context().trace_id == TRACE

    in_run(bench, unsampled, work)
    assert len(bench.spans()) == spans
    bench.app.close()
    bench.meters.shutdown()


def test_a_settlement_that_came_too_late_or_failed_marks_its_span(bench):
    settle(bench, [Complete()], [Lost("the lock expired")])
    with pytest.raises(BrokerUnavailable):
        settle(bench, [Complete()], [], BrokerUnavailable("away"))
    late, failed = bench.spans()
    assert (late.attributes["error.type"], late.status.description) == ("Lost", "the lock expired")
    assert failed.attributes["error.type"] == "aztask.errors.BrokerUnavailable"


def test_a_message_that_could_not_be_read_is_settled_with_a_span(bench):
    settling = Settling("default", [None], [delivery()], [DeadLetter("undecodable", "")])
    with bench.app.hooks.settle.around(settling):
        settling.answers = [Settled()]
    (span,) = bench.spans()
    assert (span.name, span.parent) == ("dead_letter default", None)


def test_a_killed_run_ends_its_span(bench):
    bench.app.hooks.killed.notify(
        KilledRun(message(traceparent=PARENT), delivery(), 10.0, 12.0, "WorkerCrashed", "SIGSEGV")
    )
    (span,) = bench.spans("process default")
    assert (span.context.trace_id, span.end_time - span.start_time) == (TRACE, 2_000_000_000)
    assert span.attributes["error.type"] == "WorkerCrashed"


def test_an_error_in_telemetry_does_not_stop_a_settlement(bench, caplog):
    @bench.app.hooks.settle
    def broken(settling):
        raise RuntimeError("telemetry is broken")
        yield

    settle(bench, [Complete()], [Settled()])
    assert "the work goes on" in caplog.text
    assert len(bench.spans()) == 1


# -- metrics ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("aztask.task.wait", 2.0),
        ("aztask.task.punctuality", 0.5),
        ("messaging.process.duration", 0.4),
        ("aztask.lease.margin", 0.8),
        ("aztask.lease.renewals", 1),
        ("aztask.lease.losses", 1),
        ("aztask.messages.dead_lettered", 1),
    ],
)
def test_each_metric_has_its_figure(bench, name, value):
    events = (
        Event("received", "t", "shop.add", "default"),
        Event("started", "t", "shop.add", "default", wait_seconds=2.0),
        Event("started", "t", "shop.add", "default", resubmit_count=1, wait_seconds=0.5),
        Event("renewed", "t", "shop.add", "default", lease_seconds=10.0, margin_seconds=3.0),
        Event(
            "succeeded", "t", "shop.add", "default",
            duration_seconds=0.4, lease_seconds=10.0, margin_seconds=5.0,
        ),
        Event("settle_failed", "t", "shop.add", "default"),
        Event("dead_lettered", "t", "shop.add", "default", error_type="expired"),
    )  # fmt: skip
    instruments = Instruments(
        bench.meters.get_meter("aztask"),
        MessagingAttributes(bench.app),
        TaskLabels(bench.app.tasks),
    )
    for event in events:
        instruments.event(event)
    points = bench.points(name)
    assert sum(getattr(each, "value", None) or each.sum for each in points) == pytest.approx(value)


def test_label_values_are_bounded():
    labels = TaskLabels({"shop.add", "shop.\n" + "x" * 500})
    assert labels.task("shop.add") == "shop.add"
    assert {labels.task(f"attack-{n}") for n in range(1000)} == {UNKNOWN}
    assert labels.task("shop.\n" + "x" * 500) == "shop.?" + "x" * 94
    assert len({labels.error(f"Error{n}") for n in range(1000)}) == MOST_ERRORS + 1
    assert labels.error("Error0") == "Error0"
    assert labels.error("new") == OTHER
    assert labels.reason("new") == "new"
    assert labels.error(None) == UNKNOWN
