"""Handlers of events that Event Grid puts into queues, in both of its schemas."""

from dataclasses import dataclass, field
from typing import Any

from aztask import App

app = App("pictures", broker="local://", results="local://")


@dataclass
class GridEvent:
    """An event in Event Grid's own schema, which is its default."""

    id: str
    subject: str
    kind: str = field(metadata={"name": "eventType"})
    data: dict[str, Any] = field(default_factory=dict)


@dataclass
class CloudEvent:
    """An event in the schema CloudEvents 1.0."""

    id: str
    source: str
    type: str
    subject: str = ""
    data: dict[str, Any] = field(default_factory=dict)


@app.task(queue="pictures")
def make_thumbnail(url: str, size: int) -> str:
    """Runs once for each event: its id is that of the event."""
    print(f"thumbnail of {url}, {size} bytes", flush=True)
    return url


@app.handler(queue="grid-events", model=GridEvent)
def on_grid_event(event: GridEvent) -> None:
    """Send a task for a new blob, and ignore other events."""
    if event.kind == "Microsoft.Storage.BlobCreated":
        start(event.id, event.data)


@app.handler(queue="cloud-events", model=CloudEvent)
def on_cloud_event(event: CloudEvent) -> None:
    """Send a task for a new blob, too: only the schema is another one."""
    if event.type == "Microsoft.Storage.BlobCreated":
        start(event.id, event.data)


def start(event_id: str, data: dict[str, Any]) -> None:
    """Event Grid delivers at least once: the event's id as the task's makes one run of both."""
    thumbnail = make_thumbnail.with_options(task_id=f"blob-{event_id}")
    thumbnail.delay(data["url"], data["contentLength"])
