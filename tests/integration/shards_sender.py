"""Sends one task after another, and notes each that is confirmed, until there is a file ``stop``.

Started again after a kill, it goes on behind what it noted: it sends the next task again, under the
same id.

    python shards_sender.py NAME
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from ledger_app import note
from shards_app import app, step, work

from aztask.errors import BrokerError

SESSIONS = 3


def confirmed(name: str) -> dict[str, int]:
    """How many of each stream of this sender are confirmed."""
    found: dict[str, int] = {}
    ledger = Path(os.environ["LEDGER"])
    for line in ledger.read_text().splitlines() if ledger.exists() else ():
        event, key, *_ = line.split(" ")
        stream, _, number = key.rpartition(":")
        if event == "sent" and stream.startswith(f"{name}-"):
            found[stream] = int(number) + 1
    return found


def send(stream: str, number: int) -> None:
    """Send the task of this number, until that is confirmed."""
    key = f"{stream}:{number}"
    while True:
        try:
            if stream.endswith("-free"):
                work.with_options(task_id=key).delay(key)
            else:
                given = {"queue": "ordered", "session": stream, "task_id": key}
                step.with_options(**given).delay(stream, number)
        except BrokerError as error:
            print(f"{key}: {error}", flush=True)
            time.sleep(0.1)
        else:
            note("sent", key)
            return


def main(name: str) -> None:
    streams = [f"{name}-free"]
    if os.environ.get("SHARDS_SESSIONS"):
        streams += [f"{name}-s{number}" for number in range(SESSIONS)]
    counts = confirmed(name)
    while not Path("stop").exists():
        for stream in streams:
            send(stream, counts.get(stream, 0))
            counts[stream] = counts.get(stream, 0) + 1
        time.sleep(0.03)
    app.close()


if __name__ == "__main__":
    main(sys.argv[1])
