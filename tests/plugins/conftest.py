"""Plugins that a test writes for itself: files, modules on the path, installed distributions."""

import sys
import textwrap

import pytest


class Shelf:
    """A folder on `sys.path`, empty at first."""

    def __init__(self, folder):
        self.folder = folder

    def module(self, name, source):
        """Write a module, packages above it included, and return its path."""
        path = self.folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("from lmcache.core.hookspecs import hookimpl\n" + textwrap.dedent(source))
        return path

    def policy(self, module, name):
        """Write a module that offers an eviction policy."""
        return self.module(
            module,
            f"""
            from lmcache.plugins.eviction.lru import LRU

            class Policy(LRU):
                name = {name!r}

            @hookimpl
            def lmcache_register_eviction_policies():
                return [Policy]
            """,
        )

    def distribution(self, name, **entry_points):
        """Make a distribution look installed, version 1.0, with these entry points in the group `lmcache`."""
        metadata = self.folder / f"{name.replace('-', '_')}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{entry} = {module}" for entry, module in entry_points.items()]
        if lines:
            (metadata / "entry_points.txt").write_text("\n".join(["[lmcache]", *lines]) + "\n")


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield Shelf(tmp_path)
    for name in set(sys.modules) - before:
        if not name.startswith("lmcache."):
            del sys.modules[name]
