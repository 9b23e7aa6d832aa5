"""The plugin: a storage tier that keeps each blob in a file of one folder, and the hook that offers it."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from lmcache.core.hookspecs import hookimpl
from lmcache.core.tier import Buffer, StorageTier, TierLocation
from lmcache.errors import ConfigError, TierError


class FolderTier(StorageTier):
    """Blobs in files named by key. Any number of servers may share the folder; nothing bounds it."""

    scheme = "folder"
    options: ClassVar[Mapping[str, str]] = {"make": "yes: make the folder if it is not there"}

    def __init__(self, location: TierLocation) -> None:
        self._folder = Path(location.path)
        if location.options.get("make") == "yes":
            self._folder.mkdir(parents=True, exist_ok=True)
        if location.host or not self._folder.is_dir():
            raise ConfigError(f"--l2 {location}: there is no such folder", remedy="use folder:///PATH?make=yes")

    def store(self, key: str, parts: Sequence[Buffer], deadline: float) -> None:
        """Under another name first: a file that has a key for its name is whole."""
        _check(deadline)
        part = self._folder / f"{key}.{time.monotonic_ns()}.part"
        try:
            with part.open("xb") as file:
                file.writelines(parts)
            part.rename(self._folder / key)
        finally:
            part.unlink(missing_ok=True)

    def load(self, key: str, into: Sequence[memoryview], deadline: float) -> int:
        """Straight into the buffers."""
        _check(deadline)
        try:
            with (self._folder / key).open("rb", buffering=0) as file:
                for buffer in into:
                    while buffer and (count := file.readinto(buffer)):
                        buffer = buffer[count:]  # noqa: PLW2901  # what is left to fill
                return file.seek(0, 2)
        except FileNotFoundError:
            return 0

    def contains(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """As the file system says."""
        return [(self._folder / key).exists() for key in keys]

    def delete(self, keys: Sequence[str], deadline: float) -> None:
        """Remove files."""
        for key in keys:
            (self._folder / key).unlink(missing_ok=True)

    def keys(self) -> Iterator[tuple[str, int]]:
        """Files whose names are no keys are somebody else's, or not whole."""
        for path in self._folder.glob("[0-9a-f]" * 40):
            yield path.name, path.stat().st_size


def _check(deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise TierError("the deadline has passed")


@hookimpl
def lmcache_register_storage_tiers() -> list[type[StorageTier]]:
    """Offer the tier to `lmcache server --l2 folder:///PATH`."""
    return [FolderTier]
