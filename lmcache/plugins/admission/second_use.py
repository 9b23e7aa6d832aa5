"""second-use: what was asked for once is not stored. For traffic of which much never comes back."""

from collections import OrderedDict
from collections.abc import Hashable

from lmcache.core.admission import AdmissionPolicy, Offer
from lmcache.core.hookspecs import hookimpl

REMEMBERED = 1 << 18
"""Chunks that were offered once and are remembered, at most: some 30 MB."""


class SecondUse(AdmissionPolicy):
    """Stores a chunk when a second request offers it. The second one still pays for its prefill; the third one hits.

    A doorkeeper in front of the cache, as in G. Einziger, R. Friedman, B. Manes, TinyLFU: a highly efficient cache
    admission policy, ACM Transactions on Storage 13(4), 2017; it remembers the chunks themselves, so nobody is mistaken
    for another. The memory is bounded: what was offered longest ago is forgotten first.
    """

    name = "second-use"

    def __init__(self) -> None:
        self._offered: OrderedDict[Hashable, None] = OrderedDict()

    def admit(self, offer: Offer) -> int:
        """The leading chunks that were offered before; the others are remembered."""
        known = next((number for number, key in enumerate(offer.keys) if key not in self._offered), len(offer.keys))
        for key in offer.keys[:known]:
            del self._offered[key]
        for key in offer.keys[known:]:
            self._offered.pop(key, None)
            self._offered[key] = None
        while len(self._offered) > REMEMBERED:
            self._offered.popitem(last=False)
        return known


@hookimpl
def lmcache_register_admission_policies() -> list[type[AdmissionPolicy]]:
    """Offer the policy to `--admission second-use`."""
    return [SecondUse]
