"""Lifecycle events: what happens to tasks, as lines of JSON in files and blobs."""

from aztask.events.event import EVENT_KINDS, Event, EventKind
from aztask.events.sink import (
    EventReader,
    EventSink,
    FileEventSink,
    NullEventSink,
    read_events,
    recover,
)

__all__ = [
    "EVENT_KINDS",
    "Event",
    "EventKind",
    "EventReader",
    "EventSink",
    "FileEventSink",
    "NullEventSink",
    "read_events",
    "recover",
]
