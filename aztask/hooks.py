"""Hooks of an app: your code around sends, runs, workers and pool processes.

Telemetry, error reporters and web frameworks register here; aztask calls none of them by name. See
docs/how-to/advanced/hooks.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aztask.config import Settings
from aztask.context import Context
from aztask.events.event import Event
from aztask.events.sink import EventSink, FileEventSink, NullEventSink
from aztask.support.hooks import Hook, Listeners


@dataclass(slots=True)
class Sending:
    """One send, the argument of an ``app.around_send`` hook.

    * `task`: the task's name.
    * `queue`: the queue that it is sent to.
    * `ids`: the task ids, in order: one for `.delay`, up to 500 for each batch of `.map`.
    * `headers`: what you put here travels with every message of the send: text, numbers, bytes, or
      lists and maps of those. The task reads them in ``context.message.extra``.
    """

    task: str
    queue: str
    ids: Sequence[str]
    headers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker or one of its pool processes, the argument of worker and process hooks.

    * `name`: the worker's name, the same in its pool processes.
    * `queues`: the queues that it serves.
    """

    name: str
    queues: tuple[str, ...] = ()


class Hooks:
    """All hooks of one app. You register with the attributes of the `App`, as decorators::

    @app.around_run
    def timed(context: Context) -> Iterator[None]:
        started = time.monotonic()
        yield
        print(context.task, time.monotonic() - started)
    """

    def __init__(self) -> None:
        self.send: Hook[Sending] = Hook("around_send")
        self.run: Hook[Context] = Hook("around_run")
        self.worker: Hook[WorkerInfo] = Hook("around_worker")
        self.process: Hook[WorkerInfo] = Hook("around_process")
        self.event: Listeners[Event] = Listeners("on_event")


class HookedSink:
    """An event sink that also passes every event to the app's ``on_event`` listeners."""

    def __init__(self, inner: EventSink, listeners: Listeners[Event]) -> None:
        self._inner = inner
        self._listeners = listeners

    @property
    def idle(self) -> bool:
        """True if no file and no listener takes the events."""
        return self._inner.idle and not self._listeners

    def emit(self, event: Event) -> None:
        """Pass one event to the sink and to the listeners."""
        self._inner.emit(event)
        self._listeners.notify(event)

    def flush(self) -> None:
        """Have the sink write its buffered events."""
        self._inner.flush()

    def close(self) -> None:
        """Close the sink; the listeners stay registered."""
        self._inner.close()


def event_sink(settings: Settings, writer: str, hooks: Hooks) -> EventSink:
    """The sink for events of `writer`: the app's directory, if it has one, and its listeners.

    Files that are uploaded are not deleted by age here: the workers that upload them do that.
    """
    inner: EventSink = NullEventSink()
    if settings.events is not None:
        kept = settings.events_container is not None
        retention = None if kept else settings.events_retention_seconds
        inner = FileEventSink(settings.events, writer, retention=retention)
    return HookedSink(inner, hooks.event)
