"""An order as a workflow: charge, reserve, ship, 100 thumbnails side by side, a summary."""

from aztask import App, Context, RetryPolicy, chain, chord
from aztask.workflows.graphs import Graph

app = App("orders", broker="local://", results="local://", retry=RetryPolicy(delay=0.2))

Order = dict[str, str | int]


@app.task_with_context
def charge(context: Context, name: str, cents: int) -> Order:
    # A kill may run this twice. A payment service charges one key once, so give it the task's id.
    return {"name": name, "cents": cents, "payment": context.task_id}


@app.task
def reserve(order: Order) -> Order:
    return {**order, "shelf": "7b"}


@app.task
def ship(order: Order) -> Order:
    return {**order, "parcel": f"parcel of {order['name']}"}


@app.task
def thumbnail(order: Order, number: int) -> str:
    return f"{order['name']}/{number}.png"


@app.task
def summary(images: list[str]) -> str:
    return f"shipped, {len(images)} images: {', '.join(images[:2])} ..."


@app.task
def alarm(failures: list[dict[str, str]]) -> None:
    print("not shipped:", failures[0]["task_id"], failures[0]["error"])


def order(name: str, cents: int, images: int) -> Graph:
    return chain(
        charge.s(name, cents),
        reserve.s(),
        ship.s(),
        chord([thumbnail.s(number) for number in range(images)], summary.s()),
        on_error=alarm.s(),
    )


if __name__ == "__main__":
    graph = order("order-1", 4200, 100)
    print(graph)
    graph.delay(workflow_id="order-1")
