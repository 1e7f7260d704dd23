"""One task. Executors and workers import this module."""

from aztask import App

app = App("shop", broker="local://", results="local://")


@app.task
def thumbnail(path: str, width: int) -> str:
    """A thumbnail of one image; each call is counted in a file."""
    with open("made.txt", "a", encoding="utf-8") as made:  # noqa: PTH123  # one write, one line
        made.write(f"{path}\n")
    return f"{path} at {width}"
