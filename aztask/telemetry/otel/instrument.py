"""Registers the spans, the metrics and the log fields with an app's hooks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, Final
from weakref import WeakSet

from opentelemetry import metrics, trace
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import TracerProvider, get_current_span

from aztask.app import App
from aztask.hooks import WorkerInfo
from aztask.telemetry.labels import TaskLabels
from aztask.telemetry.otel.attributes import MessagingAttributes
from aztask.telemetry.otel.deliveries import DeliverySpans, RunSpans
from aztask.telemetry.otel.instruments import Instruments
from aztask.telemetry.otel.propagation import UnsampledParents
from aztask.telemetry.otel.sends import SendSpans
from aztask.version import __version__
from aztask.worker.logs import add_log_fields

# -- trace and span ids in the log of workers, so that a line leads to its trace -----------


NO_FIELDS: Final[Mapping[str, str]] = {}


def trace_fields() -> Mapping[str, str]:
    """``trace_id`` and ``span_id`` of the current span; empty without one."""
    span = get_current_span().get_span_context()
    if not span.is_valid:
        return NO_FIELDS
    return {"trace_id": f"{span.trace_id:032x}", "span_id": f"{span.span_id:016x}"}


OUTERMOST: Final = -100.0
INNERMOST: Final = 100.0
FLUSH_MILLISECONDS: Final = 5_000
SCHEMA: Final = "https://opentelemetry.io/schemas/1.44.0"

_instrumented: WeakSet[App] = WeakSet()


def instrument(
    app: App,
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> None:
    """Trace and measure an app's sends, runs and settlements.

    Call it in the module that makes the app, so that workers and their pool processes do it too. A
    second call for the same app changes nothing.

    * `tracer_provider`, `meter_provider`: the global ones by default, also if they are set later,
      but before a worker starts.
    """
    if app in _instrumented:
        return
    _instrumented.add(app)
    tracer = trace.get_tracer("aztask", __version__, tracer_provider, SCHEMA)
    meter = metrics.get_meter("aztask", __version__, meter_provider, SCHEMA)
    attributes = MessagingAttributes(app)
    instruments = Instruments(meter, attributes, TaskLabels(app.tasks))
    unsampled = UnsampledParents(lambda: tracer_provider or trace.get_tracer_provider())
    runs = RunSpans(app, tracer, attributes, unsampled)
    deliveries = DeliverySpans(tracer, attributes, instruments, runs, unsampled)
    sends = SendSpans(tracer, attributes, instruments, unsampled)
    hooks = app.hooks
    hooks.send.add(sends.around_send, order=OUTERMOST)
    hooks.run.add(runs.around_run, order=OUTERMOST)
    hooks.receive(deliveries.received)
    hooks.settle.add(deliveries.around_settle, order=OUTERMOST)
    hooks.killed(deliveries.killed)
    add_log_fields(trace_fields)

    def flush() -> None:
        _flush(tracer_provider or trace.get_tracer_provider())
        _flush(meter_provider or metrics.get_meter_provider())

    def listen(_: WorkerInfo) -> Generator[None, Any, None]:
        if _records(meter_provider or metrics.get_meter_provider()):
            hooks.event(instruments.event)
        yield

    hooks.process.add(_flushed(flush), order=OUTERMOST)
    hooks.worker.add(_flushed(flush), order=OUTERMOST)
    hooks.worker.add(listen, order=INNERMOST)  # a hook of the program may set the provider


def _flushed(flush: Callable[[], None]) -> Callable[[WorkerInfo], Generator[None, Any, None]]:
    """A hook that flushes at the end: a pool process ends without running exit functions."""

    def around(_: WorkerInfo) -> Generator[None, Any, None]:
        try:
            yield
        finally:
            flush()

    return around


def _records(provider: MeterProvider) -> bool:
    """False for the API's own providers, which record nothing, so no event need be made for them.

    The API has no name for the one that is in force until a program sets another.
    """
    return not type(provider).__module__.startswith("opentelemetry.metrics")


def _flush(provider: object) -> None:
    """Export what is buffered. The API has no such method, the SDK's providers have."""
    force = getattr(provider, "force_flush", None)
    if force is not None:
        force(FLUSH_MILLISECONDS)
