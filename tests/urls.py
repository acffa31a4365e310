"""URLs of the test project; tests that need views name their own module."""

urlpatterns: list[object] = []
