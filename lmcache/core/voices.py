"""Admission and retention policies as the cache asks them: several as one, by the rules of `core/admission.py`."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import attrs

from lmcache.core.admission import AdmissionPolicy, Offer, RetentionPolicy
from lmcache.core.hints import Hints, combined
from lmcache.core.metrics import Counters

log = logging.getLogger("lmcache.server")

T = TypeVar("T")

REFUSED_SECONDS = 60.0
"""A refused chunk is not asked about again for so long, unless somebody looks it up."""

REFUSED_CHUNKS = 1 << 16
"""Refused chunks that are remembered, at most."""


@attrs.frozen
class Speakers:
    """Who was chosen to speak."""

    admission: tuple[AdmissionPolicy, ...] = ()
    retention: tuple[RetentionPolicy, ...] = ()


class Voices:
    """All speakers. Whoever fails has not spoken."""

    def __init__(self, speakers: Speakers, counters: Counters) -> None:
        self._counters = counters
        self._admission = speakers.admission
        self._retention = speakers.retention
        self._refused: OrderedDict[Hashable, float] = OrderedDict()
        self._logged: set[object] = set()

    @property
    def any_admission(self) -> bool:
        """Whether somebody may refuse a chunk."""
        return bool(self._admission)

    @property
    def any_retention(self) -> bool:
        """Whether somebody may give hints."""
        return bool(self._retention)

    def admitted(self, offer: Offer, now: float) -> int:
        """How many of the offered chunks all of them want stored."""
        unasked = next((n for n, key in enumerate(offer.keys) if self._refused.get(key, now) <= now), len(offer.keys))
        if unasked:
            # its chunks are not reached without those before them; but whoever counts offers must hear of each once
            if unasked < len(offer.keys):
                self._shortest(attrs.evolve(offer, keys=offer.keys[unasked:], depth=offer.depth + unasked))
                self._remember(offer.keys[unasked:], now)
            return 0
        shortest = self._shortest(offer)
        self._remember(offer.keys[shortest:], now)
        return shortest

    def _shortest(self, offer: Offer) -> int:
        shortest = len(offer.keys)
        for policy in self._admission:
            length = self._ask(policy, policy.admit, offer, int)
            if length is not None and not 0 <= length <= len(offer.keys):
                self._failed(policy, f"admitted {length} of {len(offer.keys)} chunks", None)
            elif length is not None:
                shortest = min(shortest, length)
        return shortest

    def asked_for(self, keys: Iterable[Hashable]) -> None:
        """A request looks these chunks up: it may offer those that were refused before."""
        if self._refused:
            for key in keys:
                self._refused.pop(key, None)

    def hints(self, offer: Offer) -> Hints:
        """What the request and all of them say together."""
        advice = (self._ask(policy, policy.advise, offer, Hints) for policy in self._retention)
        return combined([offer.hints, *filter(None, advice)])

    def _remember(self, keys: Sequence[Hashable], now: float) -> None:
        for key in keys:
            self._refused.pop(key, None)
            self._refused[key] = now + REFUSED_SECONDS
        while len(self._refused) > REFUSED_CHUNKS:
            self._refused.popitem(last=False)

    def _ask(
        self, policy: AdmissionPolicy | RetentionPolicy, question: Callable[[Offer], T], offer: Offer, kind: type[T]
    ) -> T | None:
        try:
            answer = question(offer)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin's code; `_failed` logs it
            self._failed(policy, "failed", error)
            return None
        if not isinstance(answer, kind):
            self._failed(policy, f"answered {answer!r}", None)
            return None
        return answer

    def _failed(self, policy: AdmissionPolicy | RetentionPolicy, what: str, error: BaseException | None) -> None:
        self._counters.policy_errors += 1
        if policy not in self._logged:
            self._logged.add(policy)
            kind = "admission" if isinstance(policy, AdmissionPolicy) else "retention"
            where = f"{type(policy).__module__}.{type(policy).__qualname__}"
            log.error("the %s policy %s (%s) %s; logged once", kind, policy.name, where, what, exc_info=error)
