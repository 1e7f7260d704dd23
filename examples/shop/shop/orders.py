"""Orders: those of one customer in order, those of different customers side by side.

Service Bus and ``local://`` have sessions: each order is a task, and each customer is a session.
Storage queues have none. There, one task books a list of orders of one customer in turn. That keeps
the order within the list, but not between two lists of the same customer.
"""

from pathlib import Path

from aztask import Context
from shop.app import SESSIONS, app

BOOKS = Path("books")


def write(customer: str, order: str) -> None:
    """Write an order into the customer's book, once: a task may run twice."""
    BOOKS.mkdir(exist_ok=True)
    book = BOOKS / f"{customer}.txt"
    if not (book.exists() and order in book.read_text().splitlines()):
        with book.open("a") as file:
            file.write(f"{order}\n")


def fail_at_first(order: str, attempt: int) -> None:
    """The second order of each customer fails at first, and the third must wait for it."""
    if order.endswith("-2") and attempt == 0:
        raise ConnectionError("the ledger is unreachable")


@app.task_with_context(queue="orders")
def book(context: Context, customer: str, order: str) -> None:
    """Book one order. The session keeps its place in the customer's line, also when it fails."""
    fail_at_first(order, context.resubmit_count)
    write(customer, order)


@app.task_with_context(queue="orders")
def book_all(context: Context, customer: str, orders: list[str]) -> None:
    """Book several orders in turn. A retry goes on with the order that failed."""
    for number in range(context.saved or 0, len(orders)):
        fail_at_first(orders[number], context.resubmit_count)
        write(customer, orders[number])
        context.checkpoint(number + 1)


def place(customer: str, orders: list[str]) -> list[str]:
    """Send orders of a customer; returns the ids of the tasks. Sending them again sends nothing."""
    if SESSIONS:
        return [
            book.with_options(task_id=f"order:{order}", session=customer).delay(customer, order).id
            for order in orders
        ]
    return [
        book_all.with_options(task_id=f"orders:{orders[0]}:{len(orders)}")
        .delay(customer, orders)
        .id
    ]
