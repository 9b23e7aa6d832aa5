"""A cache of single chunks around a policy, small enough to be checked by hand."""

from lmcache.core.policy import EvictionPolicy
from lmcache.plugins.testing import FakeNode


class SmallCache:
    """Holds `capacity` chunks, each a prompt of its own and named by a letter."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.nodes: dict[str, FakeNode] = {}
        self.hits = ""
        self.evicted = ""
        policy.resize(capacity)

    def ask(self, letters: str) -> "SmallCache":
        """Ask for chunks, one after the other; those that are not there are stored."""
        for letter in letters:
            if letter in self.nodes:
                self.hits += letter
            else:
                self._store(letter)
            self.policy.touch([self.nodes[letter]])
        return self

    def _store(self, letter: str) -> None:
        if len(self.nodes) == self.capacity:
            victim = next(self.policy.victims())
            self.evicted += str(victim.key)
            del self.nodes[str(victim.key)]
            self.policy.remove(victim)
        self.nodes[letter] = FakeNode(key=letter)
        self.policy.insert(self.nodes[letter])
