"""The task that packs an order."""

try:
    from django.tasks import TaskContext, task
except ImportError:  # Django 5.2
    from django_tasks import TaskContext, task

from orders.models import Order


@task(takes_context=True)
def pack(context: TaskContext, number: int) -> str:
    """Pack an order and return its label. Anvils are too heavy."""
    order = Order.objects.get(pk=number)
    if order.article == "anvil":
        raise ValueError("an anvil does not fit into a parcel")
    Order.objects.filter(pk=number).update(packed=True)
    return f"parcel {number}: {order}, attempt {context.attempt}"
