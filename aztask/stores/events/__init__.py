"""Lifecycle events: what happens to tasks, as lines of JSON in files and blobs."""

from aztask.stores.events.event import EVENT_KINDS, Event, EventKind
from aztask.stores.events.sink import (
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
