"""A web service that starts reports and shows their progress: polling and server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

from fastapi import BackgroundTasks, Depends, FastAPI, HTTPException
from fastapi.responses import HTMLResponse, StreamingResponse
from reports import NewReport, app, count_visit, report

from aztask import App, BrokerUnavailable, TaskCancelled, TaskFailed

PAUSE = 0.2
"""Seconds between two looks at the result store."""


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Close the connections of the queue when the server stops. They open at the first send."""
    yield
    await asyncio.to_thread(app.close)


def queue() -> App:
    """The app, as a dependency: tests replace it with ``api.dependency_overrides``."""
    return app


Queue = Annotated[App, Depends(queue)]
api = FastAPI(lifespan=lifespan)


@api.get("/", response_class=HTMLResponse)
async def home(background: BackgroundTasks) -> str:
    """The page. The visit is counted after the answer was sent: a crash then loses it."""
    background.add_task(count_visit.adelay, "/")
    return Path(__file__).with_name("page.html").read_text()


@api.post("/reports", status_code=202)
async def start(new: NewReport) -> dict[str, str]:
    """Start a report. When the client has the answer, the queue has the tasks."""
    try:
        started = await report(new).adelay()
    except BrokerUnavailable as error:
        raise HTTPException(503, "the queue is unreachable, try again") from error
    return {"id": started.id}


@api.get("/reports/{report_id}")
async def state(report_id: UUID, queue: Queue) -> dict[str, Any]:
    """The state of a report, for clients that poll."""
    found = await asyncio.to_thread(look, queue, str(report_id))
    if found["state"] == "pending":
        raise HTTPException(404, "there is no such report")
    return found


@api.get("/reports/{report_id}/events")
async def events(report_id: UUID, queue: Queue) -> StreamingResponse:
    """The state of a report, as server-sent events until it has ended."""

    async def changes() -> AsyncIterator[str]:
        last: dict[str, Any] = {}
        while last.get("state") not in ("pending", "succeeded", "failed", "cancelled"):
            found = await asyncio.to_thread(look, queue, str(report_id))
            if found != last:
                yield f"data: {json.dumps(found)}\n\n"
            last = found
            await asyncio.sleep(PAUSE)

    return StreamingResponse(changes(), media_type="text/event-stream")


def look(queue: App, report_id: str) -> dict[str, Any]:
    """State, progress and outcome of a report, from the result store."""
    result = queue.workflows.result(report_id)
    state, progress, text = result.state, result.progress, ""
    if state in ("succeeded", "failed", "cancelled"):
        try:
            text = result.get(timeout=0)
        except (TaskFailed, TaskCancelled) as error:
            text = str(error)
    return {"state": state, "done": progress.done, "total": progress.total, "text": text}
