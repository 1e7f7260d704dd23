"""The no-op on Celery with Kombu's Service Bus transport, patched only to reach the emulator.

Kombu 5.6 can neither set UseDevelopmentEmulator=true nor use plain HTTP for an administration
port. So both clients are made from the emulator's own connection strings. Nothing else is changed.
"""

import os

from azure.servicebus import ServiceBusClient
from celery import Celery
from celery.signals import worker_ready
from kombu.transport import azureservicebus
from marks import leave, ready

from aztask.queues.servicebus.admin import administration_client

CONNECTION, ADMIN = os.environ["BENCH_BROKER"], os.environ["AZTASK_SERVICEBUS_ADMIN"]


class _Client:
    @staticmethod
    def from_connection_string(_text, **options):
        return ServiceBusClient.from_connection_string(CONNECTION, **options)


class _Administration:
    @staticmethod
    def from_connection_string(_text, **_options):
        return administration_client(ADMIN)


azureservicebus.ServiceBusClient = _Client
azureservicebus.ServiceBusAdministrationClient = _Administration

app = Celery("bench", broker="azureservicebus://policy:key@emulator")
app.conf.update(
    task_ignore_result=True,
    task_default_queue="celery-bench",
    task_acks_late=os.environ.get("BENCH_ACKS", "early") == "late",
    broker_transport_options={"wait_time_seconds": 5},
    worker_send_task_events=False,
    broker_connection_retry_on_startup=True,
)
if "BENCH_LEASE" in os.environ:
    app.conf.broker_transport_options["peek_lock_seconds"] = int(os.environ["BENCH_LEASE"])
worker_ready.connect(ready)


@app.task(name="noop")
def noop() -> None:
    """Do nothing, to measure only the overhead."""


@app.task(name="mark")
def mark(key, seconds=0.0):
    """Leave a mark in the file of marks."""
    leave(key, seconds)


def send(count: int) -> None:
    """Send so many no-ops, one by one."""
    for _ in range(count):
        noop.delay()


def marks(prefix, count, seconds):
    """Send so many tasks that leave a mark."""
    for number in range(count):
        mark.delay(f"{prefix}{number}", seconds)
