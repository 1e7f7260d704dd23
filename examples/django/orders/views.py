"""The pages: the shop, one order, and its state as JSON for the page's script."""

from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_GET, require_http_methods

from orders.models import Order
from orders.results import state_of


@require_http_methods(["GET", "POST"])
def shop(request: HttpRequest) -> HttpResponse:
    """The form and the newest orders; a POST orders."""
    if request.method == "POST":
        new = Order(article=request.POST["article"], count=int(request.POST.get("count", 1)))
        new.pack()
        return redirect("order", number=new.pk)
    return render(request, "orders/shop.html", {"orders": Order.objects.order_by("-pk")[:20]})


@require_GET
def order(request: HttpRequest, number: int) -> HttpResponse:
    """One order; its script asks for the state until the task has ended."""
    found = get_object_or_404(Order, pk=number)
    return render(request, "orders/order.html", {"order": found, "state": state_of(found)})


@require_GET
def state(request: HttpRequest, number: int) -> JsonResponse:
    """The state of the order's task."""
    found: dict[str, Any] = state_of(get_object_or_404(Order, pk=number))
    return JsonResponse(found)
