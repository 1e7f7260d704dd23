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
from opentelemetry.trace import NonRecordingSpan, Span, SpanKind, Tracer, set_span_in_context

from aztask.app import App
from aztask.context import Context
from aztask.errors import Snooze, TaskStopped
from aztask.hooks import KilledRun, Receiving, Settling
from aztask.message.message import TaskMessage
from aztask.queues.delivery import Delivery, Settled
from aztask.settlement import DeadLetter, Decision, name_of
from aztask.support.display import mask
from aztask.support.quiet import quiet
from aztask.telemetry.otel.attributes import SETTLEMENTS, MessagingAttributes, failed, failed_with
from aztask.telemetry.otel.attributes import name_of as error_name
from aztask.telemetry.otel.instruments import Instruments
from aztask.telemetry.otel.propagation import (
    UnsampledParents,
    context_of,
    context_of_unsampled,
    link,
    link_to,
    links_to,
    span_of,
    traceparent_of,
    without_sender,
)

# -- Runs ------------------------------------------------------------------------------------------
#
# Spans of runs: ``process QUEUE``, in the pool process, around the task's function.
#
# Rules
# 1. The span's parent is the span that sent the message, so a run is in the trace of its sender,
#    and a link to the same span carries the time at which the message was enqueued.
# 2. After a failed run its span stays current: the log line about the failure is written then, and
#    belongs to the trace. A run has context variables of its own, so no other run sees the span.
# 3. A pool process that is killed loses its open span. The worker then makes one in its place, see
#    `aztask.telemetry.otel.deliveries`.


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
                failed(span, error, private=self._app.codec.encrypts)
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


# -- Deliveries ------------------------------------------------------------------------------------


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
