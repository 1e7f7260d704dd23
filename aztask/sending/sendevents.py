"""The events of a program that sends: of its messages, and of the occurrences of schedules."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

from aztask.events.event import Event, EventKind
from aztask.events.sink import EventSink
from aztask.message.message import TaskMessage


class SendEvents:
    """Writes events to a file of this process, made with the first event. Any thread may call.

    A forked child opens a file of its own.
    """

    def __init__(self, open_events: Callable[[str], EventSink]) -> None:
        """open_events: opens the sink of a writer with this name."""
        self._open_events = open_events
        self._lock = threading.Lock()
        self._sink: tuple[int, EventSink] | None = None

    def emit(self, kind: EventKind, messages: Sequence[TaskMessage]) -> None:
        """Write one event for each message."""
        known = self._sink
        if known is not None and known[0] == os.getpid() and known[1].idle:
            return  # as mostly, without the lock
        with self._lock:
            sink = self._open()
            if sink.idle:
                return
            now = time.time()
            for message in messages:
                sink.emit(
                    Event(
                        kind,
                        message.id,
                        message.task,
                        message.queue,
                        ts=now,
                        workflow_id=message.workflow,
                        parent_id=message.parent_id,
                    )
                )
            sink.flush()

    def report(self, event: Event) -> None:
        """Write one event, at the present time if it has none."""
        with self._lock:
            sink = self._open()
            if not sink.idle:
                sink.emit(event._replace(ts=event.ts or time.time()))
                sink.flush()

    def close(self) -> None:
        """Close the file; the next event opens another one."""
        with self._lock:
            if self._sink is not None and self._sink[0] == os.getpid():
                self._sink[1].close()
            self._sink = None

    def _open(self) -> EventSink:
        """The sink of this process. The caller has the lock."""
        pid = os.getpid()
        if self._sink is None or self._sink[0] != pid:
            self._sink = (pid, self._open_events(f"sender-{socket.gethostname()}-{pid}"))
        return self._sink[1]
