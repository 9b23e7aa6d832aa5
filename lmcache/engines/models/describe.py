"""A model's KV groups before anybody starts it: layers from the table, sorted as the engine would."""

from collections.abc import Sequence

import attrs

from lmcache.engines.models.grouping import Group, group_layers
from lmcache.engines.models.layers import CacheLayer, Latent
from lmcache.engines.models.running import Running
from lmcache.engines.models.source import ModelConfig
from lmcache.engines.models.table import layers_of
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup


@attrs.frozen
class Described:
    """A geometry, and the layers of each of its groups, scratch included."""

    geometry: Geometry
    groups: tuple[Group, ...]


def describe(config: ModelConfig, running: Running) -> Described:
    """Describe a model by our own table and rules. Raises ConfigError, in the words of a command line."""
    groups = group_layers(layers_of(config, running))
    return Described(geometry_of(groups, running.ranks), groups)


def geometry_of(groups: Sequence[Group], ranks: int) -> Geometry:
    """The geometry that the connector would register for these groups."""
    whole = Geometry(tuple(_kv_group(group, ranks) for group in groups), ranks)
    return attrs.evolve(whole, hit_alignment=whole.block_multiple)


def _kv_group(layers: Group, ranks: int) -> KVGroup:
    spec = layers[0].spec
    if spec.kind is GroupKind.SCRATCH:
        return KVGroup(GroupKind.SCRATCH, 0, ())
    return KVGroup(
        spec.kind,
        spec.block_size,
        tuple(layer.spec.content_bytes for layer in layers),
        window=getattr(spec, "window", 0) or getattr(spec, "span", 0),
        shards=1 if all(map(_replicated, layers)) else ranks,
        layers=tuple(layer.name for layer in layers),
    )


def _replicated(layer: CacheLayer) -> bool:
    """Whether vLLM says that all ranks hold the same."""
    return isinstance(layer.spec, Latent) and layer.spec.replicated
