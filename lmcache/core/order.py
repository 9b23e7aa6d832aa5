"""The policy as the cache calls it: nothing that a policy does wrong reaches a request."""

import itertools
import logging
from collections.abc import Iterator, Sequence

from lmcache.core.index import Node
from lmcache.core.metrics import Counters
from lmcache.core.policy import EvictionPolicy

log = logging.getLogger("lmcache.server")

VICTIM_SCAN = 4096
"""Nodes looked at, at most, in one search for victims: bounds the request when nearly everything is in use."""


class GuardedOrder:
    """Passes calls on to a policy. One that raises is counted, logged once a cause, and otherwise without effect."""

    def __init__(self, policy: EvictionPolicy, counters: Counters) -> None:
        self._policy = policy
        self._counters = counters
        self._logged: set[tuple[str, str]] = set()

    def insert(self, node: Node) -> None:
        """`node` is new."""
        try:
            self._policy.insert(node)
        except Exception as error:  # noqa: BLE001 - here and below: a plugin's code, and `_failed` logs it
            self._failed("insert", error)

    def touch(self, nodes: Sequence[Node]) -> None:
        """`nodes` were used."""
        try:
            self._policy.touch(nodes)
        except Exception as error:  # noqa: BLE001
            self._failed("touch", error)

    def remove(self, node: Node) -> None:
        """`node` is gone."""
        try:
            self._policy.remove(node)
        except Exception as error:  # noqa: BLE001
            self._failed("remove", error)

    def victims(self) -> Iterator[Node]:
        """The policy's first victims, without what it invents or should have forgotten."""
        try:
            for victim in itertools.islice(self._policy.victims(), VICTIM_SCAN):
                if isinstance(victim, Node) and victim.namespace.nodes.get(victim.hash) is victim:
                    yield victim
        except Exception as error:  # noqa: BLE001
            self._failed("victims", error)

    def _failed(self, call: str, error: Exception) -> None:
        self._counters.policy_errors += 1
        cause = (call, type(error).__name__)
        if cause not in self._logged:
            self._logged.add(cause)
            log.error("the eviction policy %s failed in %s; logged once", self._policy.name, call, exc_info=error)
