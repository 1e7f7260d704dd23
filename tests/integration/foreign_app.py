"""A handler of messages that other programs send, beside the tasks of `ledger_app`."""

from __future__ import annotations

from dataclasses import dataclass, field

from ledger_app import QUICK, app, note

from aztask import current_context


@dataclass
class Order:
    """An order as a .NET program writes it."""

    number: int = field(metadata={"name": "OrderNumber"})
    failures: int = field(default=0, metadata={"name": "Failures"})


@app.handler(queue="default", model=Order, retry=QUICK)
def on_order(order: Order) -> str:
    context = current_context()
    assert context is not None
    note("handled", str(order.number))
    if context.resubmit_count < order.failures:
        raise ValueError(f"failure {context.resubmit_count}")
    note("done", str(order.number))
    return str(order.number)
