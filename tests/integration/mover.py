"""Moves the ledger app from one broker to another, as ``aztask move`` does: a process to be killed.

The emulator's administration has an address of its own, and the variable for it names one only: so
this makes the brokers itself.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from aztask import App
from aztask.address.addresses import ServiceBusAddress
from aztask.address.urls import parse_broker
from aztask.operate.move import journal, messages
from aztask.operate.move.move import move
from aztask.queues.base import Broker
from aztask.queues.servicebus.broker import ServiceBusBroker


def broker_at(address: str, admin: str) -> str | Broker:
    if not admin:
        return address
    parsed = parse_broker(address)
    assert isinstance(parsed, ServiceBusAddress)
    return ServiceBusBroker(parsed, admin=admin)


def app_at(address: str, admin: str, results: str) -> App:
    app = App("ledger", broker=broker_at(address, admin), results=results)
    app.queue("orders", sessions=True)
    return app


def main() -> int:
    messages.REMOTE_LEASE = messages.LOCAL_LEASE = 2.0  # type: ignore[misc]
    messages.BATCH = 5  # type: ignore[misc]  # so that there is a second batch to die in
    messages.REMOTE_WAIT = 1.0  # type: ignore[misc]
    journal.LEASE_SECONDS = 1.0  # type: ignore[misc]
    given = os.environ
    old = app_at(given["MOVE_OLD"], given.get("MOVE_OLD_ADMIN", ""), given["MOVE_RESULTS"])
    to, admin = given["MOVE_NEW"], given.get("MOVE_NEW_ADMIN", "")
    new = old.at(broker_at(to, admin), given.get("MOVE_NEW_RESULTS"))
    action = move(old, new)
    moved = action.act()
    Path(given["MOVE_LOG"]).write_text(
        "".join(f"{each.queue} {each.total} {dict(each.left)}\n" for each in moved.queues)
        + f"left {moved.left}\n"
    )
    new.close()
    old.close()
    return 1 if moved.left else 0


if __name__ == "__main__":
    sys.exit(main())
