"""The tasks of the example: the pages of a report side by side, then the report.

They take and return pydantic models, as the web service does.
"""

import asyncio
import os

from pydantic import BaseModel, Field

from aztask import App, RetryPolicy, chord
from aztask.workflows.graphs import Graph

app = App(
    "reports",
    broker=os.environ.get("AZTASK_BROKER", "local://"),
    results=os.environ.get("AZTASK_RESULTS", "local://"),
    retry=RetryPolicy(max_retries=1, delay=0.1),
)


class NewReport(BaseModel):
    """What a client sends to start a report, and what its tasks get."""

    title: str = Field(max_length=100)
    pages: int = Field(ge=1, le=100)


class Page(BaseModel):
    """A page that is written."""

    number: int
    text: str


@app.task
async def page(new: NewReport, number: int) -> Page:
    """Write one page. A report without a title fails."""
    await asyncio.sleep(0.2)  # a slow service
    if not new.title:
        raise ValueError("a report needs a title")
    return Page(number=number, text=f"{new.title}, page {number}")


@app.task
async def bind(pages: list[Page]) -> str:
    """Bind the pages, in order, once all are written."""
    return f"{len(pages)} pages, from {pages[0].text!r} to {pages[-1].text!r}"


@app.task
async def count_visit(path: str) -> str:
    """Count a visit; nothing waits for it."""
    return path


def report(new: NewReport) -> Graph:
    """All pages, then the binding."""
    return chord([page.s(new, number) for number in range(1, new.pages + 1)], bind.s())
