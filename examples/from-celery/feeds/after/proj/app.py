"""The app. Queues and time limits stand at the tasks; late acknowledgement is always on."""

from collections.abc import Iterator

from aztask import App, Context

app = App("proj", broker="local://", results="local://", include=["proj.tasks"])


@app.around_run
def log_runs(context: Context) -> Iterator[None]:
    """Print a line before and after each task: one hook in the place of two signals."""
    print(f"before {context.task}", flush=True)
    state = "FAILURE"
    try:
        yield
        state = "SUCCESS"
    finally:
        print(f"after {context.task}: {state}", flush=True)
