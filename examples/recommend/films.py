"""Runs that take longer than their lease, with renewals switched off.

Each run is stopped when its lease expires. After three deliveries the message is dead-lettered. The
events show how long a lease the task needs.
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
