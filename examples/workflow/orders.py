"""An order as a workflow: charge, then reserve and make the labels side by side, then ship."""

from aztask import App, RetryPolicy, chain, chord
from aztask.canvas.graphs import Graph

app = App("orders", broker="local://", results="local://", retry=RetryPolicy(delay=0.2))


@app.task
def charge(order: str, cents: int) -> dict[str, object]:
    return {"order": order, "cents": cents}


@app.task
def label(paid: dict[str, object], parcel: int) -> str:
    return f"{paid['order']}/{parcel}"


@app.task
def ship(labels: list[str]) -> str:
    return f"{len(labels)} parcels: {', '.join(labels[:2])} ..."


@app.task
def alarm(failures: list[dict[str, str]]) -> None:
    print("not shipped:", failures[0]["task_id"], failures[0]["error"])


def order(name: str, cents: int, parcels: int) -> Graph:
    return chain(
        charge.s(name, cents),
        chord([label.s(number) for number in range(parcels)], ship.s()),
        on_error=alarm.s(),
    )


if __name__ == "__main__":
    graph = order("order-1", 4200, 100)
    print(graph)
    graph.delay(workflow_id="order-1")
