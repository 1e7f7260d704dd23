"""Two schedules: a tick each second, and a report that catches up after an outage."""

from datetime import UTC, datetime

from aztask import App, Context

app = App("clock", broker="local://", results="local://")


@app.task_with_context
def tick(context: Context) -> str:
    when = context.scheduled_at or datetime.now(UTC)
    print(f"tick of {when:%H:%M:%S}", flush=True)
    return f"{when:%H:%M:%S}"


@app.task_with_context
def report(context: Context, region: str) -> str:
    when = context.scheduled_at or datetime.now(UTC)
    return f"{region}: {when:%Y-%m-%d}"


app.schedule("tick", tick.s(), every=1, missed="skip", grace=5)
app.schedule("report", report.s("eu"), cron="0 2 * * *", tz="Europe/Berlin", missed="all")
