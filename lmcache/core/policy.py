"""What an eviction policy is: an order among chunk nodes, and nothing else.

The cache tells a policy what it keeps, uses and drops, and asks it who should go next. Pins, sizes, tenants, what is
being written, and that leaves go before trunks, belong to `core/cache.py`: a poor policy wastes space and does no harm.

Policies run in the server's one thread, inside a request: every call must return quickly, without I/O, and must not
raise. What a call costs may grow with the nodes that it is given, not with those that it knows: there may be millions.
"""

import abc
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, ClassVar, Protocol


class ChunkNode(Protocol):
    """What a policy may know of a cached chunk. The same object comes back in every call, so it may key a dict.

    Policies read it and write nothing but `policy_state`. It cannot be referred to weakly.
    """

    @property
    def key(self) -> Hashable:
        """What is cached here: equal for the same chunk whenever it comes again, and for no other.

        Refers to nothing, so it is what a policy may keep of a node that was removed, within bounds.
        """

    @property
    def parent(self) -> "ChunkNode | None":
        """The chunk before it in its prompt; None for a prompt's first chunk."""

    @property
    def depth(self) -> int:
        """Chunks before it in its prompt."""

    @property
    def tenant(self) -> str:
        """Who stored it, in clear; empty when the engine names nobody."""

    @property
    def cells(self) -> int:
        """Arena cells that it takes now, over all groups and shards. 0 at its insertion; grows as it is stored."""

    @property
    def priority(self) -> int:
        """What requests said of it: 1 high, 0 normal, -1 low. The cache honours it itself; an order need not.

        May change at any time.
        """

    policy_state: Any
    """Free for the policy: whatever it wants to remember about this node. The cache never looks at it."""


class EvictionPolicy(abc.ABC):
    """Order among chunk nodes. Subclass it, set `name`, return the class from `lmcache_register_eviction_policies`.

    The server makes one, without arguments, before it serves. `plugins.testing.EvictionPolicySuite` checks a policy
    against everything said here; `plugins.eviction.queue.NodeQueue` is a list that most policies can be made of.
    """

    name: ClassVar[str]
    """What users write after `--eviction-policy`; matched without regard to case."""

    def resize(self, cells: int) -> None:  # noqa: B027  # most policies need not know
        """L1 can hold `cells` cells. Called before the first `insert`, and again should L1 grow; a node takes some.

        It is what the user asked for, not what is free or has memory by now: an upper bound, for how much to remember.
        What a policy counts in nodes is known better from the nodes themselves: when `victims` is called, L1 is full.
        """

    @abc.abstractmethod
    def insert(self, node: ChunkNode) -> None:
        """`node` is new to the cache; its parent, if it has one, is known. Called before any other call about it."""

    @abc.abstractmethod
    def touch(self, nodes: Sequence[ChunkNode]) -> None:
        """`nodes` were used by one request, in this order: from the tail of its chain to the root.

        Called with known nodes only, each of them once. A chain's root comes last, so a policy that goes by recency
        keeps roots longest. There are two kinds, and a prompt usually causes one of each, the lookup first:

        - a lookup hit `nodes`: none of them is new, each was used once more;
        - a store put new nodes below a chain: those inserted since come first, `nodes[0]` among them; the others were
          named by the prompt's lookup, or by the part of it that was stored before, so nobody used them once more.
          `plugins.eviction.arrivals.Arrivals` tells the two apart for policies that count.

        Also called with dozens of nodes that are in use when these stand first in line, and so in the way of a search
        for victims.
        """

    @abc.abstractmethod
    def remove(self, node: ChunkNode) -> None:
        """`node` left the cache, by eviction or otherwise. Called once per node, in any order of chains.

        Nothing may refer to it afterwards, not even in a cycle: the server runs with the cyclic garbage collector off.
        What came and went may be remembered by `node.key`, within bounds that do not grow with time.
        """

    @abc.abstractmethod
    def victims(self) -> Iterator[ChunkNode]:
        """Every known node, once, the one to evict first coming first. A new iterator each time.

        Lazy: the cache takes as many as it needs (usually one), skips those that it may not evict, and makes no other
        call before it has stopped iterating. That a node was yielded does not mean that it goes; `remove` says so.
        """
