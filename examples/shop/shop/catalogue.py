"""The import of a long list of articles: it shows its progress, and goes on where it stopped."""

import csv
import os
import sqlite3
from contextlib import closing
from pathlib import Path

from aztask import Context
from shop.app import app

LIST = Path("articles.csv")
DATABASE = Path("articles.db")
STEP = 100


def write_list(count: int) -> None:
    """Write a list of articles, as a supplier would send it."""
    with LIST.open("w", newline="") as file:
        csv.writer(file).writerows((number, f"article {number}") for number in range(count))


def store(rows: list[list[str]]) -> None:
    """Store articles in one transaction. A row that is stored already stays as it is."""
    with closing(sqlite3.connect(DATABASE)) as database, database:
        database.execute("CREATE TABLE IF NOT EXISTS articles (id INTEGER PRIMARY KEY, name TEXT)")
        database.executemany("INSERT OR REPLACE INTO articles VALUES (?, ?)", rows)


@app.task_with_context
def load(context: Context, breaks_at: int | None = None) -> dict[str, int]:
    """Store all articles in steps. breaks_at: in the first run, the process dies at this row."""
    with LIST.open(newline="") as file:
        rows = list(csv.reader(file))
    began = context.saved["row"] if context.saved else 0
    for row in range(began, len(rows), STEP):
        if row == breaks_at and began == 0:
            os._exit(1)  # as if the machine had lost its power
        context.lease.ensure()  # another worker may have the message if this one was too slow
        store(rows[row : row + STEP])
        context.checkpoint({"row": row + STEP, "of": len(rows)})
    return {"rows": len(rows), "began_at": began}
