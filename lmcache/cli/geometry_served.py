"""Geometries of engines that a running server knows: read back from the facts in its status."""

import re
from collections.abc import Mapping
from typing import Any

import attrs

from lmcache.errors import ConfigError, ProtocolError
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

_GROUP = re.compile(r"(\w+), (\d+) tokens per block, window (\d+), (\d+) shards, pages ([\d* ]+)")


@attrs.frozen
class Served:
    """One namespace of a server."""

    digest: str
    model: str
    chunk_size: int
    chunks: int
    """Stored now."""
    geometry: Geometry


def served_geometries(report: Mapping[str, Any]) -> list[Served]:
    """All that are registered. Raises ConfigError if there are none, ProtocolError for facts that cannot be read."""
    namespaces = report["namespaces"]
    if not namespaces:
        raise ConfigError(
            f"no engine has registered at {report['address']}", remedy="start an engine with the connector, then ask"
        )
    return [
        Served(
            each["digest"],
            each["facts"].get("model", ""),
            each["chunk_size"],
            each["chunks"],
            read_facts(each["facts"]),
        )
        for each in namespaces
    ]


def read_facts(facts: Mapping[str, str]) -> Geometry:
    """The geometry that `lmcache.geometry.fingerprint.geometry_facts` wrote down. Raises ProtocolError."""
    try:
        numbers = sorted(int(name.rpartition(".")[2]) for name in facts if name.startswith("geometry.group."))
        groups = tuple(_group(facts[f"geometry.group.{number}"]) for number in numbers)
        return Geometry(groups, int(facts["geometry.ranks"]), int(facts["geometry.alignment"]))
    except (KeyError, ValueError) as error:
        raise ProtocolError(
            f"the server describes a geometry in words that this lmcache does not read: {error}",
            remedy="install the same lmcache version on both sides",
        ) from error


def _group(fact: str) -> KVGroup:
    if fact == GroupKind.SCRATCH.value:
        return KVGroup(GroupKind.SCRATCH, 0, ())
    found = _GROUP.fullmatch(fact)
    if not found:
        raise ValueError(fact)
    kind, tokens, window, shards, pages = found.groups()
    sizes: list[int] = []
    for run in pages.split():
        size, _, count = run.partition("*")
        sizes += [int(size)] * int(count)
    return KVGroup(GroupKind(kind), int(tokens), tuple(sizes), int(window), int(shards))
