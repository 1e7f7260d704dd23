"""An order over 100 euros waits for a person: it is shipped, or refunded if they say no."""

from __future__ import annotations

import sys
from datetime import timedelta

from aztask import App, Context, WaitTimeout

app = App("orders", broker="local://", results="local://")
PATIENCE = timedelta(days=3)


def charge(context: Context, order: str, euros: int) -> str:
    """Charge the card; the service knows the key, should this step run twice."""
    print(f"{order}: charged {euros} euros, key {context.step_key}", flush=True)
    return f"charge-{order}"


def ask(context: Context, order: str) -> None:
    """Tell the person whom to approve. A real one would get an e-mail with a link."""
    print(f"{order}: please approve task {context.task_id}", flush=True)


def refund(charge_id: str) -> str:
    """Give the money back, as a service does for its key."""
    print(f"refunded {charge_id}", flush=True)
    return f"refunded {charge_id}"


@app.task
def ship(order: str) -> str:
    """Ship a parcel: a task of its own, with retries of its own."""
    print(f"{order}: shipped", flush=True)
    return f"parcel for {order}"


@app.task_with_context
def order(context: Context, name: str, euros: int, patience: float | None = None) -> str:
    """Charge, wait for a person, then ship or refund."""
    charge_id = context.step("charge", charge, context, name, euros)
    if euros > 100:
        context.step("ask", ask, context, name)
        try:
            answer = context.wait_for("approved", timeout=patience or PATIENCE)
        except WaitTimeout:
            return context.step("refund", refund, charge_id)
        if not answer["yes"]:
            return context.step("refund", refund, charge_id)
    parcel: str = context.call(ship, name)
    return parcel


if __name__ == "__main__":
    name, euros, *patience = sys.argv[1:]
    sent = order.with_options(task_id=name).delay(name, int(euros), *map(float, patience))
    print(f"sent {sent.id}")
