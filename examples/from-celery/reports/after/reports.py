"""The same reports with aztask. `crontab` beside this file has the times."""

from collections.abc import Iterator

from aztask import App, Context, RetryPolicy

app = App(
    "reports",
    broker="local://",
    results="local://",
    default_queue="reports",
    serializer="json",
    retry=RetryPolicy(max_retries=0),
)


@app.around_run
def announce(context: Context) -> Iterator[None]:
    """Print each failure: a hook in the place of a class that all tasks share."""
    try:
        yield
    except Exception as error:
        print(f"{context.task} failed: {error}", flush=True)
        raise


@app.task(soft_time_limit=50, time_limit=60)
def refresh(what: str) -> str:
    """Refresh one table, every minute."""
    print(f"reports.refresh succeeded: {what} refreshed", flush=True)
    return f"{what} refreshed"


@app.task(soft_time_limit=50, time_limit=60, expires=3600)
def write(day: str = "today", broken: bool = False) -> str:
    """Write the report of one day."""
    if broken:
        raise ValueError(f"no data for {day}")
    print(f"reports.write succeeded: report of {day}", flush=True)
    return f"report of {day}"


if __name__ == "__main__":
    app.send("reports.write", ["monday"])
    write.delay("tuesday", broken=True)
