"""A task that some messages break: what ends among the dead letters, and how it comes back.

`deliver` fails for addresses that are not in the book. It is tried three times, then its message is
a dead letter. Once the book is right, the dead letters are replayed.
"""

import json
from pathlib import Path

from aztask import App, Reject, RetryPolicy

BOOK = Path("book.json")

app = App(
    "letters",
    broker="local://",
    results="local://",
    retry=RetryPolicy(max_retries=2, delay=0.1),
)


@app.task
def deliver(name: str, text: str) -> str:
    """Deliver a letter; LookupError while nobody of that name is in the book."""
    if not text:
        raise Reject("empty", "a letter without a text is never delivered")  # not tried again
    book = json.loads(BOOK.read_text()) if BOOK.exists() else {}
    if name not in book:
        raise LookupError(f"nobody called {name} is in {BOOK}")
    return f"{text} -> {book[name]}"
