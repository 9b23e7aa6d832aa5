"""A retention policy that says something else of every prompt of two models: for `--plugin`, where L1 is filled."""

from lmcache.core.admission import Offer, RetentionPolicy
from lmcache.core.hints import NO_HINTS, Hints, Priority
from lmcache.core.hookspecs import hookimpl

MOODS = (Hints(ttl_s=0.3), Hints(priority=Priority.HIGH), Hints(priority=Priority.LOW), NO_HINTS)


class Moody(RetentionPolicy):
    name = "moody"

    def advise(self, offer: Offer) -> Hints:
        dice = hash(offer.keys[0])
        if offer.model == "reference/gemma":
            return MOODS[dice % len(MOODS)]
        return Hints(ends_session=dice % 2 == 0) if offer.model == "reference/glm53_flash" else NO_HINTS


@hookimpl
def lmcache_register_retention_policies() -> list[type[RetentionPolicy]]:
    return [Moody]
