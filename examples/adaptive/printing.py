"""Two queues whose leases follow how long their messages are held.

Run it as its README says. Both queues start with leases of five minutes. That is too long: after a
crash, a stamp would wait for five minutes before another worker gets it.
"""

from __future__ import annotations

import sys
import time

from aztask import App

app = App(
    "printing",
    broker="local://",
    results="local://",
    lease_advice="auto",  # beside the queues; a blob container serves several machines
    lease=300.0,
)
app.queue("stamps", adaptive=(2, 600))  # between two seconds and ten minutes
app.queue("posters", adaptive=False)  # measured, with advice, but not changed


@app.task(queue="stamps")
def stamp(number: int) -> int:
    """Print a stamp, which takes 10 ms."""
    time.sleep(0.01)
    return number


@app.task(queue="posters")
def poster(number: int) -> int:
    """Print a poster, which takes 50 ms."""
    time.sleep(0.05)
    return number


if __name__ == "__main__":
    count = int(sys.argv[1])
    stamp.map([(number,) for number in range(count)])
    poster.map([(number,) for number in range(count)])
