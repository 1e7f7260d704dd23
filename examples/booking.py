"""Book each order once, whatever happens to the workers.

A task may run twice: a worker can die after the work but before the outcome is recorded. So a
second run must change nothing:

* the order's number is the task's id, so sending an order again adds no second task;
* the task's id is the booking's primary key, in the database itself;
* the lease is checked right before the commit, so a run that lost its lease books nothing;
* a long task saves its progress (`context.checkpoint`), and the next run continues from there.

Run it::

    python booking.py 20                      # send twenty orders
    aztask -A booking:app worker --burst      # book them
    python booking.py                         # show the bookings
"""

import sqlite3
import sys
from contextlib import closing

from aztask import App, Context

DATABASE = "bookings.db"

app = App("booking", broker="local://", results="local://")


def connect() -> sqlite3.Connection:
    """Open the shop's own database, which aztask does not use."""
    connection = sqlite3.connect(DATABASE, timeout=30.0)
    connection.execute(
        "CREATE TABLE IF NOT EXISTS booking (task_id TEXT PRIMARY KEY, articles INTEGER NOT NULL)"
    )
    return connection


@app.task_with_context
def book(context: Context, articles: list[str]) -> int:
    """Pick the articles one by one, then book the order."""
    picked: int = context.saved or 0  # picked by an earlier run
    while picked < len(articles):
        picked += 1
        context.checkpoint(picked)
    with closing(connect()) as connection, connection:
        connection.execute(
            "INSERT INTO booking VALUES (?, ?) ON CONFLICT (task_id) DO NOTHING",
            (context.task_id, picked),
        )
        context.lease.ensure()  # raises LeaseLost, which rolls the booking back
    return picked


def send(orders: int) -> None:
    """Send this many orders; sending them again changes nothing."""
    for number in range(orders):
        articles = [f"article {n}" for n in range(number % 4)]
        book.with_options(task_id=f"order-{number}").delay(articles)


def show() -> None:
    """Print all bookings, sorted by order."""
    with closing(connect()) as connection:
        for task_id, articles in connection.execute("SELECT * FROM booking ORDER BY task_id"):
            print(f"{task_id}: {articles} articles")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        send(int(sys.argv[1]))
    else:
        show()
