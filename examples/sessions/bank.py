"""Accounts: bookings of one account run in order, those of different accounts in parallel.

Every account is a session. Its balance is the session's state, which the worker of the next booking
reads. Run with a command::

    python bank.py send    # five bookings for each of three accounts, interleaved
    python bank.py show    # the balance after each booking
"""

import sys

from aztask import App, Context, RetryPolicy

ACCOUNTS = ("alice", "bob", "carol")
AMOUNTS = (1, 2, 3, 4, 5)

app = App("bank", broker="local://", results="local://")
app.queue("accounts", sessions=True)


@app.task_with_context(queue="accounts", retry=RetryPolicy(max_retries=3, delay=0.1))
def book(context: Context, amount: int) -> int:
    """Add to the account's balance. The third booking fails at first, and keeps its place."""
    session = context.session
    assert session is not None  # the queue has sessions, so every message is in one
    if amount == 3 and context.resubmit_count == 0:
        raise ConnectionError("the ledger is unreachable")
    balance, done = session.state or (0, "")
    if done != context.task_id:  # a booking that ran but was not settled is not booked twice
        balance += amount
        session.state = (balance, context.task_id)
    return int(balance)


def send() -> None:
    """Send the first booking of each account, then the second of each, and so on."""
    for amount in AMOUNTS:
        for account in ACCOUNTS:
            name = f"{account}-{amount}"
            book.with_options(session=account, task_id=name).delay(amount)


def show() -> None:
    """Print the balance of each account after each booking."""
    for account in ACCOUNTS:
        balances = [app.result(f"{account}-{amount}").get(timeout=10) for amount in AMOUNTS]
        print(f"{account}: {', '.join(map(str, balances))}")


if __name__ == "__main__":
    {"send": send, "show": show}[sys.argv[1]]()
