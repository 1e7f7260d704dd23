"""The app that `soak.py` runs, with results and events as in production."""

import os

from aztask import App

app = App("soak", broker=os.environ["SOAK_BROKER"], results=os.environ["SOAK_RESULTS"])


@app.task
def noop() -> None:
    """Do nothing, to measure only the overhead."""
