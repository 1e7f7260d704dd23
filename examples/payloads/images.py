"""Tasks whose arguments and results do not fit into a message."""

from aztask import App

app = App("images", broker="local://", results="local://")
# On Azure: App("images", broker="servicebus://NAMESPACE", payloads="blob://ACCOUNT/CONTAINER")


@app.task
def shrink(image: bytes) -> bytes:
    """Drop every second byte of an image, so that half of it is left."""
    return image[::2]


@app.task
def count(table: dict[str, int], word: str) -> int:
    """Look a word up in a table that many tasks share."""
    return table[word]
