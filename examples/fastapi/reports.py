"""The tasks of the example: the pages of a report side by side, then the report."""

import asyncio
import os

from aztask import App, RetryPolicy, chord
from aztask.workflows.graphs import Graph

app = App(
    "reports",
    broker=os.environ.get("AZTASK_BROKER", "local://"),
    results=os.environ.get("AZTASK_RESULTS", "local://"),
    retry=RetryPolicy(max_retries=1, delay=0.1),
)


@app.task
async def page(title: str, number: int) -> str:
    """Write one page. A report without a title fails."""
    await asyncio.sleep(0.2)  # a slow service
    if not title:
        raise ValueError("a report needs a title")
    return f"{title}, page {number}"


@app.task
async def bind(pages: list[str]) -> str:
    """Bind the pages, in order, once all are written."""
    return f"{len(pages)} pages, from {pages[0]!r} to {pages[-1]!r}"


@app.task
async def count_visit(path: str) -> str:
    """Count a visit; nothing waits for it."""
    return path


def report(title: str, pages: int) -> Graph:
    """All pages, then the binding."""
    return chord([page.s(title, number) for number in range(1, pages + 1)], bind.s())
