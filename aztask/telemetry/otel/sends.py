"""Spans of sends: ``send QUEUE`` for one message, ``create QUEUE`` and ``send QUEUE`` for a batch.

The trace context of a message is made here, once. Its retries, clones, dead letters and replays
carry the same one, so all its runs are in one trace. A workflow has one span, the parent of all
its tasks, whenever they are sent.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

from opentelemetry import context as contexts
from opentelemetry.trace import Link, SpanKind, Tracer, set_span_in_context

from aztask.hooks import Sending
from aztask.support.quiet import quiet
from aztask.telemetry.otel.attributes import MessagingAttributes
from aztask.telemetry.otel.errors import failed, name_of
from aztask.telemetry.otel.instruments import Instruments
from aztask.telemetry.otel.propagation import MOST_LINKS, write_context


class SendSpans:
    """Makes the spans of sends, as an ``around_send`` hook."""

    def __init__(
        self, tracer: Tracer, attributes: MessagingAttributes, instruments: Instruments
    ) -> None:
        self._tracer = tracer
        self._attributes = attributes
        self._instruments = instruments

    def around_send(self, sending: Sending) -> Generator[None, Any, None]:
        """Make the spans of one send, and put the trace contexts into the messages' headers."""
        count = len(sending.ids)
        alone = count == 1 or sending.workflow is not None
        began = time.time_ns()
        if alone:
            links, kind = [], SpanKind.PRODUCER
        else:
            links, kind = self._created(sending), SpanKind.CLIENT
        common = self._attributes.of(sending.queue, "send", "send")
        attributes: dict[str, Any] = {**common, "aztask.task": sending.task}
        if alone:
            attributes["messaging.message.conversation_id"] = sending.workflow or sending.ids[0]
        else:
            attributes["messaging.batch.message_count"] = count
        if sending.workflow is not None:
            attributes["aztask.workflow"] = sending.workflow
        span = self._tracer.start_span(
            f"send {sending.queue}", kind=kind, attributes=attributes, links=links, start_time=began
        )
        if alone:
            write_context(
                sending.headers,
                span.get_span_context(),
                None,
                diagnostic_id=self._attributes.is_service_bus,
            )
        token = contexts.attach(set_span_in_context(span))
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
            self._instruments.sent(common, count, (time.time_ns() - began) / 1e9, error_type)

    def _created(self, sending: Sending) -> list[Link]:
        """Make a span for each message of a batch; returns links to those that are sampled."""
        common = self._attributes.of(sending.queue, "create", "create")
        name, start_span = f"create {sending.queue}", self._tracer.start_span
        diagnostic_id = self._attributes.is_service_bus
        links: list[Link] = []
        each: list[dict[str, Any]] = []
        for task_id in sending.ids:
            attributes = {
                **common,
                "aztask.task": sending.task,
                "messaging.message.conversation_id": task_id,
            }
            span = start_span(name, kind=SpanKind.PRODUCER, attributes=attributes)
            span.end()
            created = span.get_span_context()
            headers: dict[str, Any] = {}
            write_context(headers, created, None, diagnostic_id=diagnostic_id)
            each.append(headers)
            if created.trace_flags.sampled and len(links) < MOST_LINKS:
                links.append(Link(created))
        sending.each = each
        return links
