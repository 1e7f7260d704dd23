"""Orders, of which each fifth fails and each seventh is late at its first try."""

from aztask import App, Context, Reject, RetryPolicy

app = App(
    "shop",
    broker="local://",
    results="local://",
    retry=RetryPolicy(max_retries=3, delay=0.05, jitter=False),
)


@app.task_with_context
def order(context: Context, number: int) -> int:
    if number % 5 == 4:
        raise Reject("sold out")
    if number % 7 == 6 and context.resubmit_count == 0:
        raise TimeoutError("the bank did not answer")
    return number


if __name__ == "__main__":
    order.map([(number,) for number in range(100)])
    app.close()
