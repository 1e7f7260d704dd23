"""A web service that sends each question to a worker, and streams the answer to the browser."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated
from uuid import UUID

from chat import Chat, answer, app
from fastapi import FastAPI, Header, HTTPException
from fastapi.responses import HTMLResponse, StreamingResponse

from aztask import BrokerUnavailable, ResultTimeout, TaskCancelled, TaskFailed

LONGEST = 300.0
"""Seconds after which the stream of an answer ends."""

PLACE = r"^(\w+\.\d+)?$"
"""The id of a part, as the browser sends it back."""

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""A proxy passes each word on at once, and keeps none."""


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Close the connections of the queue when the server stops. They open at the first send."""
    yield
    await asyncio.to_thread(app.close)


api = FastAPI(lifespan=lifespan)


@api.get("/", response_class=HTMLResponse)
async def home() -> str:
    """The page, whose script asks and listens."""
    return Path(__file__).with_name("page.html").read_text()


@api.post("/answers", status_code=202)
async def ask(chat: Chat) -> dict[str, str]:
    """Send a question with all that was said before. When the client has the id, it is queued."""
    try:
        result = await answer.adelay(chat)
    except BrokerUnavailable as error:
        raise HTTPException(503, "the queue is unreachable, try again") from error
    return {"id": result.id}


@api.get("/answers/{answer_id}")
async def stream(
    answer_id: UUID, last_event_id: Annotated[str, Header(pattern=PLACE)] = ""
) -> StreamingResponse:
    """The words of an answer as server-sent events, from the first one or from where it stopped.

    A browser that was disconnected comes back by itself, with the id of the last word that it has.
    """

    async def events() -> AsyncIterator[str]:
        yield "retry: 1000\n\n"  # milliseconds until a browser connects again
        words = app.result(str(answer_id)).astream(after=last_event_id, timeout=LONGEST)
        try:
            async for part in words:
                if part.reset:  # the worker died, or the task failed: it begins anew
                    yield "event: reset\ndata:\n\n"
                else:
                    yield f"id: {part.id}\ndata: {json.dumps(part.value)}\n\n"
        except (TaskFailed, TaskCancelled, ResultTimeout, BrokerUnavailable) as error:
            yield f"event: failed\ndata: {json.dumps(str(error))}\n\n"
        else:
            yield "event: end\ndata:\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers=HEADERS)
