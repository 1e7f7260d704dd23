"""Orders in the admin, with the results of their tasks."""

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from orders.models import Order
from orders.results import state_of


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):  # type: ignore[misc]
    """The list shows each task's state, and an action packs orders again."""

    list_display = ("id", "article", "count", "packed", "status", "outcome")
    actions = ("pack_again",)

    @admin.display(description="task")
    def status(self, order: Order) -> str:
        """The status of the order's task."""
        return str(state_of(order)["status"])

    @admin.display(description="outcome")
    def outcome(self, order: Order) -> str:
        """What the task returned, or its last error."""
        return str(state_of(order)["text"])

    @admin.action(description="Pack again")
    def pack_again(self, request: HttpRequest, queryset: QuerySet[Order]) -> None:
        """Send a new task for each of the chosen orders."""
        for order in queryset:
            order.pack()
        self.message_user(request, f"{len(queryset)} sent")
