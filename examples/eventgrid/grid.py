"""In the place of Event Grid: it delivers an event of each schema, and one of them twice."""

import json

from aztask import App
from aztask.message.envelope import Envelope

ACCOUNT = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Storage/storageAccounts/shop"
SUBJECT = "/blobServices/default/containers/pictures/blobs"


def grid_event(number: int) -> dict[str, object]:
    """What a storage account publishes in Event Grid's own schema."""
    return {
        "topic": ACCOUNT,
        "subject": f"{SUBJECT}/cat-{number}.png",
        "eventType": "Microsoft.Storage.BlobCreated",
        "id": f"831e1650-001e-001b-66ab-eeb76e06963{number}",
        "data": {
            "api": "PutBlob",
            "contentType": "image/png",
            "contentLength": 524288,
            "blobType": "BlockBlob",
            "url": f"https://shop.blob.core.windows.net/pictures/cat-{number}.png",
        },
        "dataVersion": "",
        "metadataVersion": "1",
        "eventTime": "2026-11-29T18:41:00.9584103Z",
    }


def cloud_event(number: int) -> dict[str, object]:
    """The same as a CloudEvent."""
    event = grid_event(number)
    return {
        "specversion": "1.0",
        "id": event["id"],
        "source": event["topic"],
        "subject": event["subject"],
        "type": event["eventType"],
        "time": event["eventTime"],
        "data": event["data"],
    }


if __name__ == "__main__":
    broker = App("grid", broker="local://").broker
    for queue, event in (
        ("grid-events", grid_event(1)),
        ("grid-events", grid_event(1)),
        ("cloud-events", cloud_event(2)),
    ):
        broker.send(queue, [Envelope(json.dumps(event).encode())])
