"""Limits and hints against a simple model of them: random stores, hits, pins and time, one-cell chunks, any policy.

The model knows who stored what first, what each request said of it, and what is pinned; it says what may go and what
must, and never looks at how the cache finds it. Long runs: `LMCACHE_MODEL_EXAMPLES=5000 pytest …`.
"""

import itertools
import math
import os

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from lmcache.core.accounts import Limits
from lmcache.core.cache import Cache
from lmcache.core.cells import CellAllocator
from lmcache.core.hints import Hints, Priority
from lmcache.core.index import Namespace
from lmcache.core.invariants import check_invariants
from lmcache.core.keys import ChainHash, NamespaceDigest
from lmcache.core.policy import EvictionPolicy
from lmcache.errors import Refused
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.plugins.eviction.lru import LRU
from lmcache.plugins.eviction.s3fifo import S3FIFO
from lmcache.plugins.eviction.sieve import SIEVE

EXAMPLES = int(os.environ.get("LMCACHE_MODEL_EXAMPLES", "40"))
CHUNK, OWNER, DEPTH = 4, 1, 4
TENANTS = ("", "quota", "paid", "both")
CELLS = 12
LIMITS = Limits({"quota": 3, "both": 6}, {"paid": 3, "both": 2})

PATHS = st.lists(st.sampled_from([0, 0, 1, 2]), min_size=1, max_size=DEPTH).map(tuple)
HINTS = st.builds(
    Hints,
    ttl_s=st.sampled_from([None, None, None, 2.0, 9.0]),
    priority=st.sampled_from([None, None, *Priority]),
    ends_session=st.booleans(),
)

Path = tuple[int, ...]


def hashes_of(path: Path) -> list[ChainHash]:
    return [ChainHash(bytes(path[: length + 1]).ljust(16, b".")) for length in range(len(path))]


def prefixes(path: Path) -> list[Path]:
    return [path[: length + 1] for length in range(len(path))]


