"""Problems of a session and its ensemble, found from answers of the servers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kazoo.exceptions import NoNodeError  # type: ignore[import-untyped]

from ...options import Terms
from ...types import CheckResult, Level
from ...utils.clock import clock, wall_clock
from ...utils.drive import Call, Steps
from . import requests as ask
from .confirmations import ZooKeeperSession
from .names import Tree

CLOCKS_APART = 1.0  # seconds
ENSEMBLE = "/zookeeper/config"  # every server lets anybody read it

PARTICIPANT = re.compile(r"^server\.\d+=(?!.*:observer)", re.MULTILINE)


class Diagnostics:
    def __init__(self, tree: Tree, terms: Terms, options: str) -> None:
        """``options``: how messages name the options of the backend."""
        self._tree, self._terms, self._options = tree, terms, options

    def steps(self, deadline: float) -> Steps[list[CheckResult]]:
        """It changes the root, because only a change shows the servers' clock."""
        yield Call("ask", ([ask.ensure(self._tree.root)], deadline))
        asked_at, began = wall_clock(), clock()
        answers = yield Call("ask", ([ask.write(self._tree.root, b""), ask.read(ENSEMBLE)], deadline))
        stat, config = answers.values
        middle = asked_at + (clock() - began) / 2
        found = [*self._session(answers.session), _clock(stat.mtime / 1000 - middle)]
        if not isinstance(config, NoNodeError):
            found.append(ensemble_result(config[0].decode(errors="replace")))
        return found

    def _session(self, session: ZooKeeperSession) -> Iterator[CheckResult]:
        message = f"It is {session.number:#x}, and ends {session.timeout:g} s after its process was last heard of."
        yield CheckResult(Level.OK, "session", message)
        if self._terms.ttl > session.timeout:
            message = (
                f"The TTL of {self._terms.ttl:g} s is longer than the timeout of the session, so leases have that:"
                f" {session.timeout:g} s."
            )
            hint = f"Raise {self._options}['timeout'], and maxSessionTimeout of the servers; or lower TTL."
            yield CheckResult(Level.WARNING, "TTL", message, hint)


def _clock(ahead: float) -> CheckResult:
    message = f"The servers' clock is {abs(ahead):.2f} s {'ahead of' if ahead > 0 else 'behind'} this machine's."
    if abs(ahead) < CLOCKS_APART:
        return CheckResult(Level.OK, "clock", message)
    hint = "Locks do not depend on it, but times shown do, and runs of beat. Let NTP set both."
    return CheckResult(Level.WARNING, "clock", message, hint)


def ensemble_result(config: str) -> CheckResult:
    """``config``: the configuration that the servers report."""
    servers = len(PARTICIPANT.findall(config))
    if servers < 2:
        message = "There is one server. Its loss costs all locks."
        hint = "Have three or five of them, on machines that do not fail together."
        return CheckResult(Level.WARNING, "ensemble", message, hint)
    spare = (servers - 1) // 2
    message = f"There are {servers} servers that vote; {spare} may be lost."
    if servers % 2:
        return CheckResult(Level.OK, "ensemble", message)
    hint = f"With {servers - 1} of them as many may be lost, and with {servers + 1} one more."
    return CheckResult(Level.WARNING, "ensemble", message, hint)
