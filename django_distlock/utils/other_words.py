"""Words of other lock libraries, and the words of this package for the same: for the errors that new users meet."""

from __future__ import annotations

from typing import NoReturn, TypeVar

T = TypeVar("T")

# redis-py, python-redis-lock, Redisson, threading

OPTIONS = {
    "timeout": "ttl or wait? ttl=30 is how long the store keeps a lease nobody renews (what redis-py calls timeout);"
    " wait=5 is how long to wait for a busy lock.",
    "blocking_timeout": "ttl or wait? wait=5 is how long to wait for a busy lock; ttl=30 is how long the store keeps"
    " a lease nobody renews.",
    "blocking": "wait=0 does not wait for a busy lock; wait=None waits as long as it takes.",
    **dict.fromkeys(
        ("expire", "expiry", "lease_time", "lock_timeout"), "ttl=30 is how long the store keeps a lease nobody renews."
    ),
    "wait_time": "wait=5 is how long to wait for a busy lock.",
    "auto_renewal": "renew=True keeps the lease alive while its holder lives; it is the default.",
    "id": "label= says what holds the lock; its token is made anew for each lease.",
    "sleep": "waiters are woken when the lock is free; there is nothing to set.",
    "thread_local": "each acquisition has a lease of its own, so a handle may be shared by threads and tasks.",
    **dict.fromkeys(
        ("alias", "backend", "redis"),
        'using="default" names an alias of DISTRIBUTED_LOCKS, which says where the store is.',
    ),
    **dict.fromkeys(
        ("hold_until", "on_busy"),
        "it is one of @distributed_lock. Where the lock is busy, 'with' raises LockNotAcquired or LockTimeout, and"
        " acquire() returns False.",
    ),
}

# Keys of an entry of DISTRIBUTED_LOCKS
KEYS = dict.fromkeys(
    ("TIMEOUT", "BLOCKING_TIMEOUT", "EXPIRE", "EXPIRY", "LEASE_TIME", "LOCK_TIMEOUT"),
    "TTL or WAIT? 'TTL': 30 is how long the store keeps a lease nobody renews; 'WAIT': 5 is how long to wait for a busy"
    " lock.",
)

# Attributes of a lease that people look for on a handle. A class that has such an attribute itself keeps it.
OF_LEASES = (
    "detach",
    "ensure_held",
    "fence",
    "granted_at",
    "holder",
    "is_held",
    "remaining",
    "renew",
    "state",
    "token",
    "ttl",
    "wait_lost",
)
ATTRIBUTES = {
    **{word: f"its lease has it: lock.lease.{word}, or 'with lock(...) as lease'" for word in OF_LEASES},
    "acquire": "lock(name).acquire() makes a lease, which is one acquisition",
    "acquired": "lease.is_held says whether it is held here",
    "locked": "lock.locked() asks the store whether anybody holds it",
    "extend": "lease.renew(ttl=60) lets it end 60 seconds from now; by default it is renewed by itself",
    "reacquire": "lease.renew() lets it end a whole TTL from now; by default it is renewed by itself",
    "refresh": "lease.renew() lets it end a whole TTL from now; by default it is renewed by itself",
    "owned": "lease.is_held says whether it is held here",
    "is_held_by_current_thread": "lease.is_held says whether it is held here",
    "expire": "lease.remaining is how many seconds it has left",
    "remain_time_to_live": "lease.remaining is how many seconds it has left",
    "id": "lease.token is its secret, lease.holder who has it",
    "get_owner_id": "lease.holder is who has it; locks[alias].look([name]) asks the store for that of others",
    "is_locked": "lock.locked() asks the store whether anybody holds it",
    "lock": "lock.acquire() takes it, or 'with lock(...)'",
    "try_lock": "lock.acquire(timeout=0) does not wait",
    "unlock": "release() gives it up",
    "force_unlock": "lock.force_release() frees it, whoever holds it",
    "reset": "lock.force_release() frees it, whoever holds it",
    "reset_all": "manage.py locks release --prefix '' frees all of them, after asking",
}


class OtherWord:
    """An attribute that does not exist. Its error names the word of this package.

    It is not done by ``__getattr__()``, because with that Python would find all other attributes more slowly.
    """

    def __init__(self, word: str, hint: str) -> None:
        self._word, self._hint = word, hint

    def __get__(self, thing: object, kind: type) -> NoReturn:
        # Without obj=: Python would search it for another name to suggest, such as a private one.
        raise AttributeError(f"{kind.__name__!r} object has no attribute {self._word!r}: {self._hint}", name=self._word)


def answer_other_words(kind: type[T]) -> type[T]:
    """A class decorator that adds the words of other libraries, also in the spelling of Java."""
    own = {*dir(kind), *kind.__annotations__}
    for word, hint in ATTRIBUTES.items():
        if word in own:
            continue
        first, *others = word.split("_")
        for spelt in {word, first + "".join(other.capitalize() for other in others)}:
            setattr(kind, spelt, OtherWord(spelt, hint))

    def own_words(thing: object) -> list[str]:
        """Returns the names that shells offer."""
        offered = object.__dir__(thing)
        return [word for word in offered if not isinstance(vars(kind).get(word), OtherWord)]

    setattr(kind, "__dir__", own_words)  # noqa: B010
    return kind
