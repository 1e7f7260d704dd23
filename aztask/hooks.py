"""Where an app's users can run code of their own: around sends, runs, workers and pool processes.

Telemetry, error reporters and frameworks register here from outside; nothing in aztask calls them
by name. See docs/how-to/advanced/hooks.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aztask.context import Context
from aztask.events.event import Event
from aztask.events.sink import EventSink
from aztask.support.hooks import Hook, Listeners


@dataclass(slots=True)
class Sending:
    """One send, as `App.around_send` sees it.

    task: the task's name. ids: the task ids, in order; one for `.delay`, up to 500 for each batch
    of `.map`. headers: what a hook puts here travels with every message of the send, as text,
    numbers, bytes, or lists and maps of those; a task reads them in ``context.message.extra``.
    """

    task: str
    queue: str
    ids: Sequence[str]
    headers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker, or one of its pool processes. name: the worker's."""

    name: str
    queues: tuple[str, ...] = ()


class Hooks:
    """All hooks of one app."""

    def __init__(self) -> None:
        self.send: Hook[Sending] = Hook("around_send")
        self.run: Hook[Context] = Hook("around_run")
        self.worker: Hook[WorkerInfo] = Hook("around_worker")
        self.process: Hook[WorkerInfo] = Hook("around_process")
        self.event: Listeners[Event] = Listeners("on_event")


class HookedSink:
    """An event sink whose events are also told to listeners."""

    def __init__(self, inner: EventSink, listeners: Listeners[Event]) -> None:
        self._inner = inner
        self._listeners = listeners

    @property
    def idle(self) -> bool:
        """Whether events go nowhere."""
        return self._inner.idle and not self._listeners

    def emit(self, event: Event) -> None:
        """Take one event."""
        self._inner.emit(event)
        self._listeners.tell(event)

    def flush(self) -> None:
        """Write what was taken."""
        self._inner.flush()

    def close(self) -> None:
        """Close the sink."""
        self._inner.close()
