"""Spans below an unsampled parent: skipped where the sampler records none of them."""

from __future__ import annotations

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, DEFAULT_ON, ParentBased, TraceIdRatioBased
from opentelemetry.trace import NoOpTracerProvider

from aztask import App
from aztask.hooks import WorkerInfo
from aztask.message.message import TaskMessage
from aztask.telemetry.otel import instrument
from aztask.telemetry.otel.instrument import _records
from aztask.telemetry.otel.propagation import UnsampledParents

UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


def message(traceparent):
    return TaskMessage("t", "shop.add", "default", b"", traceparent=traceparent)


@pytest.mark.parametrize(
    ("sampler", "skipped"),
    [
        (DEFAULT_ON, True),
        (ParentBased(TraceIdRatioBased(0.01)), True),
        (ALWAYS_ON, False),
        (ParentBased(ALWAYS_ON, remote_parent_not_sampled=ALWAYS_ON), False),
        (ParentBased(ALWAYS_ON, local_parent_not_sampled=ALWAYS_ON), False),
    ],
)
def test_only_where_the_sampler_records_nothing_below_an_unsampled_span(sampler, skipped):
    provider = TracerProvider(sampler=sampler)
    unsampled = UnsampledParents(lambda: provider)
    for flags in ("0", "2"):  # 2: the trace id is random, as recent SDKs say
        assert unsampled.skip(message(UNSAMPLED[:-1] + flags)) is skipped


@pytest.mark.parametrize(
    "traceparent",
    [
        None,
        "",
        UNSAMPLED[:-1] + "1",
        UNSAMPLED[:-1] + "3",
        "01" + UNSAMPLED[2:],
        "00-" + "0" * 32 + UNSAMPLED[35:],
        UNSAMPLED[:36] + "0" * 16 + "-00",
    ],
    ids=[
        "none",
        "empty",
        "sampled",
        "sampled and random",
        "another version",
        "no trace",
        "no span",
    ],
)
def test_a_message_without_a_valid_unsampled_context_is_sampled_anew(traceparent):
    provider = TracerProvider(sampler=DEFAULT_ON)
    assert not UnsampledParents(lambda: provider).skip(message(traceparent))


def test_a_provider_that_is_set_later_counts():
    providers = [NoOpTracerProvider()]
    unsampled = UnsampledParents(lambda: providers[-1])
    assert not unsampled.skip(message(UNSAMPLED))
    providers.append(TracerProvider(sampler=DEFAULT_ON))
    assert unsampled.skip(message(UNSAMPLED))


def test_a_hook_of_the_program_may_set_the_meter_provider(tmp_path, monkeypatch):
    app = App("shop", broker=f"local://{tmp_path}/queues.db")
    instrument(app)
    with app.hooks.worker.around(WorkerInfo("w")):
        assert not app.hooks.event, "nobody reads metrics"
    provider = MeterProvider()

    @app.hooks.worker
    def set_up(_):
        monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
        yield

    with app.hooks.worker.around(WorkerInfo("w")):
        assert app.hooks.event
    provider.shutdown()
    app.close()


def test_events_are_only_made_for_metrics_that_somebody_reads():
    assert not _records(metrics.NoOpMeterProvider())
    provider = MeterProvider()
    assert _records(provider)
    provider.shutdown()
