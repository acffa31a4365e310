"""Texts of the admin's pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

from django.contrib import messages
from django.utils.formats import number_format
from django.utils.html import format_html, format_html_join
from django.utils.safestring import mark_safe
from django.utils.timezone import localtime
from django.utils.translation import gettext, pgettext

from ..models import HeldLock
from ..types import Holder, Outage
from ..utils.clock import wall_clock
from ..utils.text import printable
from .inventory import Inventory, LeaseKey, held_for
from .times import format_duration, to_the_second


def moment(exact: datetime | None) -> str | None:
    """Returns the text of a moment, rounded to a second: Celery sends a run due at 3:00 some milliseconds earlier."""
    if exact is None:
        return None
    return to_the_second(localtime(exact + timedelta(seconds=0.5)).replace(microsecond=0))


def text_of_outage(alias: str, outages: Sequence[Outage]) -> str:
    """Returns the text for a backend that works without these servers."""
    silent = [gettext("%(server)s does not answer (%(reason)s)") % one._asdict() for one in outages]
    text = gettext("“%(alias)s”: %(silent)s. %(since)s")
    return text % {"alias": alias, "silent": "; ".join(silent), "since": silent_since(outages)}


def texts_of_aliases(inventory: Inventory) -> Iterator[str]:
    """Yields a text for each alias that answers, if any locks are held: how many, the longest held, how many wait."""
    keys, holders = inventory.keys(), inventory.holders()
    waiting = inventory.count_waiters(key.lock for key in holders or ())
    for alias in inventory.aliases if keys else ():
        parts = [gettext("%(count)s held") % {"count": number_format(len(keys.only(alias, "")))}]
        since, name = min(
            ((holder.since, key.name) for key, holder in (holders or {}).items() if holder and key.using == alias),
            default=(None, ""),
        )
        if since is not None:
            longest = ticking(max(0.0, wall_clock() - since), 1)
            parts.append(format_html(gettext("longest {time} ({name})"), time=longest, name=printable(name)))
        counts = [count for lock, count in waiting.items() if lock.using == alias]
        if counts and None not in counts:
            parts.append(gettext("%(count)s waiting") % {"count": number_format(sum(filter(None, counts)))})
        if alias not in inventory.errors:  # these have another message
            state = format_html_join(pgettext("between parts of a line", ", "), "{}", ((part,) for part in parts))
            yield format_html(gettext("“{alias}”: {state}"), alias=alias, state=state)


def texts_of_changes(inventory: Inventory, ids: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yields what happened to leases that were on a page and are gone: the level of each message, and its text."""
    leases = [lease for text in ids if (lease := LeaseKey.read(text))]
    now = {seen.lease for seen in inventory.leases(lease.lock for lease in leases)}
    locked = {lease.lock for lease in now}
    others: list[str] = []
    free: list[str] = []
    unknown: list[str] = []
    for lease in leases:
        if lease in now:
            continue
        if lease.lock in locked:
            others.append(lease.lock.name)
        else:
            (unknown if lease.lock.using in inventory.errors else free).append(lease.lock.name)
    if others:
        yield messages.WARNING, gettext("Others hold them by now: %(names)s.") % {"names": shortened(others)}
    if free:
        yield messages.INFO, gettext("Free by now: %(names)s.") % {"names": shortened(free)}
    if unknown:
        yield (
            messages.WARNING,
            gettext("The backend does not tell who holds them: %(names)s.") % {"names": shortened(unknown)},
        )


def silent_since(outages: Sequence[Outage]) -> str:
    """Returns a text that names this process, because each process finds out by itself."""
    here, since = Holder.here(), datetime.fromtimestamp(min(outage.since for outage in outages), UTC)
    about = {"process": f"{here.host}:{here.pid}", "since": moment(since)}
    return gettext("This process (%(process)s) has had no answer since %(since)s.") % about


def ticking(seconds: float | None, step: int) -> str | None:
    """Returns HTML whose seconds the script counts up (``step`` 1) or down (-1)."""
    if seconds is None:
        return None
    attributes = '<span class="distlock-seconds" data-seconds="{}" data-step="{}">{}</span>'
    return format_html(attributes, f"{seconds:.3f}", step, format_duration(seconds))


def as_list(lines: Iterable[str]) -> str:
    items = format_html_join("", "<li>{}</li>", ((printable(line),) for line in lines))
    return format_html('<ul class="distlock-lines">{}</ul>', items)


def as_table(rows: Sequence[Sequence[str]]) -> str:
    cells = (format_html_join("", "<td>{}</td>", ((printable(text),) for text in row)) for row in rows)
    lines = format_html_join("", "<tr>{}</tr>", ((row,) for row in cells))
    return format_html('<table class="distlock-journal"><tbody>{}</tbody></table>', lines)


def breakable(text: str) -> str:
    """Returns the text as HTML that may break after punctuation between words, if a column is narrow."""
    parts = re.split(r"(?<=\S[./:_-])(?=\S)", text)
    return format_html_join(mark_safe("<wbr>"), "{}", ((part,) for part in parts))


def named(row: HeldLock) -> str:
    """Returns how entries of the admin's log name a lock, in any language: the history page searches for it."""
    return f"“{printable(row.info.name + row.info.slot_text)}” ({row.using})"


def described(row: HeldLock) -> str:
    line = f"{row.name} ({row.using}): {row.info.holder or row.state_text}"
    if row.info.resting:
        line += f", {row.state_text}"
    if row.granted_at:
        line += gettext(", for %(time)s") % {"time": format_duration(held_for(row.info) or 0.0)}
    return line


def names_of(rows: Sequence[HeldLock]) -> str:
    return shortened([row.name for row in rows])


def shortened(names: Sequence[str], most: int = 10) -> str:
    shown = ", ".join(map(printable, names[:most]))
    return shown if len(names) <= most else f"{shown}, … ({len(names)})"
