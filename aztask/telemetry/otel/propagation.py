"""The trace context of a message: W3C ``traceparent``, ``tracestate`` and ``baggage``.

Messages always carry the W3C headers, whatever propagator the program sets: other senders and
receivers of Service Bus expect them. ``Diagnostic-Id`` is the older name that the Azure SDKs write
and read beside ``traceparent``, with the same content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
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
    TracerProvider,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from aztask.message.message import TaskMessage
from aztask.queues.delivery import Delivery

DIAGNOSTIC_ID: Final = "Diagnostic-Id"
ENQUEUED_TIME: Final = "enqueuedTime"
IDS: Final = r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]"
PLAIN: Final = re.compile(IDS + "[0-9a-f]")
"""A valid ``traceparent`` of version 00: an id of zeros alone is not one."""

UNSAMPLED: Final = re.compile(IDS + "[02468ace]")
"""The same without the flag of sampled traces; other flags may be set."""

FLAGS: Final = slice(54, 55)
UNSAMPLED_FLAGS: Final = frozenset("02468ace")
"""The place of a ``traceparent``'s last digit, and its values for an unsampled trace; 55 characters
are the least that a later version of the header may have."""

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
    headers: dict[str, Any], span: SpanContext, context: Context, *, also_old: bool
) -> None:
    """Put the span's context into a message's headers; without a valid span, do nothing.

    * `context`: whose baggage travels with the message.
    * `also_old`: write ``Diagnostic-Id`` too, if the trace is sampled. In an unsampled trace there
      is no span that an older SDK could refer to, and the header would cost all who handle the
      message.
    """
    if not span.is_valid:
        return
    headers["traceparent"] = traceparent_of(span)
    if span.trace_state:
        headers["tracestate"] = span.trace_state.to_header()
    if context and baggage.get_all(context):
        _baggage.inject(headers, context)
    if also_old and span.trace_flags.sampled:
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


class _UnsampledSender(NonRecordingSpan):
    """Stands for an unsampled span that sent a message; its ids are read when they are needed.

    Most tasks start no span and send nothing, so they never need the ids.
    """

    def __init__(self, traceparent: str) -> None:
        super().__init__(INVALID_SPAN_CONTEXT)
        self._traceparent = traceparent

    def get_span_context(self) -> SpanContext:
        """The ids in the text."""
        if not self._context.is_valid:
            self._context = _read(self._traceparent)
        return self._context


def context_of_unsampled(message: TaskMessage) -> Context:
    """`context_of` for a message for which `is_unsampled` is true, at half its cost."""
    if message.extra or message.traceparent is None:
        return context_of(message)
    return set_span_in_context(_UnsampledSender(message.traceparent), Context())


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
    return _read(parent)  # the usual case, at a third of the propagator's cost


def _read(plain: str) -> SpanContext:
    """The span in a text that `PLAIN` matches."""
    flags = TraceFlags(int(plain[53:], 16))
    return SpanContext(int(plain[3:35], 16), int(plain[36:52], 16), True, flags)


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


def links_to(messages: Sequence[TaskMessage | None], deliveries: Sequence[Delivery]) -> list[Link]:
    """The links to the senders of these messages, at most `MOST_LINKS`, none to an unsampled one.

    None stands for a message that could not be read.
    """
    links: list[Link] = []
    for message, delivery in zip(messages, deliveries, strict=True):
        if message is None:
            continue
        parent = message.traceparent
        if parent is not None and parent[FLAGS] in UNSAMPLED_FLAGS:  # the usual case
            continue
        sender = span_of(message)
        if sender.is_valid and sender.trace_flags.sampled:
            links += link(sender, delivery.enqueued_at)
            if len(links) == MOST_LINKS:
                break
    return links


def without_sender(messages: Sequence[TaskMessage]) -> list[int]:
    """The indexes of the messages that carry no valid trace context."""
    return [
        index
        for index, message in enumerate(messages)
        if (message.traceparent is None or PLAIN.fullmatch(message.traceparent) is None)
        and not span_of(message).is_valid
    ]


def _text(value: object) -> str:
    """A header that another program may have written, if it is text."""
    return value if isinstance(value, str) else ""


# -- whether a span may be skipped because its parent was not sampled ----------------------
#
# With the usual samplers, nothing below an unsampled span is recorded, yet the SDK needs about 10
# microseconds to find that out for each span: a tenth of what a task costs on the embedded queue.


NEVER_BELOW: Final = (
    "remoteParentNotSampled:AlwaysOffSampler",
    "localParentNotSampled:AlwaysOffSampler",
)
"""What the description of the SDK's `ParentBased` sampler says if it records nothing below an
unsampled parent. Source: opentelemetry-sdk, ``opentelemetry.sdk.trace.sampling``; the format of the
description is that of OpenTelemetry's specification."""


class UnsampledParents:
    """Knows whether the sampler records no span below an unsampled one; others are always asked."""

    def __init__(self, provider: Callable[[], TracerProvider]) -> None:
        """`provider`: returns the provider in force, which a program may set later."""
        self._provider = provider
        self._known: tuple[TracerProvider, bool] | None = None

    def skip(self, message: TaskMessage) -> bool:
        """True if no span of this message would be recorded."""
        return is_unsampled(message) and self._never_below()

    def nothing_below(self, span: SpanContext) -> bool:
        """True if no child of this span would be recorded; False for an invalid one."""
        return span.is_valid and not span.trace_flags.sampled and self._never_below()

    def _never_below(self) -> bool:
        provider = self._provider()
        if self._known is None or self._known[0] is not provider:
            self._known = (provider, _never_below(provider))
        return self._known[1]


def _never_below(provider: TracerProvider) -> bool:
    describe = getattr(getattr(provider, "sampler", None), "get_description", None)
    if describe is None:
        return False
    description = str(describe())
    return description.startswith("ParentBased{") and all(
        part in description for part in NEVER_BELOW
    )
