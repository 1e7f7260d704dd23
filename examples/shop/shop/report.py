"""Wait for the work of ``shop.place`` and print what came of it: ``python -m shop.report``."""

import json
from typing import Any

from shop.app import app
from shop.mails import OUTBOX
from shop.orders import BOOKS
from shop.place import SENT
from shop.prices import most_at_once


def main() -> None:
    """Print one line for each kind of work."""
    sent: dict[str, list[str]] = json.loads(SENT.read_text())
    values: dict[str, list[Any]] = {
        kind: [app.result(task_id).get(timeout=60) for task_id in dict.fromkeys(ids)]
        for kind, ids in sent.items()
    }
    mails = sum(len(path.read_text().splitlines()) for path in OUTBOX.iterdir())
    print(f"mails: {mails} delivered in {sum(values['mails'])} attempts")
    print(f"pictures: {len(values['pictures'])} thumbnails")
    (loaded,) = values["catalogue"]
    print(f"catalogue: {loaded['rows']} rows, the last run began at row {loaded['began_at']}")
    print(f"prices: {len(values['prices'])}, {most_at_once(values['prices'])} calls at once")
    for path in sorted(BOOKS.iterdir()):
        print(f"orders: {', '.join(path.read_text().split())}")


if __name__ == "__main__":
    main()
