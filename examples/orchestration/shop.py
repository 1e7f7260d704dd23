"""One task, in a module that Spark's executors and the workers import."""

from aztask import App, RetryPolicy

app = App("shop", broker="local://", results="local://")


@app.task(retry=RetryPolicy(max_retries=2, delay=1))
def thumbnail(path: str, width: int) -> str:
    """Make a thumbnail of an image."""
    return f"{path} at {width}"
