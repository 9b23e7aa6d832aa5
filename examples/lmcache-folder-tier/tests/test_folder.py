"""The tier keeps every promise of a tier, and says what it lacks."""

from pathlib import Path

import pytest
from lmcache_folder_tier.tier import FolderTier

from lmcache.core.tier import TierLocation
from lmcache.errors import ConfigError
from lmcache.plugins.testing import StorageTierSuite


class TestPromises(StorageTierSuite):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = str(tmp_path)

    def open_tier(self) -> FolderTier:
        return FolderTier(TierLocation("folder", path=self.path))


def test_a_folder_is_made_only_if_the_user_says_so(tmp_path: Path) -> None:
    path = str(tmp_path / "none")
    with pytest.raises(ConfigError, match="there is no such folder"):
        FolderTier(TierLocation("folder", path=path))
    FolderTier(TierLocation("folder", path=path, options={"make": "yes"}))
    assert (tmp_path / "none").is_dir()
