"""An app whose broker and result store come from the environment."""

import time

from aztask import App

app = App("shop")


@app.task
def resize(path: str, width: int) -> str:
    """Work for a moment, so that there is something to see in Grafana."""
    time.sleep(0.2)
    return f"{path} at {width} pixels"
