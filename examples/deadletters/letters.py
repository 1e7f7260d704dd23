"""A task that fails for some messages, which become dead letters and are replayed later.

`deliver` fails if a name is not in the address book. It is tried three times; then its message is
dead-lettered. After the book is corrected, you can replay the dead letters.
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
    """Deliver a letter. Raises LookupError if the name is not in the book."""
    if not text:
        raise Reject("empty", "a letter without a text is never delivered")  # not retried
    book = json.loads(BOOK.read_text()) if BOOK.exists() else {}
    if name not in book:
        raise LookupError(f"{name} is not in {BOOK}")
    return f"{text} -> {book[name]}"
