"""The trace context of a message: W3C ``traceparent``, ``tracestate`` and ``baggage``.

Messages always carry the W3C headers, whatever propagator the program sets: other senders and
receivers of Service Bus expect them. ``Diagnostic-Id`` is the older name that the Azure SDKs write
and read beside ``traceparent``, with the same content.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from opentelemetry import baggage
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    Link,
    NonRecordingSpan,
    SpanContext,
    TraceFlags,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from aztask.message.message import TaskMessage

DIAGNOSTIC_ID: Final = "Diagnostic-Id"
ENQUEUED_TIME: Final = "enqueuedTime"
IDS: Final = r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]"
PLAIN: Final = re.compile(IDS + "[0-9a-f]")
"""A valid ``traceparent`` of version 00: an id of zeros alone is not one."""

UNSAMPLED: Final = re.compile(IDS + "[02468ace]")
"""The same without the flag of sampled traces; other flags may be set."""

USUAL_LENGTH: Final = 55
"""Characters of a ``traceparent`` of version 00, as `PLAIN` has them."""

MOST_LINKS: Final = 128
"""Links of one span; the SDK drops further ones (OTEL_SPAN_LINK_COUNT_LIMIT's default)."""

_trace = TraceContextTextMapPropagator()
_baggage = W3CBaggagePropagator()


def traceparent_of(span: SpanContext) -> str:
    """The span's context as W3C text."""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags & 0xFF:02x}"


def write_context(
    headers: dict[str, Any], span: SpanContext, context: Context | None, *, diagnostic_id: bool
) -> None:
    """Put the span's context into a message's headers; without a valid span, do nothing.

    * `context`: whose baggage travels with the message; None: the current one.
    * `diagnostic_id`: write the Azure SDK's header too.
    """
    if not span.is_valid:
        return
    headers["traceparent"] = traceparent_of(span)
    if span.trace_state:
        headers["tracestate"] = span.trace_state.to_header()
    if baggage.get_all(context):
        _baggage.inject(headers, context)
    if diagnostic_id:
        headers[DIAGNOSTIC_ID] = headers["traceparent"]


def context_of(message: TaskMessage, span: SpanContext | None = None) -> Context:
    """The context that the message carries; an empty one if it carries none or a damaged one.

    * `span`: what `span_of` has returned for the message, if it was called before.
    """
    span = span_of(message) if span is None else span
    context = Context()
    if span.is_valid:
        context = set_span_in_context(NonRecordingSpan(span), context)
    if message.extra and (luggage := _text(message.extra.get("baggage"))):
        context = _baggage.extract({"baggage": luggage}, context)
    return context


def span_of(message: TaskMessage) -> SpanContext:
    """The span whose context the message carries; an invalid one if there is none."""
    extra = message.extra
    parent = message.traceparent or (_text(extra.get(DIAGNOSTIC_ID)) if extra else "")
    state = _text(extra.get("tracestate")) if extra else ""
    if state or len(parent) != USUAL_LENGTH or not parent.startswith("00-"):
        carrier = {"traceparent": parent, "tracestate": state} if parent else {}
        return get_current_span(_trace.extract(carrier, Context())).get_span_context()
    if not PLAIN.fullmatch(parent):
        return INVALID_SPAN_CONTEXT
    # the usual case, at a third of the propagator's cost
    flags = TraceFlags(int(parent[53:], 16))
    return SpanContext(int(parent[3:35], 16), int(parent[36:52], 16), True, flags)


def has_span(message: TaskMessage) -> bool:
    """True if the message carries a valid trace context."""
    parent = message.traceparent
    if parent is not None and PLAIN.fullmatch(parent):
        return True
    return span_of(message).is_valid


def is_unsampled(message: TaskMessage) -> bool:
    """True if the message carries a valid trace context that certainly is not sampled.

    Much cheaper than `span_of`: most messages are unsampled where few traces are kept.
    """
    parent = message.traceparent
    return parent is not None and UNSAMPLED.fullmatch(parent) is not None


def link_to(message: TaskMessage, enqueued_at: float) -> list[Link]:
    """The link to a message's sender, in a list that is empty without one; see `link`."""
    return link(span_of(message), enqueued_at)


def link(span: SpanContext, enqueued_at: float) -> list[Link]:
    """The link to the span that sent a message, in a list that is empty if it is invalid.

    * `enqueued_at`: UTC epoch seconds. Azure Monitor computes ``timeSinceEnqueued`` from it, and
      reads whole milliseconds only.
    """
    if not span.is_valid:
        return []
    return [Link(span, {ENQUEUED_TIME: int(1000 * enqueued_at)} if enqueued_at else None)]


def links_to(pairs: Iterable[tuple[TaskMessage, float]]) -> list[Link]:
    """Links to the senders of many messages, at most `MOST_LINKS`, unsampled ones skipped.

    * `pairs`: messages, and when they were enqueued.
    """
    links: list[Link] = []
    for message, enqueued_at in pairs:
        if is_unsampled(message):
            continue
        links += [
            link for link in link_to(message, enqueued_at) if link.context.trace_flags.sampled
        ]
        if len(links) >= MOST_LINKS:
            break
    return links


def _text(value: object) -> str:
    """A header that another program may have written, if it is text."""
    return value if isinstance(value, str) else ""
