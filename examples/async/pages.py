"""`async def` tasks that share one HTTP client: 200 slow calls at the same time in one process.

``python pages.py`` sends the tasks, and ``python pages.py show`` shows what they found.
"""

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import httpx

from aztask import App

PAGES = 200

app = App("pages", broker="local://", results="local://")
shared = SimpleNamespace()


@app.lifespan
async def http() -> AsyncIterator[None]:
    """Open the client before the first task of a process, and close it after the last."""
    limits = httpx.Limits(max_connections=PAGES, max_keepalive_connections=20)
    address = Path("address").read_text()
    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=30) as shared.http:
        yield


@app.task
async def fetch(number: int) -> str:
    """Fetch one page. An HTTP error fails the task, and it is retried."""
    response = await shared.http.get(f"/page-{number}")
    response.raise_for_status()
    return str(response.text)


if __name__ == "__main__":
    if "show" in sys.argv:
        found = [app.result(f"page-{number}").get(timeout=30) for number in range(PAGES)]
        print(f"{len(found)} pages, from {found[0]} to {found[-1]}")
    else:
        for number in range(PAGES):
            fetch.with_options(task_id=f"page-{number}").delay(number)
