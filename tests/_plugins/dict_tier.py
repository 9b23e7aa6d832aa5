"""The smallest tier there is, for tests to use and to spoil."""

from lmcache.core.tier import StorageTier


class DictTier(StorageTier):
    """Blobs in a dict: always in time, and never full."""

    scheme = "dict"

    def __init__(self, shared=True):
        self.blobs = {}
        self.shared = shared

    def store(self, key, parts, deadline):
        self.blobs[key] = b"".join(parts)

    def load(self, key, into, deadline):
        blob = rest = self.blobs.get(key, b"")
        for view in into:
            piece, rest = rest[: len(view)], rest[len(view) :]
            view[: len(piece)] = piece
        return len(blob)

    def contains(self, keys, deadline):
        return [key in self.blobs for key in keys]

    def delete(self, keys, deadline):
        for key in keys:
            self.blobs.pop(key, None)

    def keys(self):
        return iter([(key, len(blob)) for key, blob in self.blobs.items()])
