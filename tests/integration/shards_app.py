"""The app of the tests of shards: every queue has four, six while two of them are emptied."""

from __future__ import annotations

import json
import os

from ledger_app import QUICK, note

from aztask import App, Context, Retry
from aztask.stores import shardlayouts

if os.environ.get("SHARDS_REFRESH"):  # moves take a time that tests have
    shardlayouts.REFRESH_SECONDS = float(os.environ["SHARDS_REFRESH"])
    shardlayouts.FREE_SECONDS = 2 * shardlayouts.REFRESH_SECONDS
options = json.loads(os.environ.get("SHARDS", '{"shards": 4}'))
app = App(
    "shards",
    broker=os.environ.get("LEDGER_BROKER", "local://"),
    results=os.environ.get("LEDGER_RESULTS", "local://"),
    retry=QUICK,
    lease=float(os.environ.get("SHARDS_LEASE", "5")),
    signing_keys=["a signing key with enough characters"],
)
app.queue("default", **options)
if os.environ.get("SHARDS_SESSIONS"):
    app.queue("ordered", sessions=True, **options)


@app.task
def work(key: str) -> str:
    note("start", key)
    note("end", key)
    return key


@app.task_with_context
def again(context: Context, key: str) -> str:
    """Succeeds when it is sent again."""
    note("start", key)
    if context.resubmit_count == 0:
        raise Retry(delay=0.1)
    note("end", key)
    return key


@app.task
def step(session: str, number: int) -> int:
    note("step", f"{session}:{number}")
    return number
