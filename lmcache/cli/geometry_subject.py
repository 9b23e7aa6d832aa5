"""What `lmcache geometry` explains, and how it was found out."""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from lmcache.errors import ConfigError
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

if TYPE_CHECKING:
    from lmcache.engines.models.describe import Described
    from lmcache.engines.models.layers import CacheLayer
    from lmcache.engines.models.running import Running
    from lmcache.engines.models.source import ModelConfig


@attrs.frozen
class GroupFacts:
    """One KV group, for people."""

    number: int
    group: KVGroup
    layers: int
    """Layers of the model that it serves."""
    holds: tuple[str, ...]
    """What is in its pages: `32 × keys and values, 8 heads of 128, bfloat16`."""
    skipped: str = ""
    """Why it is not cached; empty for a cached group."""


@attrs.frozen
class Subject:
    """A geometry, where it comes from, and what is known of its groups."""

    model: str
    title: str
    """The first line."""
    via: str
    """`vllm`, `table` or `server`."""
    basis: str
    """One sentence: whose grouping this is."""
    geometry: Geometry
    groups: tuple[GroupFacts, ...]
    cell_bytes: int
    engine: str = ""
    """Whose, with its version."""
    architecture: str = ""
    chunk_size: int = 0
    """What a running server has given it; 0 otherwise."""


# ------------------------------------------------------------------------------------------------ before it is started


def explain_model(path: str, running: "Running", via: str, cell_bytes: int) -> Subject:
    """Explain a `config.json`. Raises ConfigError for what it does not say, and for what nobody knows."""
    from lmcache.engines.models.describe import describe
    from lmcache.engines.models.source import read_config

    config = read_config(path)
    ours = describe(config, running)
    sorted_ = _sorted_by_vllm(config, running, ours, via)
    ranks = f", {running.ranks} ranks" if running.ranks > 1 else ""
    return Subject(
        config.name,
        f"{config.name} ({config.architecture}), {config.layers} layers{ranks}, KV dtype {running.kv_dtype}",
        sorted_.via,
        f"KV groups of vLLM {sorted_.version} on Hopper GPUs: layers from lmcache's table, sorted {sorted_.how}.",
        sorted_.described.geometry,
        tuple(_facts(n, g, sorted_.described.geometry.groups[n]) for n, g in enumerate(sorted_.described.groups)),
        cell_bytes,
        f"vllm {sorted_.version}",
        config.architecture,
    )


@attrs.frozen
class _Sorted:
    """Layers in groups, and whose work that is."""

    described: "Described"
    via: str
    version: str
    how: str


def _sorted_by_vllm(config: "ModelConfig", running: "Running", ours: "Described", via: str) -> _Sorted:
    """What vLLM makes of the layers; what we make of them (`ours`) where it is not to be asked or does not answer."""
    from lmcache.engines.models.grouping import VERSION

    copy = "by lmcache's copy of its rules"
    if via == "table":
        return _Sorted(ours, "table", VERSION, copy)
    from lmcache.engines.models.describe import Described
    from lmcache.engines.vllm.model_groups import ask_vllm, vllm_is_installed

    if not vllm_is_installed():
        if via == "vllm":
            raise ConfigError("--via vllm: no vLLM is installed here", remedy="use --via table, which needs none")
        return _Sorted(ours, "table", VERSION, f"{copy} (vLLM is not installed here)")
    try:
        asked = ask_vllm(config.path, running)
    except ConfigError as error:
        if via == "vllm":
            raise
        return _Sorted(ours, "table", VERSION, f"{copy}, as {error.args[0]}")
    layers = {layer.name: layer for group in ours.groups for layer in group}
    groups = tuple(tuple(layers[name] for name in names) for names in asked.layers)
    return _Sorted(Described(asked.geometry, groups), "vllm", asked.version, "by vLLM's own code")


def _facts(number: int, layers: Sequence["CacheLayer"], group: KVGroup) -> GroupFacts:
    counts = Counter(str(layer.spec) for layer in layers)
    numbers = {found[1] if (found := re.search(r"\.layers\.(\d+)\.?", layer.name)) else layer.name for layer in layers}
    return GroupFacts(
        number,
        group,
        len(numbers),
        tuple(f"{count} × {what}" for what, count in counts.items()),
        "" if group.cached else _why_skipped(layers[0]),
    )


def _why_skipped(layer: "CacheLayer") -> str:
    window = getattr(layer.spec, "window", 0)
    if window:
        return f"vLLM computes the last {window} tokens of every hit anew instead (bounded replay)"
    return "a ring that belongs to one request; no hit needs it"


# ------------------------------------------------------------------------------------------------------------- running


def explain_server(address: str, keys: str | None = None) -> list[Subject]:
    """Explain what is registered at a running server. Raises what asking it raises, and ConfigError for nothing."""
    from lmcache.cli.conversation import conversation
    from lmcache.cli.geometry_served import Served, served_geometries
    from lmcache.core.control import ServerAddress

    where = ServerAddress.parse(address)
    with conversation(where.host, where.port, keys, option="--server") as (control, _):
        report = control.status()

    def subject(served: Served) -> Subject:
        ranks = f", {served.geometry.ranks} ranks" if served.geometry.ranks > 1 else ""
        return Subject(
            served.model,
            f"{served.model or 'an engine that does not name its model'}{ranks}, namespace {served.digest}",
            "server",
            f"KV groups as the engine registered them at {report['address']}; {served.chunks} chunks are stored.",
            served.geometry,
            tuple(_served_facts(n, group) for n, group in enumerate(served.geometry.groups)),
            report["cell_bytes"],
            chunk_size=served.chunk_size,
        )

    return [subject(served) for served in served_geometries(report)]


def _served_facts(number: int, group: KVGroup) -> GroupFacts:
    if group.kind is GroupKind.SCRATCH:
        return GroupFacts(number, group, 0, (), "belongs to one request; no hit needs it")
    sizes = Counter(group.page_bytes)
    holds = tuple(f"{count} × pages of {size:,} bytes" for size, count in sizes.items())
    return GroupFacts(number, group, len(group.page_bytes), holds)


def alike(groups: Sequence[GroupFacts]) -> list[list[GroupFacts]]:
    """Runs of neighbours that differ in nothing but their layers' names."""

    def looks(facts: GroupFacts) -> GroupFacts:
        return attrs.evolve(facts, number=0, group=attrs.evolve(facts.group, layers=()))

    return [list(run) for _, run in itertools.groupby(groups, looks)]
