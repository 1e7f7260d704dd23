"""A queue with eight shards over the addresses that MILL_ADDRESSES names: here, files.

With Storage accounts or Service Bus namespaces, the addresses are all that differs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from aztask import App

HERE = Path.cwd()
NAMES = os.environ.get("MILL_ADDRESSES", "a b").split()

app = App(
    "mill",
    broker=[f"local://{HERE}/{name}.db" for name in NAMES],
    results=f"local://{HERE}/results.db",
    owner="mill",
)
app.queue("orders", shards=8)


@app.task(queue="orders")
def grind(order: int) -> int:
    return order


if __name__ == "__main__":
    results = [grind.delay(order) for order in range(int(sys.argv[1]))]
    print(f"sent {len(results)} orders")
