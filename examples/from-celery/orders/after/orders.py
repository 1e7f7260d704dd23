"""The same order with aztask: the graph lives in the result store, and no chord is polled."""

import sys

from aztask import App, RetryPolicy, chain, chord, group

app = App("orders", broker="local://", results="local://", retry=RetryPolicy(max_retries=0))


@app.task
def charge(order: str, amount: int) -> str:
    """Take the money for one order."""
    if amount < 0:
        raise ValueError(f"order {order}: the amount is negative")
    return f"{order} paid"


@app.task
def label(paid: str, parcel: int) -> str:
    """Print the label of one parcel."""
    return f"{paid}/{parcel}"


@app.task
def ship(labels: list[str]) -> str:
    """Ship all parcels of one order."""
    return f"{len(labels)} parcels: {', '.join(labels)}"


@app.task
def refuse(failures: list[dict[str, str]]) -> None:
    """Called with the list of failures."""
    print(f"refused: {failures[0]['error']}", flush=True)


if __name__ == "__main__":
    parcels = [label.s(number) for number in range(3)]
    good = chain(charge.s("order-1", 10), chord(parcels, ship.s())).delay()
    chain(charge.s("order-2", -1), on_error=refuse.s()).delay()
    both = group(charge.si("order-3", 5), charge.si("order-4", 5)).delay()
    if "--wait" in sys.argv:
        print(good.get(timeout=60), both.get(timeout=60), flush=True)
