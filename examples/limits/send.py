"""Sends the calls of three customers."""

from calls import fetch

calls = [(customer, page) for page in range(10) for customer in ("acme", "globex", "initech")]
for customer, page in calls:
    fetch.with_options(task_id=f"{customer}-{page}").delay(customer, page)
print(f"sent {len(calls)} calls")
