"""Spans of runs: ``process QUEUE``, in the pool process, around the task's function.

Rules
1. The span's parent is the span that sent the message, so a run is in the trace of its sender, and
   a link to the same span carries the time at which the message was enqueued.
2. After a failed run its span stays current: the log line about the failure is written then, and
   belongs to the trace. A run has context variables of its own, so no other run sees the span.
3. A pool process that is killed loses its open span. The worker then makes one in its place, see
   `aztask.telemetry.otel.deliveries`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from opentelemetry import context as contexts
from opentelemetry.trace import NonRecordingSpan, Span, SpanKind, Tracer, set_span_in_context

from aztask.app import App
from aztask.context import Context
from aztask.errors import Snooze, TaskStopped
from aztask.message.message import TaskMessage
from aztask.telemetry.otel.attributes import MessagingAttributes, failed
from aztask.telemetry.otel.propagation import (
    UnsampledParents,
    context_of,
    context_of_unsampled,
    link,
    span_of,
)


class RunSpans:
    """The ``around_run`` hook, and what it has in common with runs that were killed."""

    def __init__(
        self,
        app: App,
        tracer: Tracer,
        attributes: MessagingAttributes,
        unsampled: UnsampledParents,
    ) -> None:
        self._app = app
        self._tracer = tracer
        self._attributes = attributes
        self._unsampled = unsampled

    def around_run(self, context: Context) -> Generator[None, Any, None] | None:
        """Make the run's span the current one while the task runs.

        Where nothing would be recorded, the sender's span becomes the current one and stays it:
        the caller has to give each run context variables of its own.
        """
        message = context.message
        if self._unsampled.skip(message):
            contexts.attach(context_of_unsampled(message))
            return None
        return self._recorded(message, context)

    def _recorded(self, message: TaskMessage, context: Context) -> Generator[None, Any, None]:
        span, parent = self.start(message, context.delivery_count, context.enqueued_at)
        token = contexts.attach(set_span_in_context(span, parent))
        try:
            yield
        except BaseException as error:
            if isinstance(error, Snooze | TaskStopped):
                span.set_attribute("aztask.outcome", type(error).__name__)
            else:
                failed(span, error)
            span.end()
            raise  # rule 2: not detached
        contexts.detach(token)
        span.end()

    def start(
        self,
        message: TaskMessage,
        delivery_count: int,
        enqueued_at: float,
        start_time: int | None = None,
    ) -> tuple[Span, contexts.Context]:
        """Start a run's span; returns it and the context that it was started in.

        Where an unsampled sender means an unsampled run, the span stands for the sender's.

        * `enqueued_at`: UTC epoch seconds. `start_time`: nanoseconds, now by default.
        """
        sender = span_of(message)
        parent = context_of(message, sender)
        if self._unsampled.skip(message):
            return NonRecordingSpan(sender), parent
        span = self._tracer.start_span(
            f"process {message.queue}",
            context=parent,
            kind=SpanKind.CONSUMER,
            attributes=self._attributes.of(message.queue, "process", "process"),
            links=link(sender, enqueued_at),
            start_time=start_time,
        )
        if span.is_recording():
            span.set_attributes(self._details(message, delivery_count, enqueued_at))
        return span, parent

    def _details(
        self, message: TaskMessage, delivery_count: int, enqueued_at: float
    ) -> dict[str, str | int]:
        """The attributes of this run, which samplers do not see."""
        details: dict[str, str | int] = {
            "aztask.task": message.task,
            "aztask.resubmit_count": message.resubmit_count,
            "messaging.message.id": self._app.codec.message_id(message),
            "messaging.message.conversation_id": message.correlation_id or message.id,
        }
        if message.generation:
            details["aztask.generation"] = message.generation
        if self._attributes.is_service_bus:
            details["messaging.servicebus.message.delivery_count"] = delivery_count
            details["messaging.servicebus.message.enqueued_time"] = int(enqueued_at)
        return details
