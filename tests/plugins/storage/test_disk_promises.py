"""The disk tier keeps every promise of a tier, with direct I/O and without, whatever decides what goes."""

from typing import ClassVar

import pytest

from lmcache.core.tier import TierLocation
from lmcache.plugins.storage.disk import DiskTier
from lmcache.plugins.testing import StorageTierSuite


class TestDisk(StorageTierSuite):
    options: ClassVar = {}

    @pytest.fixture(autouse=True)
    def folders(self, tmp_path):
        self.folder, self.small = tmp_path / "tier", tmp_path / "small"
        self.folder.mkdir()
        self.small.mkdir()

    def open_tier(self):
        return DiskTier(TierLocation("disk", path=str(self.folder), options={"size_gb": "0.1", **self.options}))

    def open_small_tier(self, limit):
        options = {"size_gb": str(limit / 2**30), **self.options}
        return DiskTier(TierLocation("disk", path=str(self.small), options=options))


class TestThroughThePageCache(TestDisk):
    options: ClassVar = {"direct": "off"}


class TestFlushed(TestDisk):
    options: ClassVar = {"sync": "on"}


@pytest.mark.parametrize(
    "policy", ["LRU", "FIFO", "LFU", "SLRU", "ARC", "SIEVE", "S3-FIFO", "W-TinyLFU", "GDSF", "prefix-aware"]
)
def test_any_policy_keeps_it_within_its_limit(tmp_path, policy):
    tier = DiskTier(TierLocation("disk", path=str(tmp_path), options={"size_gb": "0.001", "policy": policy}))
    for number in range(800):
        tier.store(f"{number % 300:040x}", [bytes(number * 7 % 20_000 + 1)], float("inf"))
        assert tier.usage().bytes <= tier.usage().limit_bytes
    tier.close()
    assert sum(-(-file.stat().st_size // 4096) * 4096 for file in tmp_path.glob("??/*")) == tier.usage().bytes
