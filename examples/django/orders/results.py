"""What a page and the admin show of the task of an order."""

from typing import Any

from orders.models import Order
from orders.tasks import pack

try:
    from django.tasks.exceptions import TaskResultDoesNotExist
except ImportError:  # Django 5.2
    from django_tasks.exceptions import TaskResultDoesNotExist


def state_of(order: Order) -> dict[str, Any]:
    """The task's status, attempts and outcome."""
    try:
        result = pack.get_result(order.task_id)
    except TaskResultDoesNotExist:  # it ended so long ago that its result was deleted
        return {"status": "UNKNOWN", "ended": True, "attempts": 0, "text": ""}
    text = ""
    if result.status == "SUCCESSFUL":
        text = result.return_value
    elif result.errors:
        text = result.errors[-1].traceback.strip().splitlines()[-1]
    return {
        "status": str(result.status),
        "ended": result.is_finished,
        "attempts": result.attempts,
        "text": text,
    }
