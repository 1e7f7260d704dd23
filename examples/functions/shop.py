"""The app beside the functions: a handler of their JSON, a task of theirs, and one for them."""

from dataclasses import dataclass

from aztask import App

app = App("shop", results="local://")  # AZTASK_BROKER: the account or the namespace


@dataclass
class Order:
    """An order as the function `order` writes it."""

    number: int
    article: str


@app.handler(queue="orders", model=Order)
def on_order(order: Order) -> str:
    """Print what was ordered: what the model does not fit is a dead letter."""
    print(f"order {order.number}: {order.article}", flush=True)
    return order.article


@app.task(name="pictures.resize", queue="pictures")
def resize(name: str, width: int) -> str:
    """What the function `picture` sends."""
    print(f"{name} at {width}", flush=True)
    return f"{name} at {width}"


def notify(customer: str, number: int) -> None:
    """Send a task to the functions `queued` and `bussed`, which read the queue: no worker does."""
    app.send("shop.notify", [customer], {"number": number}, queue="for-functions")
