"""Reports at fixed times, with a class that all tasks share."""

from celery import Celery, Task
from celery.schedules import crontab


class Announced(Task):
    """A task that prints how each run ended."""

    def on_success(self, retval, task_id, args, kwargs):
        """Print the value that the task returned."""
        print(f"{self.name} succeeded: {retval}", flush=True)

    def on_failure(self, exc, task_id, args, kwargs, einfo):
        """Print the error that the task raised."""
        print(f"{self.name} failed: {exc}", flush=True)


app = Celery("reports", task_cls=Announced)
app.config_from_object("celeryconfig")
app.conf.beat_schedule = {
    "refresh": {"task": "reports.refresh", "schedule": 1.0, "args": ("totals",)},
    "nightly": {"task": "reports.write", "schedule": crontab(hour=2, minute=0)},
}


@app.task(rate_limit="100/s")
def refresh(what):
    """Refresh one table, every second."""
    return f"{what} refreshed"


@app.task(expires=3600)
def write(day="today", broken=False):
    """Write the report of one day."""
    if broken:
        raise ValueError(f"no data for {day}")
    return f"report of {day}"


if __name__ == "__main__":
    app.send_task("reports.write", ("monday",))
    write.apply_async(("tuesday",), {"broken": True}, queue="reports")
