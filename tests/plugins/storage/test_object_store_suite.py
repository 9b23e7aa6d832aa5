"""The conformance suite of storage tiers, against an S3-compatible server and a folder."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from s3_stand import S3Server, object_store_runtime  # noqa: F401 - a fixture

from lmcache.core.tier import TierLocation
from lmcache.plugins.storage.object_store import FolderTier, S3Tier
from lmcache.plugins.testing import StorageTierSuite

pytestmark = pytest.mark.usefixtures("object_store_runtime")

_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    pytest.importorskip("moto.server", reason="moto's server is not installed (extra lmcache[test])")
    server = S3Server(tmp_path_factory.mktemp("moto"))
    yield server
    server.close()


class TestS3(StorageTierSuite):
    search = settings(max_examples=3, stateful_step_count=10, deadline=None)  # a request takes moto 20 ms
    location: TierLocation

    @pytest.fixture(autouse=True)
    def _at(self, server: S3Server) -> None:
        self.location = server.location(f"/suite/{next(_numbers)}")

    def open_tier(self) -> S3Tier:
        return S3Tier(self.location)


class TestFolder(StorageTierSuite):
    location: TierLocation

    @pytest.fixture(autouse=True)
    def _at(self, tmp_path: Path) -> None:
        self.location = TierLocation("file", path=str(tmp_path))

    def open_tier(self) -> FolderTier:
        return FolderTier(self.location)
