"""What type checkers must refuse: an error in each line that says so, and in no other."""

from __future__ import annotations

from django_distlock import distributed_lock, lock, respond


@distributed_lock("order:{pk}")
def named(pk: int) -> str:
    return ""


@distributed_lock("order:{pk}", on_busy="skip")
def skipping(pk: int) -> str:
    return ""


named("1")  # error
named()  # error
named(1, 2)  # error
skipping(1).upper()  # error
named(1).nothing()  # error
distributed_lock("name", in_atomic="later")  # error
distributed_lock("name", hold_until="end")  # error
distributed_lock("name", on_busy="wait")  # error
distributed_lock("name", on_unavailable="wait")  # error
distributed_lock("name", timeout=5)  # error
lock("name", on_unavailable="skip")  # error
lock("name", timeout=5)  # error
lock("name", ttl="5")  # error
respond(status="423")  # error
