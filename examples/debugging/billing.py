"""A task to stop in: see docs/how-to/basics/debugging.md."""

from aztask import App

app = App("billing", broker="local://", results="local://")


@app.task(time_limit=30)
def bill(order: int) -> int:
    return order * 2
