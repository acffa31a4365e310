"""URLs of the test project: the admin at its usual place, and a second one of a project's own."""

from django.contrib import admin
from django.urls import path

from django_distlock.admin import HeldLockAdmin
from django_distlock.models import HeldLock

own_site = admin.AdminSite(name="own")
own_site.disable_action("delete_selected")
own_site.register(HeldLock, HeldLockAdmin)

urlpatterns = [path("admin/", admin.site.urls), path("own/", own_site.urls)]
