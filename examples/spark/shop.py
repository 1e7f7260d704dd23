"""One task, in a module that executors and workers import."""

from aztask import App

app = App("shop", broker="local://", results="local://")


@app.task
def thumbnail(path: str, width: int) -> str:
    """Make a thumbnail of an image, and record the call in a file."""
    with open("made.txt", "a", encoding="utf-8") as made:  # noqa: PTH123  # one write, one line
        made.write(f"{path}\n")
    return f"{path} at {width}"
