"""Attributes of spans and metrics, by OpenTelemetry's messaging conventions.

Source: OpenTelemetry, "Semantic conventions for messaging systems" and "... for Azure Messaging",
version 1.44 (in development). ``az.namespace`` and the link's ``enqueuedTime`` are what Azure
Monitor's exporter reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Final, TypeAlias

from opentelemetry.trace import Span, Status, StatusCode

from aztask.app import App
from aztask.queues.base import Networked
from aztask.support.display import mask, safe_str, traceback_of

Attributes: TypeAlias = dict[str, str | bool | int | float]

SETTLEMENTS: Final = {
    "complete": "complete",
    "abandon": "abandon",
    "release": "abandon",
    "defer": "defer",
    "dead-letter": "dead_letter",
    "resubmit": "complete",
}
"""``messaging.servicebus.disposition_status`` by settlement. A resubmission sends a clone and
completes the original."""


class MessagingAttributes:
    """The attributes that an app's spans and metrics share, made once for each queue."""

    def __init__(self, app: App) -> None:
        """Ask for no connection: the broker's name is read with the first span."""
        self._app = app
        self._known: dict[tuple[str, str, str], Mapping[str, str | int]] = {}

    @cached_property
    def is_service_bus(self) -> bool:
        """True if the app's broker is Service Bus."""
        return self._app.broker.capabilities.name == "servicebus"

    def of(self, queue: str, name: str, kind: str) -> Mapping[str, str | int]:
        """The attributes of an operation on a queue. Do not change them.

        * `name`: the operation's name, such as "dead_letter".
        * `kind`: its type: "create", "send", "receive", "process" or "settle".
        """
        key = (queue, name, kind)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._made(queue, name, kind)
        return known

    def _made(self, queue: str, name: str, kind: str) -> Mapping[str, str | int]:
        can = self._app.broker.capabilities
        made: dict[str, str | int] = {
            "messaging.system": can.telemetry_system,
            "messaging.destination.name": queue,
            "messaging.operation.name": name,
            "messaging.operation.type": kind,
        }
        broker = self._app.broker
        if isinstance(broker, Networked):
            host, port = broker.server
            made["server.address"] = host
            if port is not None:
                made["server.port"] = port
        if can.azure_namespace:
            made["az.namespace"] = can.azure_namespace
        return made


# How an error is written to a span: its type, its text and its traceback, with secrets masked.


TEXT_CHARACTERS: Final = 2_000
TRACEBACK_CHARACTERS: Final = 16_000


def name_of(error: BaseException) -> str:
    """``error.type``: the class, with its module unless that is ``builtins``."""
    kind = type(error)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def failed(span: Span, error: BaseException, *, private: bool = False) -> None:
    """Mark the span as failed. The SDK's own recording would not mask secrets.

    * `private`: name the type alone: with encryption, the text and the traceback of a task's error.
    """
    if not span.is_recording():
        return
    if private:
        span.add_event("exception", {"exception.type": name_of(error)})
        failed_with(span, name_of(error), "")
        return
    text = mask(safe_str(error, TEXT_CHARACTERS))
    span.add_event(
        "exception",
        {
            "exception.type": name_of(error),
            "exception.message": text,
            "exception.stacktrace": mask(traceback_of(error)[-2 * TRACEBACK_CHARACTERS :])[
                -TRACEBACK_CHARACTERS:
            ],
        },
    )
    failed_with(span, name_of(error), text)


def failed_with(span: Span, error_type: str, text: str) -> None:
    """Mark the span as failed for a reason that is no exception here."""
    span.set_attribute("error.type", error_type)
    span.set_status(Status(StatusCode.ERROR, text))
