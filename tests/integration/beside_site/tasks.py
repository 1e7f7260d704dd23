"""What `autodiscover_tasks` finds."""

from __future__ import annotations

from celery import shared_task

from beside_site.models import Invoice


@shared_task
def pay(number: int) -> str:
    invoice = Invoice.objects.get(pk=number)
    before, invoice.status = invoice.status, "paid"
    invoice.save()
    return f"{before}, then {invoice.status}"


@shared_task
def tick() -> None:
    Invoice.objects.create(status="tick")
