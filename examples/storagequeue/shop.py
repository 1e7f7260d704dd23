"""An app on Storage queues: one queue for short tasks, one for long ones.

Start Azurite (``python -m tests.azurite`` in a checkout), then::

    export AZTASK_BROKER=UseDevelopmentStorage=true AZTASK_APP=shop:app
    aztask queues create default slow
    python shop.py
    aztask worker -Q default,slow --burst
"""

import time

from aztask import App, Context, RetryPolicy

app = App("shop", broker="UseDevelopmentStorage=true", results="local://")
app.queue("slow", lease=120.0)  # a longer lease for longer tasks: fewer renewals, fewer requests


@app.task(retry=RetryPolicy(max_retries=3, delay=2.0, retry_on=(OSError,)))
def resize(path: str, width: int) -> str:
    """A short task. Its retries wait in the queue, not in a worker's memory."""
    return f"{path} at {width}"


@app.task_with_context(queue="slow")
def report(context: Context, days: int) -> int:
    """A long task in steps. Its progress is in the message, so a redelivery continues there."""
    done = context.saved or 0
    while done < days:
        context.lease.ensure()  # stop if another worker may have the message now
        time.sleep(0.1)
        done += 1
        context.checkpoint(done)
    return done


if __name__ == "__main__":
    resize.map([(f"{number}.png", 200) for number in range(10)])
    report.delay(5)
    resize.with_options(delay=3.0).delay("later.png", 100)
    print("12 tasks sent; start a worker")
