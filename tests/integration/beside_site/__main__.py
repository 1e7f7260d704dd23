"""Prints what a Django application sees; the argument is the name of a fact below."""

from __future__ import annotations

import subprocess
import sys
import time

import django

from beside_site.celery import app

django.setup()

from django.core.management import call_command  # noqa: E402
from django.db import transaction  # noqa: E402
from django_celery_beat.models import IntervalSchedule, PeriodicTask  # noqa: E402

from beside_site.models import Invoice  # noqa: E402  # models need the settings
from beside_site.tasks import pay  # noqa: E402

SECONDS = 60.0


def migrate() -> str:
    """Make the site's tables."""
    call_command("migrate", run_syncdb=True, verbosity=0)
    return "done"


def runs() -> str:
    invoice = Invoice.objects.create(status="open")
    told = pay.delay(invoice.pk).get(timeout=SECONDS)
    return f"the task sees {told}; the row is {Invoice.objects.get(pk=invoice.pk).status}"


def status_of(invoice: Invoice, wanted: str, seconds: float) -> str:
    ends = time.monotonic() + seconds
    while (found := Invoice.objects.get(pk=invoice.pk).status) != wanted:
        if time.monotonic() > ends:
            break
        time.sleep(0.2)
    return str(found)


def commit() -> str:
    """An invoice that a rolled back transaction would have paid, and one that is committed."""
    lost = Invoice.objects.create(status="open")
    try:
        with transaction.atomic():
            pay.delay_on_commit(lost.pk)
            raise ValueError
    except ValueError:
        pass
    with transaction.atomic():
        kept = Invoice.objects.create(status="new")
        pay.delay_on_commit(kept.pk)
    ran = status_of(kept, "paid", SECONDS) == "paid"
    dropped = status_of(lost, "paid", 3.0) == "open"
    return (
        f"{'runs' if ran else 'lost'} after a commit, {'not ' if dropped else ''}after a rollback"
    )


def ticks() -> int:
    return Invoice.objects.filter(status="tick").count()


def beat() -> str:
    """A row of django_celery_beat is sent while beat runs, and not once it is disabled."""
    every, _ = IntervalSchedule.objects.get_or_create(every=1, period="seconds")
    row = PeriodicTask.objects.create(name="tick", task="beside_site.tasks.tick", interval=every)
    command = [sys.executable, "-m", "celery", "-A", "beside_site.celery", "beat", "--pidfile="]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=sys.stderr)
    try:
        ends = time.monotonic() + SECONDS
        while ticks() < 3 and time.monotonic() < ends:
            time.sleep(0.2)
        sent = ticks() >= 3
        row.enabled = False
        row.save()
        time.sleep(8)  # beat looks for changes, and a queue may be polled
        before = ticks()
        time.sleep(5)
        stopped = ticks() == before
    finally:
        process.terminate()
        process.wait(20)
    return (
        f"{'sent' if sent else 'not sent'}, {'until' if stopped else 'also after'} it is disabled"
    )


if __name__ == "__main__":
    app.set_current()
    print({"migrate": migrate, "runs": runs, "commit": commit, "beat": beat}[sys.argv[1]]())
