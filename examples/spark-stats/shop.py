"""Tasks of different lengths, some of which fail, so that the statistics have something to show."""

import random
import time

from aztask import App, Context, Reject, RetryPolicy

app = App(
    "shop",
    broker="local://",
    results="local://",
    retry=RetryPolicy(max_retries=3, delay=0.05, jitter=False),
)


@app.task
def resize(picture: int) -> int:
    time.sleep(random.lognormvariate(-5.0, 0.8))
    return picture


@app.task_with_context
def fetch(context: Context, page: int) -> int:
    time.sleep(0.003)
    if page % 9 == 0 and context.resubmit_count == 0:
        raise ConnectionError("the page did not answer")
    return page


@app.task(queue="reports")
def report(day: int) -> int:
    time.sleep(0.05)
    if day % 10 == 7:
        raise Reject("there are no figures for this day")
    return day


if __name__ == "__main__":
    resize.map([(number,) for number in range(300)])
    fetch.map([(number,) for number in range(200)])
    report.map([(number,) for number in range(30)])
    app.close()
