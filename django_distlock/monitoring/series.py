"""Labels of metrics: what is measured of locks, by how their names are made."""

from __future__ import annotations

import logging

from ..utils.events import about_event

MOST_TEXTS = 200
OTHER = "other"

logger = logging.getLogger("django_distlock")

texts: set[str] = set()
is_told = False  # that there are more of them


def series_of(template: str, name: str) -> str:
    """The template of the lock, such as ``order:{}``.

    A name that no values fill is its own template. A process has 200 such labels at most; the locks of further names
    are "other", and the log says so, once: an f-string may make a name for each order.
    """
    if template != name or template in texts:
        return template
    if len(texts) < MOST_TEXTS:  # without a lock, which a fork or a handler of signals could find held: a few more pass
        texts.add(template)
        return template
    _tell(name)
    return OTHER


def _tell(name: str) -> None:
    global is_told
    if not is_told:
        is_told = True
        logger.warning(
            "Locks have been taken under %d names that no template makes. In metrics, those of others, such as %r, are"
            ' "other". Give the values to lock(), as in lock("order:{}", pk), in place of an f-string.',
            MOST_TEXTS, name, extra=about_event("series-full", name=name),
        )  # fmt: skip
