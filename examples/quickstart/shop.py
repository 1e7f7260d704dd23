"""A minimal app: two tasks, with a queue in a local file."""

from pathlib import Path

from aztask import App

app = App("shop", broker="local://", results="local://")


@app.task
def count_words(path: str) -> int:
    """Count the words in a file."""
    return len(Path(path).read_text().split())


@app.task
def total(counts: list[int]) -> int:
    """Add up the counts of several files."""
    return sum(counts)
