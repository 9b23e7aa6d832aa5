"""The policy as the cache calls it: nothing that a policy does wrong reaches a request."""

import itertools
import logging
from collections.abc import Iterator, Sequence

from lmcache.core.accounts import Accounts
from lmcache.core.index import Node
from lmcache.core.metrics import Counters
from lmcache.core.policy import EvictionPolicy

log = logging.getLogger("lmcache.server")

VICTIM_SCAN = 4096
"""Nodes looked at, at most, in one search for victims: bounds the request when nearly everything is in use."""


class GuardedOrder:
    """Passes calls on to a policy. One that raises is counted, logged once a cause, and otherwise without effect.

    What the policy does not say, `accounts` does: they know every node, too, by its last use.
    """

    def __init__(self, policy: EvictionPolicy, accounts: Accounts, counters: Counters) -> None:
        self._policy = policy
        self._accounts = accounts
        self._counters = counters
        self._logged: set[str] = set()
        self._known = 0

    def resize(self, cells: int) -> None:
        """L1 has `cells` cells, whether or not there is memory behind them by now."""
        try:
            self._policy.resize(cells)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - here and below: a plugin's code; `_failed` logs it
            self._failed("resize", error)

    def insert(self, node: Node) -> None:
        """`node` is new."""
        self._known += 1
        self._accounts.insert(node)
        try:
            self._policy.insert(node)
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self._failed("insert", error)

    def touch(self, nodes: Sequence[Node]) -> None:
        """`nodes` were used."""
        self._accounts.touch(nodes)
        try:
            self._policy.touch(nodes)
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self._failed("touch", error)

    def remove(self, node: Node) -> None:
        """`node` is gone."""
        self._known -= 1
        self._accounts.remove(node)
        try:
            self._policy.remove(node)
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self._failed("remove", error)

    def victims(self) -> Iterator[Node]:
        """The policy's first victims, without what it invents or should have forgotten.

        None at all from a policy that fails; what was named before it failed stands.
        """
        named = not self._known
        try:
            for victim in itertools.islice(self._policy.victims(), VICTIM_SCAN):
                if isinstance(victim, Node) and victim.namespace.nodes.get(victim.hash) is victim:
                    named = True
                    yield victim
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self._failed("victims", error)
        else:
            if not named:
                self._failed("victims", None)

    def _failed(self, call: str, error: BaseException | None) -> None:
        self._counters.policy_errors += 1
        if call not in self._logged:
            self._logged.add(call)
            policy = type(self._policy)
            log.error(
                "the eviction policy %s (%s.%s) %s in %s; the order of last use stands in for it; logged once",
                *(policy.name, policy.__module__, policy.__qualname__),
                *("failed" if error else "named no chunk that is there", call),
                exc_info=error,
            )
