"""The shop's tables in the admin."""

from django.contrib import admin

from .models import Item, Purchase


@admin.register(Item)
class ItemAdmin(admin.ModelAdmin):
    list_display = ("name", "price", "delivered", "stock")


@admin.register(Purchase)
class PurchaseAdmin(admin.ModelAdmin):
    list_display = ("item", "price", "bought_at")
    list_filter = ("item",)
    list_select_related = ("item",)
    date_hierarchy = "bought_at"
