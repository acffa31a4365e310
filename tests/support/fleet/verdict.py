"""What a fleet did, claim by claim: was each run that was due claimed once, in time, and sent once?

Times are seconds of Unix time. What is late or lost counts as explained only by what was done to the beats and to
the store at that time: by the faults of the test, and by moments in which the machine ran nobody.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

PROMPT = 0.5  # seconds within which a beat that nothing hinders does what is due
UNHEARD = 0.4  # seconds after which the answer to a claim may come too late for its beat
SENDS_WITHIN = 2.0  # seconds from a claim to its message, on a busy machine
LOOKS = 1.0 + PROMPT  # seconds within which a beat notices that the store lost its data
SAME = 0.001  # seconds
EVERYBODY = ""


class Sent(NamedTuple):
    """One message: of which entry, its id, its claim and when that saw the entry run, by which process, when.

    Of a run: in which worker, and when it began.
    """

    entry: str
    id: str
    claim: str
    seen: float
    by: str
    at: float


class Claim(NamedTuple):
    """A stamp that the store was made to keep. ``at``: when the entry runs; ``moment``: when the store was told first.

    ``asked``: what ``at`` was then; a claim that was not answered is made again, with a later one.
    ``by`` is empty where the entry did not run, and ``at`` is the time from which its schedule counts.
    """

    entry: str
    token: str
    by: str
    at: float
    moment: float
    asked: float


class Rhythm(NamedTuple):
    """Of an entry: each so many seconds, by the clock on the wall (``kind`` "wall") or since it last ran ("every")."""

    kind: str
    period: float

    def due_after(self, ran: float) -> float:
        return (math.floor(ran / self.period) + 1) * self.period if self.kind == "wall" else ran + self.period


Span = tuple[float, float]


@dataclass
class Faults:
    """``spans``: when who could do nothing. ``ended``: when beats were ended; each of these begins a span, too.

    ``emptied``: when the store lost its data. ``unsettled``: when it gave nobody a run of an entry, because of that.
    ``waited``: how long a beat, or the servers of all, had waited for a processor in all, at several moments.
    """

    spans: Mapping[str, Iterable[Span]]
    ended: Mapping[str, Iterable[float]]
    emptied: Iterable[float] = ()
    unsettled: Mapping[str, Iterable[Span]] = field(default_factory=dict)
    waited: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)

    def longest_chance(self, beat: str, begin: float, end: float, more: Iterable[Span] = ()) -> float:
        """The longest time between two moments in which nothing hindered this beat."""
        hindered = [*self.spans.get(beat, ()), *self.spans.get(EVERYBODY, ()), *more]
        longest = 0.0
        for start, stop in sorted(span for span in hindered if span[1] > begin and span[0] < end):
            longest = max(longest, self._chance(beat, begin, start))
            begin = max(begin, stop)
        return max(longest, self._chance(beat, begin, end))

    def _chance(self, beat: str, begin: float, end: float) -> float:
        """What was left of this time when the machine was busy otherwise."""
        waited = sum(self._waited(who, end) - self._waited(who, begin) for who in (beat, EVERYBODY))
        return max(0.0, end - begin - max(0.0, waited))

    def _waited(self, who: str, moment: float) -> float:
        known = self.waited.get(who) or [(moment, 0.0)]
        following = bisect(known, (moment, math.inf))
        if following in (0, len(known)):
            return known[max(following - 1, 0)][1]
        (at, so_far), (next_at, then) = known[following - 1 : following + 1]
        return so_far + (then - so_far) * (moment - at) / (next_at - at)

    def is_forgotten(self, claim: Claim, until: float, beats: Iterable[str]) -> bool:
        """Whether the store lost this claim, and none of the beats that knew of it could tell before that moment."""
        lost_at = max((at for at in self.emptied if claim.moment - SAME <= at <= until), default=None)
        return lost_at is not None and not any(self._could_tell(beat, claim, lost_at, until) for beat in beats)

    def _could_tell(self, beat: str, claim: Claim, lost_at: float, until: float) -> bool:
        if beat != claim.by and self.longest_chance(beat, claim.moment, lost_at) <= PROMPT:
            return False  # it did not know
        remembered = min((at for at in self.ended.get(beat, ()) if claim.moment <= at <= until), default=until)
        return self.longest_chance(beat, lost_at, max(lost_at, remembered)) > LOOKS


@dataclass
class Verdict:
    """``late`` and ``lost`` are explained, and are counted; what stands in ``wrong`` is not."""

    claims: int = 0
    sends: int = 0
    late_claims: int = 0  # nobody could claim it earlier
    late_sends: int = 0  # its beat was stopped between claim and message
    lost: int = 0  # its beat was ended between claim and message
    forgotten: int = 0  # claimed twice, because the store lost the first claim and who knew of it was stopped or ended
    unheard: int = 0  # its beat did not hear that it has the run, and could not ask until the next run was claimed
    wrong: list[str] = field(default_factory=list)

    @property
    def excused(self) -> int:
        return self.late_claims + self.late_sends + self.lost + self.forgotten + self.unheard

    def figures(self) -> dict[str, int]:
        return {name: value for name, value in vars(self).items() if name != "wrong"} | {"wrong": len(self.wrong)}


def judge(
    rhythms: Mapping[str, Rhythm],
    beats: Iterable[str],
    claims: Iterable[Claim],
    sends: Iterable[Sent],
    faults: Faults,
    begin: float,
    end: float,
) -> Verdict:
    """``begin``: when all beats were at work; ``end``: until when runs had to be claimed, and some time ago.

    ``sends`` may have one message twice, as it was seen where it was sent and where it ran.
    """
    verdict = Verdict()
    by_entry: dict[str, list[Claim]] = defaultdict(list)
    for claim in sorted(claims, key=lambda claim: claim.at):
        by_entry[claim.entry].append(claim)
    messages: dict[str, dict[str, float]] = defaultdict(dict)  # ids by claim, and when each was first seen
    for sent in sends:
        seen = messages[sent.claim]
        seen[sent.id] = min(sent.at, seen.get(sent.id, sent.at))
    known = {claim.token for group in by_entry.values() for claim in group}
    verdict.wrong += [
        f"sent without a claim: {', '.join(ids)}" for token, ids in messages.items() if token not in known
    ]
    for entry, rhythm in rhythms.items():
        by_entry[entry] = _without_repetitions(by_entry[entry], verdict)
        busy: dict[str, list[Span]] = defaultdict(list)  # a beat counts on from when it could send
        for claim, after in pairwise([*by_entry[entry], None]):
            assert claim is not None
            if claim.by and claim.moment <= end:
                next_at = after.moment if after else end
                sent_at = _judge_messages(claim, messages[claim.token], next_at, faults, verdict)
                busy[claim.by].append((claim.moment, sent_at + rhythm.period * (sent_at - claim.moment > PROMPT)))
        _judge_claims(rhythm, by_entry[entry], [*beats], faults, busy, (begin, end), verdict)
        if not by_entry[entry]:
            verdict.wrong.append(f"{entry} is not known to the store")
    return verdict


def _without_repetitions(stamps: list[Claim], verdict: Verdict) -> list[Claim]:
    """The claims of an entry, and before them from when it counts. A beat may tell the store again of what ran."""
    claims = [stamp for stamp in stamps if stamp.by]
    told = [stamp for stamp in stamps if not stamp.by]
    first = claims[0].at if claims else math.inf
    for stamp in told:
        if stamp.at > first and not any(abs(stamp.at - claim.at) < SAME for claim in claims):
            verdict.wrong.append(f"moved on without a run: {stamp}")
    return [stamp for stamp in told if stamp.at < first - SAME][-1:] + claims


def _judge_messages(claim: Claim, seen: Mapping[str, float], next_at: float, faults: Faults, verdict: Verdict) -> float:
    """When the message of this claim was sent; if there is none, the moment of the claim."""
    verdict.claims += 1
    verdict.sends += len(seen)
    if len(seen) > 1:
        verdict.wrong.append(f"sent {len(seen)} times: {claim}")
    if not seen:
        deaths = [at for at in faults.ended.get(claim.by, ()) if at >= claim.moment]
        if deaths and faults.longest_chance(claim.by, claim.moment, min(deaths)) <= PROMPT:
            verdict.lost += 1
        elif claim.moment - claim.asked > UNHEARD and faults.longest_chance(claim.by, claim.moment, next_at) <= PROMPT:
            verdict.unheard += 1
        else:
            verdict.wrong.append(f"claimed and not sent: {claim}")
        return claim.moment
    sent_at = min(seen.values())
    if sent_at - claim.moment > PROMPT:
        if faults.longest_chance(claim.by, claim.moment, sent_at) <= SENDS_WITHIN:
            verdict.late_sends += 1
        else:
            verdict.wrong.append(f"sent {sent_at - claim.moment:.2f} s after its claim: {claim}")
    return sent_at


def _judge_claims(
    rhythm: Rhythm,
    claims: list[Claim],
    beats: list[str],
    faults: Faults,
    busy: Mapping[str, list[Span]],
    watched: Span,
    verdict: Verdict,
) -> None:
    begin, end = watched
    for before, after in pairwise([*claims, None]):
        assert before is not None
        due = rhythm.due_after(before.at)
        if after and after.at < due - SAME:
            if before.by and faults.is_forgotten(before, after.moment, beats):
                verdict.forgotten += 1
            else:
                verdict.wrong.append(f"claimed twice: {before} {after}")
        since, until = max(due, begin), min(after.at, after.moment) if after else end
        if until - since <= PROMPT:
            continue
        unsettled = [*faults.unsettled.get(before.entry, ())]
        chances = {beat: faults.longest_chance(beat, since, until, [*busy.get(beat, ()), *unsettled]) for beat in beats}
        if max(chances.values()) <= PROMPT:
            verdict.late_claims += 1
        else:
            verdict.wrong.append(f"due at {due:.2f}, claimed at {until:.2f}, {chances}: {before} {after}")
