"""The two tasks on dramatiq with dramatiq-azure."""

import dramatiq
from dramatiq_azure import ASQBroker
from marks import leave

broker = ASQBroker()
dramatiq.set_broker(broker)


@dramatiq.actor(queue_name="dramatiq-bench")
def noop() -> None:
    """Do nothing, to measure only the overhead."""


@dramatiq.actor(queue_name="dramatiq-bench")
def mark(key: str, seconds: float = 0.0) -> None:
    """Leave a mark in the file of marks."""
    leave(key, seconds)


def send(count: int) -> None:
    """Send so many no-ops, one by one."""
    for _ in range(count):
        noop.send()


def marks(prefix: str, count: int, seconds: float) -> None:
    """Send so many tasks that leave a mark."""
    for number in range(count):
        mark.send(f"{prefix}{number}", seconds)
