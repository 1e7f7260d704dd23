"""Calls of a partner's API: at most 10 a second, and 2 at a time for each customer."""

import time

from aztask import App

app = App("calls", broker="local://", results="local://")
app.limit("partner-api", rate="10/s")
app.limit("per-customer", concurrency=2, key=lambda customer, *_: customer)


@app.task(limits=["partner-api", "per-customer"])
def fetch(customer: str, page: int) -> float:
    """Return when the call began."""
    began = time.time()
    time.sleep(0.3)
    return began
