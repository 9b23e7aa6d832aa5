"""Tiers behind a real server: what comes back after it was killed, evicted, damaged; what a tier that fails costs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_stand import CELL, CHUNK, GEOMETRY, ServerProcess, prompt, wait_until
from tier_stand import TinyEngine

from lmcache.core.control import Control
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

HYBRID = Geometry(
    (
        KVGroup(GroupKind.FULL, CHUNK, (CELL, 100), shards=2),
        KVGroup(GroupKind.SLIDING_WINDOW, CHUNK // 2, (1000, 1000), window=CHUNK + 3, shards=1),
        KVGroup(GroupKind.SCRATCH, 0, ()),
    ),
    ranks=2,
)
"""Two ranks with bytes of their own in one group and the same bytes in another."""


class Site:
    """A server over a folder, and an engine; the server may be killed and started again."""

    def __init__(self, folder: Path, *options: str, geometry: Geometry = GEOMETRY) -> None:
        self._options = ("--l2", f"disk://{folder}?size_gb=1", *options)
        self.server = ServerProcess(0, *self._options)
        self.engine = TinyEngine(self.server.address, geometry)

    def restart(self) -> None:
        self.server.kill()
        port = self.server.port
        self.server.close()
        self.server = ServerProcess(port, *self._options)
        epoch = self.server.epoch
        wait_until(lambda: self.engine.link().epoch == epoch)
        for rank in range(self.engine.geometry.ranks):
            wait_until(lambda rank=rank: self._epoch_of(rank) == epoch)

    def _epoch_of(self, rank: int) -> str:
        try:
            return self.engine.worker(rank).epoch
        except ConnectionError:
            return ""

    def settle(self) -> None:
        with Control(self.server.address) as control:
            control.wait_idle()

    def tier(self) -> dict[str, Any]:
        [tier] = self.server.status()["tiers"]
        return tier

    def close(self) -> None:
        self.engine.close()
        self.server.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tier"
    path.mkdir()
    return path


@pytest.fixture
def site(folder: Path) -> Iterator[Site]:
    site = Site(folder)
    yield site
    site.close()


def test_what_was_stored_is_hit_after_the_server_was_killed(site: Site) -> None:
    hashes = prompt(1, 20)
    assert site.engine.store(hashes) == 20
    site.settle()
    assert (site.tier()["counters"]["stored"], site.tier()["blobs"]) == (20, 20)

    site.restart()
    assert site.server.status()["gauges"]["nodes"] == 0
    assert site.engine.hit(hashes) == 20
    counters = site.tier()["counters"]
    assert (counters["loaded"], counters["stored"], counters["damaged"]) == (20, 0, 0)
    assert site.engine.hit(hashes) == 20  # from L1, now
    assert site.tier()["counters"]["searches"] == 1


def test_every_group_and_rank_of_a_hybrid_comes_back(folder: Path) -> None:
    site = Site(folder, geometry=HYBRID)
    try:
        hashes = prompt(1, 6)
        site.engine.store(hashes)
        site.settle()
        site.restart()

        assert site.engine.hit(hashes) == 6
        # a window needs the last two chunks only: two shards of six chunks, and one of two
        assert site.tier()["counters"]["loaded"] == 2 * 6 + 2
        assert site.engine.hit(hashes[:3]) == 3
        assert site.tier()["counters"]["loaded"] == 2 * 6 + 2 + 2
    finally:
        site.close()
