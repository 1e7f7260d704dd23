"""Unique tasks. Every run leaves lines in the ledger of `ledger_app`."""

from __future__ import annotations

import time

from ledger_app import app, gather, kinds, note, work

from aztask import RetryPolicy, chain, chord, group
from aztask.uniqueness import engine
from aztask.worker.pipeline import uniquekeys
from aztask.workflows.graphs import Graph

engine.UNSENT_SECONDS = 1.0
uniquekeys.LONGEST_WAIT = 1.0

NEVER = RetryPolicy(max_retries=0)
LARGE = 3_000


@app.task(unique="arguments", retry=NEVER)
def single(key: str, seconds: float = 0.0) -> str:
    note("start", key)
    time.sleep(seconds)
    note("end", key)
    return key


@app.task(unique="arguments", retry=NEVER)
def large(key: str) -> str:
    """Its result is stored apart."""
    note("end", key)
    return key * LARGE


@app.task(unique=lambda key, n: key, debounce=1.0, retry=NEVER)
def settled(key: str, n: int) -> int:
    note("start", f"{key}-{n}")
    return n


@app.task(unique="arguments", retry=NEVER)
def doomed(key: str) -> str:
    note("start", key)
    raise ValueError(f"{key} fails")


@app.task(unique="arguments", on_conflict="drop", retry=NEVER)
def dropped(key: str) -> str:
    note("start", key)
    return key


@app.task(unique="arguments", on_conflict="raise", retry=NEVER)
def raised(key: str) -> str:
    note("start", key)
    return key


@app.task(unique="arguments", on_conflict="replace", retry=NEVER)
def replaced(key: str) -> str:
    note("start", key)
    return key


def adopting() -> Graph:
    """A group whose only member has the same call as a task that was sent before."""
    return group(large.s("k"))


LONG = 3600.0
"""Seconds that a holder waits which is to keep its key."""


def hold_keys() -> None:
    """Send the tasks with which the members of `conflicts` conflict."""
    single.with_options(delay=2.0).delay("a")
    single.with_options(delay=2.0).delay("b")
    for task in (dropped, raised, replaced):
        task.with_options(delay=LONG).delay("c")


def conflicts() -> Graph:
    """A chord with a conflict of each kind, and one of a task that follows another."""
    header = [
        single.s("a"),
        chain(work.s("b"), single.s()),
        dropped.s("c"),
        raised.s("c"),
        replaced.s("c"),
        single.s("free"),
    ]
    return chain(chord(header, kinds.s(), return_errors=True), gather.s("body"))


VALUES = ["a", "b", "TaskCancelled", "TaskFailed", "c", "free"]
"""What the body of `conflicts` gets."""
