"""An app whose spans go to a file, in every process."""

from __future__ import annotations

import logging
import os
import time

from opentelemetry import trace
from spanfile import provider

from aztask import App, Context, RetryPolicy
from aztask.telemetry.otel import instrument

tracer_provider = provider(os.environ["SPANS"])
trace.set_tracer_provider(tracer_provider)
app = App(
    "traced",
    broker=os.environ.get("LEDGER_BROKER", "local://"),
    results=os.environ.get("LEDGER_RESULTS", "local://"),
    retry=RetryPolicy(max_retries=2, delay=0.05, backoff=1.0, jitter=False),
)
instrument(app)


@app.task_with_context
def fails_until_replayed(context: Context) -> str:
    with trace.get_tracer("shop").start_as_current_span("charge"):
        logging.getLogger("shop").warning("charging")
    if not context.message.generation:
        raise OSError("no connection with password=hunter2")
    return format(trace.get_current_span().get_span_context().trace_id, "032x")


@app.task
def add(a: int, b: int) -> int:
    return a + b


@app.task
def both(a: int, b: int) -> str:
    return add.delay(a, b).id


@app.task
async def waits() -> str:
    return format(trace.get_current_span().get_span_context().span_id, "016x")


@app.task
def exits() -> None:
    os._exit(3)


@app.task(time_limit=0.3)
def hangs() -> None:
    time.sleep(60)
