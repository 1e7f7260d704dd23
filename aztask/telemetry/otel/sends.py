"""Spans of sends: ``send QUEUE`` for one message, ``create QUEUE`` and ``send QUEUE`` for a batch.

Rules
1. The trace context of a message is made here, once. Its retries, clones, dead letters and replays
   carry the same one, so all its runs are in one trace.
2. All messages of a batch are in one trace: that of the span that is current, or a new one. Their
   ``create`` spans are children of the batch's ``send`` span, which links to them.
3. Where nothing would be recorded below the batch's span, its messages carry the context of that
   span: a ``create`` span for each would cost the SDK time, and nothing would show it.
4. A workflow has one span, the parent of all its tasks, whenever they are sent.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from typing import Any

from opentelemetry import context as contexts
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanKind,
    Tracer,
    get_current_span,
    set_span_in_context,
)

from aztask.hooks import Sending
from aztask.support.quiet import quiet
from aztask.telemetry.otel.attributes import MessagingAttributes, failed, name_of
from aztask.telemetry.otel.instruments import Instruments
from aztask.telemetry.otel.propagation import MOST_LINKS, UnsampledParents, write_context


class SendSpans:
    """Makes the spans of sends, as an ``around_send`` hook."""

    def __init__(
        self,
        tracer: Tracer,
        attributes: MessagingAttributes,
        instruments: Instruments,
        unsampled: UnsampledParents,
    ) -> None:
        self._tracer = tracer
        self._attributes = attributes
        self._instruments = instruments
        self._unsampled = unsampled

    def around_send(self, sending: Sending) -> Generator[None, Any, None]:
        """Make the spans of one send, and put the trace contexts into the messages' headers."""
        began = time.time_ns()
        alone = len(sending.ids) == 1 or sending.workflow is not None
        common = self._attributes.of(sending.queue, "send", "send")
        outside = contexts.get_current()
        span = self._started(sending, alone, common, began, outside)
        within = set_span_in_context(span, outside)
        own = span.get_span_context()
        if alone or not own.is_valid or self._unsampled.nothing_below(own):
            write_context(sending.headers, own, outside, also_old=self._attributes.is_service_bus)
        else:
            self._create(sending, span, within)
        token = contexts.attach(within)
        error_type = ""
        try:
            with quiet():
                yield
        except BaseException as error:
            error_type = name_of(error)
            failed(span, error)
            raise
        finally:
            contexts.detach(token)
            span.end()
            seconds = (time.time_ns() - began) / 1e9
            self._instruments.sent(common, len(sending.ids), seconds, error_type)

    def _started(
        self,
        sending: Sending,
        alone: bool,
        common: Mapping[str, str | int],
        began: int,
        outside: contexts.Context,
    ) -> Span:
        """Start the ``send`` span; below an unsampled span, return one that stands for that."""
        if outside:
            current = get_current_span(outside).get_span_context()
            if self._unsampled.nothing_below(current):
                return NonRecordingSpan(current)
        span = self._tracer.start_span(
            f"send {sending.queue}",
            context=outside,
            kind=SpanKind.PRODUCER if alone else SpanKind.CLIENT,
            attributes=common,
            start_time=began,
        )
        if span.is_recording():
            span.set_attributes(_details(sending, alone))
        return span

    def _create(self, sending: Sending, batch: Span, within: contexts.Context) -> None:
        """Make a span for each message of a batch (rule 2)."""
        common = self._attributes.of(sending.queue, "create", "create")
        name, start_span = f"create {sending.queue}", self._tracer.start_span
        also_old = self._attributes.is_service_bus
        links = 0
        each: list[dict[str, Any]] = []
        for task_id in sending.ids:
            attributes = {
                **common,
                "aztask.task": sending.task,
                "messaging.message.conversation_id": task_id,
            }
            span = start_span(name, context=within, kind=SpanKind.PRODUCER, attributes=attributes)
            span.end()
            created = span.get_span_context()
            headers: dict[str, Any] = {}
            write_context(headers, created, within, also_old=also_old)
            each.append(headers)
            if created.trace_flags.sampled and links < MOST_LINKS:
                batch.add_link(created)
                links += 1
        sending.each = each


def _details(sending: Sending, alone: bool) -> dict[str, str | int]:
    """The attributes of this send, which samplers do not see."""
    details: dict[str, str | int] = {"aztask.task": sending.task}
    if alone:
        details["messaging.message.conversation_id"] = sending.workflow or sending.ids[0]
    else:
        details["messaging.batch.message_count"] = len(sending.ids)
    if sending.workflow is not None:
        details["aztask.workflow"] = sending.workflow
    return details
