try:
    import kazoo  # type: ignore[import-untyped]  # noqa: F401
except ImportError as error:
    raise ImportError("kazoo is missing; install django-distlock[zookeeper]") from error

from .backend import ZooKeeperBackend

__all__ = ["ZooKeeperBackend"]
