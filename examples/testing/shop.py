"""A shop whose tasks are tested in `test_shop.py`."""

from aztask import App, Context, Reject, RetryPolicy

app = App("shop", broker="local://", results="local://", retry=RetryPolicy(max_retries=3, delay=30))
stock = {"tea": 2}


@app.task_with_context
def order(context: Context, article: str) -> str:
    """Take one article from the stock, and send the bill."""
    if article not in stock:
        raise Reject("no such article")
    if stock[article] == 0:
        raise RuntimeError("sold out, try again later")
    stock[article] -= 1
    bill.delay(context.task_id, article)
    remind.with_options(delay=14 * 86_400).delay(context.task_id)
    return "ordered"


@app.task
def bill(order_id: str, article: str) -> str:
    """Write the bill of an order."""
    return f"{order_id}: 1 x {article}"


@app.task
def remind(order_id: str) -> str:
    """Remind the customer after two weeks."""
    return f"please pay {order_id}"
