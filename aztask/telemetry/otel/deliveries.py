"""Spans of the worker itself: ``receive QUEUE``, settlements, and runs that were killed.

Rules
1. A receive or a settlement of many messages is one span with links to their senders. A settlement
   that is alone, a resubmission and a dead letter are spans in the message's own trace.
2. A message that came without a trace context gets that of the receive: its runs, settlements and
   retries are then in one trace.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Final

from opentelemetry import context as contexts
from opentelemetry.trace import Span, SpanKind, Tracer

from aztask.hooks import KilledRun, Receiving, Settling
from aztask.message.message import TaskMessage
from aztask.queues.delivery import Delivery, Settled
from aztask.settlement import DeadLetter, Decision, name_of
from aztask.support.masking import mask
from aztask.support.quiet import quiet
from aztask.telemetry.otel.attributes import SETTLEMENTS, MessagingAttributes, failed, failed_with
from aztask.telemetry.otel.attributes import name_of as error_name
from aztask.telemetry.otel.instruments import Instruments
from aztask.telemetry.otel.propagation import (
    UnsampledParents,
    context_of,
    link_to,
    links_to,
    traceparent_of,
    without_sender,
)
from aztask.telemetry.otel.runs import RunSpans

OWN_SPAN: Final = frozenset({"dead-letter", "resubmit", "defer", "abandon"})
"""Settlements that always get a span of their own, in the message's trace."""


class DeliverySpans:
    """The hooks `receive`, `settle` and `killed`."""

    def __init__(
        self,
        tracer: Tracer,
        attributes: MessagingAttributes,
        instruments: Instruments,
        runs: RunSpans,
        unsampled: UnsampledParents,
    ) -> None:
        self._tracer = tracer
        self._attributes = attributes
        self._instruments = instruments
        self._runs = runs
        self._unsampled = unsampled

    # -- receives ----------------------------------------------------------------------------

    def received(self, receiving: Receiving) -> None:
        """Make the span of a receive that brought messages."""
        common = self._attributes.of(receiving.queue, "receive", "receive")
        span = self._tracer.start_span(
            f"receive {receiving.queue}",
            context=contexts.Context(),
            kind=SpanKind.CLIENT,
            attributes={**common, "messaging.batch.message_count": receiving.received},
            links=links_to(receiving.messages, receiving.deliveries),
            start_time=_nanoseconds(receiving.asked_at),
        )
        own = span.get_span_context()
        if own.is_valid and (without := without_sender(receiving.messages)):
            receiving.traceparents.update(dict.fromkeys(without, traceparent_of(own)))
        span.end(_nanoseconds(receiving.received_at))
        seconds = max(0.0, receiving.received_at - receiving.asked_at)
        self._instruments.received(common, receiving.received, seconds)

    # -- settlements -------------------------------------------------------------------------

    def around_settle(self, settling: Settling) -> Generator[None, Any, None]:
        """Make the spans of a batch of settlements, after the broker has answered."""
        began = time.time_ns()
        error: BaseException | None = None
        try:
            with quiet():
                yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._settled(settling, began, error)

    def _settled(self, settling: Settling, began: int, error: BaseException | None) -> None:
        groups: dict[str, list[int]] = defaultdict(list)
        for index, settlement in enumerate(settling.settlements):
            groups[name_of(settlement)].append(index)
        seconds = (time.time_ns() - began) / 1e9
        for kind, indexes in groups.items():
            common = self._attributes.of(settling.queue, kind.replace("-", "_"), "settle")
            if kind in OWN_SPAN or len(indexes) == 1:
                for index in indexes:
                    self._one(settling, index, kind, common, began, error)
            else:
                self._many(settling, indexes, kind, common, began, error)
            self._instruments.settled(common, seconds, error_name(error) if error else "")

    def _one(
        self,
        settling: Settling,
        index: int,
        kind: str,
        common: Mapping[str, str | int],
        began: int,
        error: BaseException | None,
    ) -> None:
        message, delivery = settling.messages[index], settling.deliveries[index]
        if message is not None and self._unsampled.skip(message):
            return
        attributes: dict[str, Any] = {
            **common,
            **_details(settling.settlements[index]),
            "messaging.message.id": delivery.envelope.message_id,
        }
        if message is not None:
            attributes["messaging.message.conversation_id"] = message.id
            attributes["aztask.task"] = message.task
        if self._attributes.is_service_bus:
            attributes["messaging.servicebus.message.delivery_count"] = delivery.delivery_count
        span = self._start(message, delivery, kind, settling.queue, attributes, began)
        self._end(span, settling, [index], error)

    def _many(
        self,
        settling: Settling,
        indexes: Sequence[int],
        kind: str,
        common: Mapping[str, str | int],
        began: int,
        error: BaseException | None,
    ) -> None:
        links = links_to(
            [settling.messages[index] for index in indexes],
            [settling.deliveries[index] for index in indexes],
        )
        attributes: dict[str, Any] = {**common, "messaging.batch.message_count": len(indexes)}
        if self._attributes.is_service_bus:
            attributes["messaging.servicebus.disposition_status"] = SETTLEMENTS[kind]
        span = self._tracer.start_span(
            f"{kind.replace('-', '_')} {settling.queue}",
            context=contexts.Context(),
            kind=SpanKind.CLIENT,
            attributes=attributes,
            links=links,
            start_time=began,
        )
        self._end(span, settling, indexes, error)

    def _start(
        self,
        message: TaskMessage | None,
        delivery: Delivery,
        kind: str,
        queue: str,
        attributes: dict[str, Any],
        began: int,
    ) -> Span:
        if self._attributes.is_service_bus:
            attributes["messaging.servicebus.disposition_status"] = SETTLEMENTS[kind]
        return self._tracer.start_span(
            f"{kind.replace('-', '_')} {queue}",
            context=context_of(message) if message is not None else contexts.Context(),
            kind=SpanKind.CLIENT,
            attributes=attributes,
            links=link_to(message, delivery.enqueued_at) if message is not None else [],
            start_time=began,
        )

    @staticmethod
    def _end(
        span: Span, settling: Settling, indexes: Sequence[int], error: BaseException | None
    ) -> None:
        if error is not None:
            failed(span, error)
        elif span.is_recording():
            for index in indexes:
                answer = settling.answers[index] if settling.answers else None
                if answer is not None and not isinstance(answer, Settled):
                    failed_with(span, type(answer).__name__, mask(answer.reason))
        span.end()

    # -- killed runs -------------------------------------------------------------------------

    def killed(self, run: KilledRun) -> None:
        """Make the span of a run whose pool process could not end it."""
        span, _ = self._runs.start(
            run.message,
            run.delivery.delivery_count,
            run.delivery.enqueued_at,
            _nanoseconds(run.started_at),
        )
        failed_with(span, run.error_type, mask(run.error))
        span.end(_nanoseconds(run.ended_at))


def _details(settlement: Decision) -> dict[str, str | float]:
    """Attributes of a settlement: the reason of a dead letter, the delay of a resubmission."""
    if isinstance(settlement, DeadLetter):
        return {
            "aztask.dead_letter.reason": settlement.reason,
            "aztask.dead_letter.description": mask(settlement.description),
        }
    delay = getattr(settlement, "delay", None)
    return {} if delay is None else {"aztask.delay": float(delay)}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
