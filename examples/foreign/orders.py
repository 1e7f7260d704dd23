"""A handler for orders that a program without aztask writes as plain JSON."""

from dataclasses import dataclass, field

from aztask import App, RetryPolicy

app = App(
    "orders", broker="local://", results="local://", retry=RetryPolicy(max_retries=2, delay=1)
)


@dataclass
class Order:
    """An order as the web shop writes it."""

    number: int = field(metadata={"name": "OrderNumber"})
    article: str = field(metadata={"name": "Article"})


@app.handler(queue="orders", model=Order)
def on_order(order: Order) -> None:
    """Print the order that the web shop has written."""
    print(f"order {order.number}: {order.article}", flush=True)
