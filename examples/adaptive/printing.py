"""Two queues whose leases follow how long their messages are held.

Run it as its README says. Both queues begin with leases of five minutes: too long for the stamps,
which would wait that long after a crash, and right for nobody.
"""

from __future__ import annotations

import sys
import time

from aztask import App

app = App(
    "printing",
    broker="local://",
    results="local://",
    lease_advice="auto",  # beside the queues; a blob container where workers are on many machines
    lease=300.0,
)
app.queue("stamps", adaptive=(2, 600))  # between two seconds and ten minutes
app.queue("posters", adaptive=False)  # counted and advised, and left alone


@app.task(queue="stamps")
def stamp(number: int) -> int:
    """A short job."""
    time.sleep(0.01)
    return number


@app.task(queue="posters")
def poster(number: int) -> int:
    """A longer one."""
    time.sleep(0.05)
    return number


if __name__ == "__main__":
    count = int(sys.argv[1])
    stamp.map([(number,) for number in range(count)])
    poster.map([(number,) for number in range(count)])
