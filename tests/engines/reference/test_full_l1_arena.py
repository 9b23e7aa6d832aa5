"""How much of a full L1 is used, under every policy; and policies that fail while it is full."""

import contextlib
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from reference_stand import RunningServer, StartServer, assert_same, engine_at, prompt

from lmcache.core.client import Client, ClientSettings, Engine, ServerAddress
from lmcache.core.keys import HASH_BYTES
from lmcache.core.link import Link
from lmcache.core.protocol import Role
from lmcache.engines.reference import engine as reference
from lmcache.engines.reference.shapes import GEOMETRIES
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.plugins.manager import PluginManager

POLICIES = tuple(PluginManager().policies())
MB = 1_000_000
OBJECTS = (10 * MB, 13_631_488, 17 * MB, 20_971_520)
"""Bytes of an object of each of four models."""
CELLS = 512


@contextlib.contextmanager
def writer(server: RunningServer, number: int, page_bytes: int) -> Iterator[Link]:
    """A worker of a model whose chunks are objects of one page."""
    geometry = Geometry((KVGroup(GroupKind.FULL, 256, (page_bytes // 16,) * 16),))
    worker = Engine({"model": f"model {number}"}, geometry, Role.WORKER)
    client = Client(ServerAddress.parse(server.address), worker, ClientSettings(deadline=30.0))
    client.start(wait=30.0)
    try:
        yield client.link()
    finally:
        client.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_l1_is_used_to_95_percent_by_objects_of_10_mb_and_more(policy: str, start_server: StartServer) -> None:
    server = start_server("--l1-size-gb", str(CELLS / 1024), "--l1-cell-kb", "1024", "--eviction-policy", policy)
    dice = random.Random(1)
    used: list[int] = []
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(writer(server, n, size)) for n, size in enumerate(OBJECTS)]
        for _ in range(120):
            link = dice.choice(links)
            hashes = dice.randbytes(HASH_BYTES * dice.randint(1, 6))
            reserved = link.reserve("", b"", hashes, 0, 0)
            assert len(reserved.placed) == len(hashes) // HASH_BYTES
            link.commit(reserved.reservation)
            used.append(server.gauges()["cells_used"])
    full = next(number for number, cells in enumerate(used) if cells >= 0.95 * CELLS)
    assert server.counters()["cells_evicted"] >= 2 * CELLS
    assert min(used[full:]) >= 0.95 * CELLS


# -------------------------------------------------------------------------------------------------- policies that fail

BROKEN = '''
from lmcache.core.hookspecs import hookimpl
from lmcache.core.policy import EvictionPolicy
from lmcache.plugins.eviction.lru import LRU


class Silent(EvictionPolicy):
    """Says nothing about anything."""

    name = "silent"

    def insert(self, node): pass
    def touch(self, nodes): pass
    def remove(self, node): pass
    def victims(self): return iter(())


class Raising(Silent):
    name = "raising"

    def resize(self, cells): raise OSError("resize")
    def insert(self, node): raise KeyError("insert")
    def touch(self, nodes): raise ZeroDivisionError("touch")
    def remove(self, node): raise SystemExit(3)
    def victims(self): raise RuntimeError("victims")


class Halfway(LRU):
    """Fails when it has named one node."""

    name = "halfway"

    def victims(self):
        for node in super().victims():
            yield node
            raise RuntimeError("the rest")


class Nonsense(Silent):
    name = "nonsense"

    def victims(self): return iter([None, 7, "node", object(), self])


class NoIterator(Silent):
    name = "no-iterator"

    def victims(self): return 5


class Ghosts(LRU):
    """Names only nodes that are gone, or one node for ever."""

    name = "ghosts"

    def __init__(self):
        super().__init__()
        self.gone = []

    def remove(self, node):
        super().remove(node)
        self.gone.append(node)

    def victims(self):
        yield from self.gone
        first = next(super().victims(), None)
        while first is not None:
            yield first


class Youngest(LRU):
    """Names roots first, and what is in use: allowed, though foolish."""

    name = "youngest"

    def victims(self): return iter(sorted(super().victims(), key=lambda node: node.depth))


class Meddling(LRU):
    """Writes to what it may only read."""

    name = "meddling"

    def insert(self, node):
        super().insert(node)
        for field, value in (("key", b""), ("depth", -5), ("tenant", None)):
            try:
                setattr(node, field, value)
            except AttributeError:
                pass


@hookimpl
def lmcache_register_eviction_policies():
    return [Raising, Silent, Halfway, Nonsense, NoIterator, Ghosts, Youngest, Meddling]
'''

CHUNK = 64
COUNTED = ("raising", "silent", "halfway", "nonsense", "no-iterator")
"""Those whose calls fail; the others are merely of no use."""


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    path = tmp_path / "broken_policies.py"
    path.write_text(BROKEN)
    return str(path)


@pytest.mark.parametrize("policy", [*COUNTED, "ghosts", "youngest", "meddling"])
def test_a_policy_that_fails_costs_nobody_an_answer_and_is_named_in_the_log(
    policy: str, plugin: str, start_server: StartServer
) -> None:
    small = ("--l1-size-gb", repr(64 * (16 << 10) / (1 << 30)), "--l1-cell-kb", "16", "--chunk-size", str(CHUNK))
    server = start_server(*small, "--plugin", plugin, "--eviction-policy", policy)
    shape = GEOMETRIES["hybrid"]
    prompts = [prompt(5 * CHUNK + 9, seed=number) for number in range(9)]
    with reference.Engine(shape, seed=1) as alone, engine_at(server, shape, seed=1) as engine:
        for number, tokens in enumerate(prompts):
            asked = [tokens, prompts[max(0, number - 1)]]
            engine.drop_prefix_cache()
            alone.drop_prefix_cache()
            assert_same(alone.generate(asked, 2), engine.generate(asked, 2))
        engine.drop_prefix_cache()
        # what was stored last stays, as under LRU
        assert engine.generate(prompts[-1:], 2)[0].hit_tokens == 5 * CHUNK
    server.wait_idle()
    gauges, counters = server.gauges(), server.counters()
    assert counters["chunks_evicted"] > 0
    assert gauges["cells_used"] >= 0.95 * gauges["cells_total"]
    assert {gauges[name] for name in ("tickets", "reservations", "pinned_nodes", "cells_reserved")} == {0}
    assert counters["internal_errors"] == 0
    server.process.terminate()
    _, log = server.process.communicate(timeout=30)
    assert server.process.returncode == 0
    failures = [line for line in log.splitlines() if "the eviction policy" in line]
    if policy not in COUNTED:
        assert (counters["policy_errors"], failures) == (0, [])
        return
    assert counters["policy_errors"] > 0
    assert all(f"the eviction policy {policy} (" in line and "broken_policies" in line for line in failures)
    calls = set(re.findall(r" in (\w+); the order of last use stands in for it", "\n".join(failures)))
    assert calls == ({"resize", "insert", "touch", "remove", "victims"} if policy == "raising" else {"victims"})
    assert len(failures) == len(calls), "logged more than once"
