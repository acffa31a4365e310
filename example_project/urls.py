"""The URLs: the shop at the root, and the admin beside it."""

from django.contrib import admin
from django.urls import path

from .shop import views

urlpatterns = [
    path("", views.front_page, name="front_page"),
    path("items/<int:item_id>/buy", views.buy, name="buy"),
    path("items/<int:item_id>/buy-unlocked", views.buy_unlocked, name="buy_unlocked"),
    path("admin/", admin.site.urls),
]
