"""Charge cards without the broker, the result store or a log having a card's number.

* Arguments, results and the texts of errors are encrypted before they leave the process.
* A program that has no key sees that tasks are there, and how they ended. That is what
  ``python encrypted.py look`` shows.
* The keys come from files, as a mounted secret does. The program makes them for this example.

Run it::

    python encrypted.py keys        # make three keys, each in a file
    python encrypted.py send        # charge two cards; one of them is refused
    aztask -A encrypted:app worker --burst
    python encrypted.py look        # without the key for encryption
    python encrypted.py results     # with it
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from aztask import App, RetryPolicy
from aztask.errors import CodecError, TaskFailed

KEYS = ("signing_keys", "id_key", "encryption_keys")
CARDS = {"order-1": "4111-1111-1111-1111", "order-2": "4000-0000-0000-0002"}


def make_keys() -> None:
    """Write a key into each file, once. Only this user can read them."""
    for name in KEYS:
        path = Path(f"{name}.txt")
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(secrets.token_urlsafe(32))


if sys.argv[1:] == ["keys"]:
    make_keys()
    sys.exit()

for name in KEYS:
    if not (name == "encryption_keys" and sys.argv[1:] == ["look"]):
        os.environ.setdefault(f"AZTASK_{name.upper()}_FILE", f"{name}.txt")

app = App(
    "encrypted",
    broker="local://",
    results="local://",
    retry=RetryPolicy(max_retries=0),
    encrypt=sys.argv[1:] != ["look"],
)


@app.task
def charge(card: str, cents: int) -> str:
    """Return a receipt that quotes the card, or raise an error that does."""
    if card.endswith("2"):
        raise ValueError(f"the card {card} was refused")
    return f"{cents / 100:.2f} from {card}"


def send() -> None:
    """Send both orders; the second card will be refused."""
    for order, card in CARDS.items():
        charge.with_options(task_id=order).delay(card, 1250)


def show() -> None:
    """Print what this program can read of the results."""
    for order in CARDS:
        try:
            print(order, app.result(order).get(timeout=5))
        except TaskFailed as error:
            print(order, "failed:", error)
        except CodecError as error:
            print(order, "succeeded:", error)


if __name__ == "__main__":
    send() if sys.argv[1:] == ["send"] else show()
    app.close()
