"""The smallest app: two tasks on a queue that is a file."""

from pathlib import Path

from aztask import App

app = App("shop", broker="local://", results="local://")


@app.task
def count_words(path: str) -> int:
    """How many words a file holds."""
    return len(Path(path).read_text().split())


@app.task
def total(counts: list[int]) -> int:
    """The sum of some counts."""
    return sum(counts)
