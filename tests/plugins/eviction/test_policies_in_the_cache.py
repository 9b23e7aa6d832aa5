"""Every built-in policy in the real cache: filled several times over, with objects of two sizes, aborts and pins."""

import hashlib
import random

import pytest

from lmcache.core.cache import Cache
from lmcache.core.cells import CellAllocator
from lmcache.core.index import Namespace
from lmcache.core.invariants import check_invariants
from lmcache.core.keys import ChainHash, NamespaceDigest
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.plugins.manager import PluginManager

CHUNK, CELL, CELLS = 16, 1024, 240
SMALL = Geometry((KVGroup(GroupKind.FULL, 16, (CELL,)),))
LARGE = Geometry(
    (KVGroup(GroupKind.FULL, 16, (2 * CELL,)), KVGroup(GroupKind.SLIDING_WINDOW, 16, (CELL,), window=CHUNK))
)
POLICIES = PluginManager().policies()


def prompt(name, chunks):
    return [ChainHash(hashlib.sha256(f"{name} {chunk}".encode()).digest()[:16]) for chunk in range(chunks)]


class Engines:
    """Two engines with one cache, and a random walk of requests: popular prompts, branches of them, and strangers."""

    def __init__(self, policy):
        self.cache = Cache(CellAllocator(CELLS), policy)
        self.cache.allocator.back(CELLS)
        self.random = random.Random(4)
        self.spaces = []
        for number, geometry in enumerate((SMALL, LARGE)):
            digest = NamespaceDigest(bytes([number]) * 16)
            space = self.cache.namespaces[digest] = Namespace(digest, {}, geometry, CHUNK, CELL)
            self.spaces.append(space)
        self.stored = 0

    def request(self, number):
        space = self.random.choice(self.spaces)
        popular = prompt(f"popular {self.random.randrange(4)}", 12)
        hashes = popular[: self.random.randrange(1, 12)] + prompt(f"own {number}", self.random.randrange(8))
        ticket = self.cache.lookup(1, space, hashes, len(hashes) * CHUNK)
        for group in range(len(space.geometry.groups)):
            placed = self.cache.reserve(2, space, "", b"", hashes, group, 0)
            if placed.reservation and self.random.random() < 0.1:
                self.cache.abort(2, placed.reservation)
            elif placed.reservation:
                self.cache.commit(2, placed.reservation)
                self.stored += len(placed.cells) // 4
        if ticket and self.random.random() < 0.5:
            self.cache.confirm(ticket.id, space, 0)
        elif self.random.random() < 0.3:
            self.cache.owner_gone(1)


@pytest.mark.parametrize("name", POLICIES)
def test_a_cache_filled_many_times_over_stays_whole_and_the_policy_never_fails(name):
    engines = Engines(PluginManager().make_policy(name))
    for number in range(600):
        engines.request(number)
        if number % 20 == 0:
            check_invariants(engines.cache)
    engines.cache.owner_gone(1)
    check_invariants(engines.cache)
    counters = engines.cache.counters
    assert engines.stored > 3 * CELLS
    assert counters.policy_errors == 0
    assert counters.chunks_evicted > 100
    assert (engines.cache.tickets, engines.cache.reservations) == ({}, {})
    # what is left free is less than the largest object
    assert engines.cache.allocator.free < 2 * 3
    known = sum(len(space.nodes) for space in engines.spaces)
    assert len(list(engines.cache.policy.victims())) == known


@pytest.mark.parametrize("name", POLICIES)
def test_prompts_stored_in_several_calls_keep_their_heads(name):
    """Elsewhere the first part of a long prompt is the oldest, and goes before what is of no use without it."""
    cache = Cache(CellAllocator(64), PluginManager().make_policy(name), pin_share=1.0)
    cache.allocator.back(64)
    digest = NamespaceDigest(bytes(16))
    space = cache.namespaces[digest] = Namespace(digest, {}, SMALL, CHUNK, CELL)
    prompts = [prompt(f"long {number}", 16) for number in range(8)]
    for hashes in prompts:
        for start in range(0, 16, 4):
            parent = hashes[start - 1] if start else b""
            placed = cache.reserve(1, space, "", parent, hashes[start : start + 4], 0, 0)
            cache.commit(1, placed.reservation)
    kept = [sum(chain_hash in space.nodes for chain_hash in hashes) for hashes in prompts]
    for hashes, count in zip(prompts, kept, strict=True):
        assert all(chain_hash in space.nodes for chain_hash in hashes[:count])
    assert sum(kept) == 64
    assert kept[-1] == 16
