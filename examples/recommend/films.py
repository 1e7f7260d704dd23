"""Runs that take longer than their lease, with renewals switched off: each is stopped and comes
again, three times, until its message is a dead letter. The events tell how long a lease it needs.
"""

import time

from aztask import App

app = App(
    "films",
    broker="local://",
    results="local://",
    events="events",
    lease=1,
    renew_at=1,
    max_deliveries=3,
)


@app.task
def render(film: str) -> str:
    time.sleep(1.5)
    return f"{film} is rendered"


if __name__ == "__main__":
    render.map([(film,) for film in ("Alien", "Brazil", "Casablanca", "Dracula")])
