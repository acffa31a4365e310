"""Labels of metrics: measurements of locks are grouped by the templates of their names."""

from __future__ import annotations

import logging

from ..utils.events import about_event

MOST_TEXTS = 200
OTHER = "other"

logger = logging.getLogger("django_distlock")

texts: set[str] = set()
is_told = False  # whether the log already says that there are more of them


def series_of(template: str, name: str) -> str:
    """Returns the label of a lock: its template, such as ``order:{}``.

    A name without values is its own template. A process has at most 200 such labels. Locks with other names get the
    label "other", and the log says so, once: an f-string may make a name for each order.
    """
    if template != name or template in texts:
        return template
    if len(texts) < MOST_TEXTS:  # no lock here: a fork or a signal handler could find it held. So a few more may pass
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
