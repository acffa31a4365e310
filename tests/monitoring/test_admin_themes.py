"""The page of held locks in themes that replace the templates of Django's admin."""

from __future__ import annotations

import pytest
from django.contrib.admin.utils import quote
from django.contrib.auth.models import User
from django.template.utils import get_app_template_dirs
from django.urls import include, path, reverse

from django_distlock.admin import HeldLockAdmin
from django_distlock.models import HeldLock
from tests import urls
from tests.support.admin_pages import LIST, hold, key_of, names_in, release, said, use_admin
from tests.support.tools import locked_names

pytestmark = [
    pytest.mark.django_db,
    # Themes follow Django's deprecations in their own time.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning"),
]


TWO_PAGES = ("change", "delete")
urlpatterns = [path("grappelli/", include("grappelli.urls")), *urls.urlpatterns]


@pytest.fixture(params=["jazzmin", "grappelli", "unfold"])
def theme(request, settings):
    pytest.importorskip(request.param)
    use_admin(settings, apps=(request.param,))
    get_app_template_dirs.cache_clear()
    if request.param == "grappelli":
        settings.ROOT_URLCONF = __name__
    if request.param == "unfold":
        from unfold.admin import ModelAdmin
        from unfold.sites import UnfoldAdminSite

        site = UnfoldAdminSite()
        site.register(HeldLock, type("UnfoldHeldLockAdmin", (HeldLockAdmin, ModelAdmin), {}))
        settings.ROOT_URLCONF = (path("admin/", site.urls),)
    yield request.param
    get_app_template_dirs.cache_clear()


def test_list_search_filter_and_release(theme, client, valkey_locks):
    client.force_login(User.objects.create_superuser("operator"))
    hold(valkey_locks, "order:1", label="POST /pay", ago=20)
    hold(valkey_locks, "mail:1")
    page = client.get(LIST)
    text = page.content.decode()
    assert theme in text
    assert names_in(page) == ["order:1", "mail:1"]
    for shown in ("POST /pay", "web-1, pid 4711", "held_locks.js", 'class="distlock-seconds"'):
        assert shown in text
    assert names_in(client.get(LIST, {"q": "order"})) == ["order:1"]
    assert names_in(client.get(LIST, {"prefix": "mail:", "_facets": "True"})) == ["mail:1"]
    key = key_of(valkey_locks, "order:1")
    lock, alone = (client.get(reverse(f"admin:distlock_heldlock_{page}", args=[quote(key)])) for page in TWO_PAGES)
    assert "Release this lock…" in lock.content.decode()
    assert "Delete" not in lock.content.decode()
    assert "Yes, release" in alone.content.decode()
    question = client.post(LIST, {"action": "delete_selected", "_selected_action": [key]})
    assert f'value="{key}"' in question.content.decode()
    assert said(release(client, [key])) == ["success: Released 1 lock: order:1."]
    assert locked_names(valkey_locks) == ["mail:1"]
