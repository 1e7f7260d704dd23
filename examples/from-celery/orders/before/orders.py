"""An order as a canvas: a chain, a chord, and a callback for errors."""

import os
import sys

from celery import Celery, chain, chord, group

from aztask.celery import transport

transport.register()
app = Celery("orders", broker="aztask://", backend=os.environ.get("RESULTS", "file://./results"))
app.conf.broker_transport_options = {"broker": os.environ.get("QUEUES", "local://"), "lease": 30}
app.conf.result_chord_retry_interval = 0.2
app.conf.result_extended = True


@app.task
def charge(order, amount):
    """Take the money for one order."""
    if amount < 0:
        raise ValueError(f"order {order}: the amount is negative")
    return f"{order} paid"


@app.task
def label(paid, parcel):
    """Print the label of one parcel."""
    return f"{paid}/{parcel}"


@app.task
def ship(labels):
    """Ship all parcels of one order."""
    return f"{len(labels)} parcels: {', '.join(labels)}"


@app.task
def refuse(request, exc, traceback):
    """Called with the failed request."""
    print(f"refused: {exc}", flush=True)


if __name__ == "__main__":
    parcels = [label.s(number) for number in range(3)]
    good = chain(charge.s("order-1", 10), chord(parcels, ship.s())).apply_async()
    charge.apply_async(("order-2", -1), link_error=refuse.s())
    both = group(charge.si("order-3", 5), charge.si("order-4", 5)).apply_async()
    if "--wait" in sys.argv:
        print(good.get(timeout=60), both.get(timeout=60), flush=True)
