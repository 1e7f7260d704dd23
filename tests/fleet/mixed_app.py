"""Unique and debounced tasks, written so that two releases of aztask run them."""

from __future__ import annotations

import os

import aztask
from aztask import App

if not (aztask.__file__ or "").startswith(os.environ["FLEET_PACKAGE"]):
    raise ImportError(f"{aztask.__file__} is not the release that this process was meant to use")

app = App("mixed", broker=os.environ["MIXED_BROKER"], results=os.environ["MIXED_RESULTS"])


def note(*words: object) -> None:
    """Append one line to the file of what ran."""
    with open(os.environ["MIXED_NOTES"], "a") as file:  # noqa: PTH123  # the worker's folder
        file.write(" ".join(map(str, words)) + "\n")


@app.task(name="mixed.single", unique="arguments")
def single(key: str) -> None:
    note("single", key)


@app.task(name="mixed.settled", unique=lambda key, n: key, debounce=1.0)
def settled(key: str, n: int) -> None:
    note("settled", key, n)
