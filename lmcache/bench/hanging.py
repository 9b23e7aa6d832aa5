"""`hanging://`: a storage tier that never answers, to see what that costs others. Loaded with `--plugin`."""

import threading
from collections.abc import Iterator, Sequence

from lmcache.core.hookspecs import hookimpl
from lmcache.core.tier import Buffer, StorageTier, TierLocation
from lmcache.errors import TierError


class HangingTier(StorageTier):
    """Takes every call and comes back from none before it is closed."""

    scheme = "hanging"

    def __init__(self, location: TierLocation) -> None:
        self._closed = threading.Event()

    def store(self, key: str, parts: Sequence[Buffer], deadline: float) -> None:
        """Hangs."""
        self._hang()

    def load(self, key: str, into: Sequence[memoryview], deadline: float) -> int:
        """Hangs."""
        return self._hang()

    def contains(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """Hangs."""
        return [bool(self._hang())]

    def delete(self, keys: Sequence[str], deadline: float) -> None:
        """Hangs."""
        self._hang()

    def keys(self) -> Iterator[tuple[str, int]]:
        """There are none."""
        return iter(())

    def close(self) -> None:
        """Let go of all that hangs."""
        self._closed.set()

    def _hang(self) -> int:
        self._closed.wait()
        raise TierError("it hung until it was closed")


@hookimpl
def lmcache_register_storage_tiers() -> list[type[StorageTier]]:
    """Offer the tier to `--l2 hanging://`."""
    return [HangingTier]
