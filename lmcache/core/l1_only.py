"""Looking up: what is asked and answered, and how it goes where no tiers stand behind L1. Server's thread.

`core/tiering.py` stands in for `L1Only` where there are some; the server imports it, and all that it needs, only then.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from lmcache.core.cache import Cache, Ticket
from lmcache.core.hints import Hints
from lmcache.core.index import Namespace
from lmcache.core.keys import ChainHash


@attrs.frozen
class Asked:
    """What a lookup asked."""

    owner: int
    namespace: Namespace
    hashes: Sequence[ChainHash]
    limit: int
    """Tokens that the hit may cover at most."""
    tenant: str
    hints: Hints
    prefill_speed: float = 0.0
    """Tokens a second that the engine computes; 0 if it does not say."""


@attrs.frozen
class Answer:
    """What a lookup has come to so far."""

    ticket: int
    """What to ask again with, or to load with; 0 when there is nothing to load."""
    tokens: int
    final: bool


NOTHING = Answer(0, 0, final=True)


def answer(ticket: Ticket | None) -> Answer:
    """The final one."""
    return Answer(ticket.id, ticket.hit.tokens, final=True) if ticket else NOTHING


class L1Only:
    """Every answer is final at once. `Tiering` says what the methods are for."""

    busy = 0
    pause = math.inf
    memory_comes: Callable[[int], bool]

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def lookup(self, asked: Asked) -> Answer:
        """The hit in L1."""
        return answer(
            self._cache.lookup(
                *(asked.owner, asked.namespace, asked.hashes, asked.limit, asked.tenant, asked.hints),
            )
        )

    def poll(self, owner: int, number: int) -> Answer:
        """There is no lookup that could be asked for again."""
        return NOTHING

    def undecided(self, owner: int, number: int) -> bool:
        """As `poll`."""
        return False

    def drop(self, owner: int, number: int) -> None:
        """As `poll`."""

    def owner_gone(self, owner: int) -> None:
        """As `poll`."""

    def advance(self) -> None:
        """Nothing moves."""

    def close(self) -> None:
        """Nothing is open."""

    def report(self) -> list[dict[str, Any]]:
        """No tiers."""
        return []
