"""S5, S16: a server that stops, under the load of some processes. ``python -m tests.soak.outage`` measures it."""

from __future__ import annotations

import pytest

from example_project.valkey import Valkey
from tests.soak.outage import measure
from tests.support.tools import PATIENCE

pytestmark = pytest.mark.slow

TIMEOUTS = {"socket_timeout": 0.4, "socket_connect_timeout": 0.4}


@pytest.mark.seconds(10)
def test_no_lease_is_lost_without_need_and_each_process_is_served_again():
    with Valkey() as server:
        report = measure(server.url, server.process.pid, 3.0, processes=2, threads=5, ttl=8.0, options=TIMEOUTS)
    assert report.lost_without_need == 0
    assert report.is_sound(within=PATIENCE), report
    assert report.unasked > report.calls / 2, report
