"""Row 6: whether what a policy does for a request depends on how much is cached.

Two policies of one class, one that knows a thousand nodes of a real index and one that knows a million, take turns
at the same work. Part of the ratio is the machine's: what was not looked at for a million nodes lies in no CPU cache.
"""

import gc
import itertools
import random
import time
from typing import cast

from lmcache.bench.figures import Figure, Step, at_most, figure
from lmcache.core.accounts import Account
from lmcache.core.index import Namespace, Node
from lmcache.core.interpreter import collector_off
from lmcache.core.keys import HASH_BYTES, ChainHash, NamespaceDigest
from lmcache.core.policy import EvictionPolicy
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.plugins.manager import PluginManager

TARGET = at_most(4.0)
"""Times the cost with a thousand nodes: room for memory that is far away, none for work that grows with the nodes."""

FEW = 1_000
CHAIN = 20
"""Chunks of a prompt, all of them stored, used and evicted together."""

PROMPTS = 25
"""Prompts used, and prompts replaced, in each sample."""


class Subject:
    """A policy that knows `nodes` nodes, in prompts of `CHAIN` chunks."""

    def __init__(self, policy: EvictionPolicy, nodes: int) -> None:
        self._policy = policy
        self._space = Namespace(
            NamespaceDigest(bytes(HASH_BYTES)), {}, Geometry((KVGroup(GroupKind.FULL, 16, (1024,)),)), 16, 1024
        )
        self._numbers = itertools.count()
        self._account = Account("")
        self._random = random.Random(5)  # noqa: S311 - which prompts are used, the same ones in every run
        policy.resize(nodes)
        self._prompts = [self._store() for _ in range(nodes // CHAIN)]

    def use(self) -> float:
        """CPU seconds that it takes to use some prompts."""
        chosen = [self._any_prompt() for _ in range(PROMPTS)]
        started = time.thread_time()
        for nodes in chosen:
            self._policy.touch(nodes)
        return time.thread_time() - started

    def replace(self) -> float:
        """CPU seconds that it takes to evict some prompts' worth of chunks, and to store what they make room for."""
        started = time.thread_time()
        for _ in range(PROMPTS):
            for victim in list(itertools.islice(self._policy.victims(), CHAIN)):
                self._policy.remove(victim)
                del self._space.nodes[cast("Node", victim).hash]
            self._prompts.append(self._store())
        return time.thread_time() - started

    def _any_prompt(self) -> list[Node]:
        """What is left of some prompt, from its tail to its root."""
        while True:
            number = self._random.randrange(len(self._prompts))
            left = [node for node in self._prompts[number] if node.hash in self._space.nodes]
            if left:
                return left
            self._prompts[number] = self._prompts[-1]
            self._prompts.pop()

    def _new_hash(self) -> ChainHash:
        return ChainHash(next(self._numbers).to_bytes(HASH_BYTES, "little"))

    def _store(self) -> list[Node]:
        above: Node | None = None
        nodes: list[Node] = []
        for _ in range(CHAIN):
            above = Node(self._space, self._new_hash(), above, "", self._account)
            self._policy.insert(above)
            above.cells = 1
            self._space.nodes[above.hash] = above
            nodes.append(above)
        nodes.reverse()
        self._policy.touch(nodes)
        return nodes


def measure_policies(nodes: int, samples: int, step: Step) -> list[Figure]:
    """For every policy, what uses and evictions cost with `nodes` nodes, against what they cost with a thousand."""
    figures: list[Figure] = []
    plugins = PluginManager()
    for name in plugins.policies():
        step(f"{name} with {nodes:,} chunks")
        with collector_off():
            few, many = (Subject(plugins.make_policy(name), count) for count in (FEW, nodes))
            for what, work in (("use", Subject.use), ("evict and store", Subject.replace)):
                work(few), work(many)
                pairs = [(work(few), work(many)) for _ in range(samples)]
                figures.append(_flatness(f"{what} at {nodes:,} chunks", name, pairs))
            del few, many
        gc.collect()
    return figures


def _flatness(what: str, policy: str, pairs: list[tuple[float, float]]) -> Figure:
    per_chunk = sorted(1e6 * many / (PROMPTS * CHAIN) for _, many in pairs)
    ratios = [many / few for few, many in pairs]
    return figure(
        6, what, policy, ratios, "× a thousand's", target=TARGET, beside={"µs a chunk": per_chunk[len(pairs) // 2]}
    )
