"""A WSGI application for servers that load it before they fork. What its master does with locks: $MASTER."""

import json
import os
import time

from django.conf import settings

settings.configure(
    DISTRIBUTED_LOCKS={
        "default": {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": os.environ["LOCKS"]}
    }
)

from django_distlock import lock
from tests.support.contention import contend
from tests.support.leases import deadline_of

leader = lock("leader", ttl=2)
if os.environ["MASTER"] == "contends":
    contend(os.environ["LOCKS"], threads=2, seconds=0.3)
elif os.environ["MASTER"] == "holds":
    leader.acquire()


def application(environ, start_response):
    """``/contend`` answers with what it counted, ``/renewed`` with the state of a lock after its TTL."""
    found = {"pid": os.getpid()}
    if environ["PATH_INFO"] == "/contend":
        found |= contend(os.environ["LOCKS"], threads=4)
    elif environ["PATH_INFO"] == "/renewed":
        with lock(f"worker {os.getpid()}", ttl=1) as lease:
            first = deadline_of(lease)
            while lease.remaining and deadline_of(lease) < first + 0.01:
                time.sleep(0.05)
            found["state"] = lease.state
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(found).encode()]