class RetentionModel(RuleBasedStateMachine):
    policy_class: type[EvictionPolicy] = LRU

    @initialize(limited=st.booleans())
    def start(self, limited: bool) -> None:
        self.limits = LIMITS if limited else Limits()
        self.cache = Cache(CellAllocator(CELLS), self.policy_class(), limits=self.limits)
        self.cache.allocator.back(CELLS)
        digest = NamespaceDigest(b"n" * 16)
        geometry = Geometry((KVGroup(GroupKind.FULL, CHUNK, (64,)),))
        self.space = self.cache.namespaces[digest] = Namespace(digest, {}, geometry, CHUNK, 64)
        self.now = 0.0
        self.tenant: dict[Path, str] = {}
        self.until: dict[Path, float] = {}
        self.tickets: dict[int, Path] = {}
        self.pins: dict[int, tuple[Path, float]] = {}
        self.in_use_at: dict[Path, float] = {}

    # --------------------------------------------------------------------------------------------- what the model knows

    def there(self) -> set[Path]:
        every = itertools.chain.from_iterable(itertools.product((0, 1, 2), repeat=n) for n in range(1, DEPTH + 1))
        return {path for path in every if hashes_of(path)[-1] in self.space.nodes}

    def held(self) -> set[Path]:
        paths = [*self.tickets.values(), *(path for path, _ in self.pins.values())]
        return {each for path in paths for each in prefixes(path)}

    def share(self, tenant: str, paths: set[Path]) -> int:
        return sum(self.tenant[path] == tenant for path in paths)

    def promised(self, tenant: str) -> int:
        return self.limits.guarantees.get(tenant, 0)

    def use(self, path: Path, hints: Hints) -> None:
        for each in prefixes(path):
            until = math.inf if hints.ttl_s is None else self.now + hints.ttl_s
            self.until[each] = max(self.until.get(each, 0.0), until)

    # ------------------------------------------------------------------------------------------------------------ calls

    @rule(path=PATHS, tenant=st.sampled_from(TENANTS), hints=HINTS)
    def store(self, path: Path, tenant: str, hints: Hints) -> None:
        before = self.there()
        placed = self.cache.reserve(OWNER, self.space, tenant, b"", hashes_of(path), 0, 0, hints)
        if placed.reservation:
            self.cache.commit(OWNER, placed.reservation)
        after = self.there()
        stored = prefixes(path)[: len(placed.placed)]
        for each in stored:
            if each not in before:
                self.tenant[each] = tenant
                self.until.pop(each, None)
        gone = before - after
        assert set(stored) <= after
        assert not gone & self.held()
        for other in TENANTS:
            lost = self.share(other, before) - self.share(other, before - gone)
            if other != tenant and lost:
                assert self.share(other, before - gone) >= self.promised(other), "took what is guaranteed"
        if len(stored) < len(path):
            self.check_no_room(path[: len(stored) + 1], tenant, after)
        if stored:
            self.use(stored[-1], hints)

    def check_no_room(self, path: Path, tenant: str, after: set[Path]) -> None:
        """A store stopped before this chunk: nothing could go for it."""
        staying = self.held() | set(prefixes(path))
        could_go = {each for each in after if each not in staying and not any(
            other[: len(each)] == each for other in staying
        )}  # fmt: skip
        # what others have put below a tenant's chunk is not the tenant's to give up
        own = {
            each
            for each in could_go
            if all(self.tenant[other] == tenant for other in after if other[: len(each)] == each)
        }
        quota = self.limits.quotas.get(tenant)
        if quota is not None and self.share(tenant, after) >= quota:
            assert not own, "stopped although the tenant could have given up a chunk of its own"
            return
        assert self.cache.allocator.free == 0
        # a chunk that could go may hang above one that is guaranteed, so only leaves are looked at
        leaves = {each for each in could_go if not any(o != each and o[: len(each)] == each for o in after)}
        for each in leaves:
            owner = self.tenant[each]
            assert owner != tenant, "stopped although it could have replaced a chunk of its own"
            assert self.share(owner, after) <= self.promised(owner), "stopped although there was room to be made"

    @rule(path=PATHS, hints=HINTS)
    def look_up(self, path: Path, hints: Hints) -> None:
        expected = 0
        for each in prefixes(path):
            if each not in self.there() or self.until[each] <= self.now:
                break
            expected += 1
        ticket = self.cache.lookup(OWNER, self.space, hashes_of(path), DEPTH * CHUNK, hints=hints)
        found = ticket.hit.tokens // CHUNK if ticket else 0
        assert found <= expected
        assert found == expected or len(self.tickets) > 0  # one owner's tickets hold half of L1 at most
        if ticket:
            self.tickets[ticket.id] = path[:found]
            self.use(path[:found], hints)

    @rule(which=st.integers(0, 9))
    def end_load(self, which: int) -> None:
        if self.tickets:
            ticket = sorted(self.tickets)[which % len(self.tickets)]
            del self.tickets[ticket]
            self.cache.drop(OWNER, ticket)

    @rule(path=PATHS, seconds=st.sampled_from([3.0, 8.0]))
    def pin(self, path: Path, seconds: float) -> None:
        there = self.there()
        present = list(itertools.takewhile(lambda each: each in there and self.until[each] > self.now, prefixes(path)))
        try:
            pin = self.cache.pin(self.space, hashes_of(path), seconds)
        except Refused:
            pinned = {each for kept, _ in self.pins.values() for each in prefixes(kept)}
            assert len(pinned | set(present)) > CELLS // 4
            present = []
        else:
            assert (pin.tokens // CHUNK if pin else 0) == len(present)
            if pin:
                self.pins[pin.id] = (present[-1], self.now + seconds)
        for each in present:
            self.until[each] = max(self.until[each], self.now + seconds)

    @rule(which=st.integers(0, 9))
    def unpin(self, which: int) -> None:
        if self.pins:
            pin = sorted(self.pins)[which % len(self.pins)]
            del self.pins[pin]
            self.cache.unpin(pin)

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.in_use_at.update(dict.fromkeys(self.held(), self.now))
        self.cache.advance(self.now)
        self.pins = {number: pin for number, pin in self.pins.items() if pin[1] > self.now}
        late = {each for each in self.there() if max(self.until[each], self.in_use_at.get(each, 0.0)) + 1.0 < self.now}
        assert late <= self.held(), "kept what has expired"

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "cache"):
            check_invariants(self.cache)
            assert self.held() <= self.there()


class OnSieve(RetentionModel):
    policy_class = SIEVE


class OnS3FIFO(RetentionModel):
    policy_class = S3FIFO


@pytest.mark.parametrize("machine", [RetentionModel, OnSieve, OnS3FIFO])
def test_limits_and_hints_hold_in_any_order_of_calls(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
