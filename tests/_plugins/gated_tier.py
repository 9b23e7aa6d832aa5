"""A plugin for servers of tests: a tier that gives no blob back until the test lets it."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmcache.core.hookspecs import hookimpl
from lmcache.core.tier import Buffer, StorageTier, TierLocation
from lmcache.errors import TierError

GATE = "open"
"""Name of the file whose being there opens it."""


class GatedTier(StorageTier):
    """Blobs in files of one folder, which outlive the server."""

    scheme = "gated"

    def __init__(self, location: TierLocation) -> None:
        self._folder = Path(location.path)

    def store(self, key: str, parts: Sequence[Buffer], deadline: float) -> None:
        (self._folder / key).write_bytes(b"".join(parts))

    def load(self, key: str, into: Sequence[memoryview], deadline: float) -> int:
        while not (self._folder / GATE).exists():
            if time.monotonic() >= deadline:
                raise TierError("the gate is shut")
            time.sleep(0.005)
        blob = rest = (self._folder / key).read_bytes()
        for view in into:
            piece, rest = rest[: len(view)], rest[len(view) :]
            view[: len(piece)] = piece
        return len(blob)

    def contains(self, keys: Sequence[str], deadline: float) -> list[bool]:
        return [(self._folder / key).exists() for key in keys]

    def delete(self, keys: Sequence[str], deadline: float) -> None:
        for key in keys:
            (self._folder / key).unlink(missing_ok=True)

    def keys(self) -> Iterator[tuple[str, int]]:
        return iter([(path.name, path.stat().st_size) for path in self._folder.iterdir() if path.name != GATE])


@hookimpl
def lmcache_register_storage_tiers() -> list[type[StorageTier]]:
    return [GatedTier]
