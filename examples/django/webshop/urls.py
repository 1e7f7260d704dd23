"""The addresses of the site."""

from django.contrib import admin
from django.urls import path
from orders import views

urlpatterns = [
    path("", views.shop, name="shop"),
    path("orders/<int:number>/", views.order, name="order"),
    path("orders/<int:number>/state", views.state, name="state"),
    path("admin/", admin.site.urls),
]
