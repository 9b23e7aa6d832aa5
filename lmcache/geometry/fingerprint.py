"""The facts of a geometry that decide who may share bytes.

Engines share objects only when all facts of their namespaces are equal. These are the geometry's part of them, each a
readable line, so that `lmcache status` and a refused registration can show where two engines differ.
"""

import itertools

from lmcache.geometry.groups import Geometry, KVGroup


def geometry_facts(geometry: Geometry, chunk_size: int) -> dict[str, str]:
    """Describe all that gives an object's bytes their meaning, the same text in any process on any host.

    Two geometries have equal facts exactly when their objects are interchangeable: layer names do not count, and an
    alignment that is spelt out counts as the same one left to its default. Scratch groups count, for group numbers do.
    The server adds them to an engine's own facts before it names the namespace.
    """
    facts = {
        "geometry.chunk_size": str(chunk_size),
        "geometry.ranks": str(geometry.ranks),
        "geometry.alignment": str(geometry.alignment),
    }
    for number, group in enumerate(geometry.groups):
        facts[f"geometry.group.{number}"] = _group_fact(group)
    return facts


def _group_fact(group: KVGroup) -> str:
    """One line, such as `full, 64 tokens per block, window 0, 1 shards, pages 73728*78`; no two groups share one."""
    if not group.cached:
        return group.kind.value
    pages = " ".join(f"{size}*{len(list(run))}" for size, run in itertools.groupby(group.page_bytes))
    return (
        f"{group.kind.value}, {group.tokens_per_block} tokens per block, window {group.window}, "
        f"{group.shards} shards, pages {pages}"
    )
