"""What `lmcache metrics` tells monitoring systems: each family of metrics, and where a server's report has it.

One table, `FAMILIES`: exporter, docs and tests read it. Counters and gauges of the server and of its tiers come from
`core/metrics.py`, so what is added there is exported.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import attrs

from lmcache.core.metrics import GAUGES, Counters, TierCounters

if TYPE_CHECKING:
    from prometheus_client import Metric

Report = Mapping[str, Any]
"""What `Control.status` returns; empty when the server did not answer."""

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values of the labels, and the number: one for each series."""


@attrs.frozen
class Family:
    """Series of one name."""

    name: str
    """As queries have it."""
    kind: Literal["counter", "gauge"]
    sentence: str
    labels: tuple[str, ...]
    read: Callable[[Report], Samples]
    """Takes them out of a report. There are none of what the report does not have."""


def metrics_of(report: Report) -> "Iterator[Metric]":
    """Every family that the report has something of, as prometheus_client takes them."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    for family in FAMILIES:
        metric = kinds[family.kind](family.name, family.sentence, labels=family.labels)
        for labels, value in family.read(report):
            metric.add_metric(labels, value)
        if metric.samples:
            yield metric


def gauge_name(name: str) -> str:
    """What a gauge of `core/metrics.py` is called: names that end in `_total` are for counters."""
    return f"lmcache_{name.removesuffix('_total')}"


# ---------------------------------------------------------------------------------------------------------- the server


def _server() -> Iterator[Family]:
    yield Family(
        "lmcache_up",
        "gauge",
        "1 if the server answered this scrape; 0 if not, and then nothing else is told",
        (),
        lambda report: [((), bool(report))],
    )
    about = ("version", "epoch", "eviction_policy", "address")
    yield Family(
        "lmcache_server_info",
        "gauge",
        "who answered: always 1; the epoch is another after each start",
        about,
        lambda report: [(tuple(report[name] for name in about), 1)] if report.keys() >= set(about) else [],
    )
    for name, key, sentence in (
        ("uptime_seconds", "uptime_s", "seconds since the server started"),
        ("l1_bytes", "l1_bytes", "bytes that L1 can grow to"),
        ("cell_bytes", "cell_bytes", "bytes of a cell: what numbers of cells are multiplied with"),
    ):
        yield Family(f"lmcache_{name}", "gauge", sentence, (), _top(key))
    for field in attrs.fields(Counters):
        name = f"lmcache_{field.name}_total"
        yield Family(name, "counter", field.metadata["sentence"], (), _entry("counters", field.name))
    for name, (_, sentence) in GAUGES.items():
        yield Family(gauge_name(name), "gauge", sentence, (), _entry("gauges", name))


def _top(key: str) -> Callable[[Report], Samples]:
    return lambda report: [((), report[key])] if key in report else []


def _entry(table: str, key: str) -> Callable[[Report], Samples]:
    return lambda report: [((), report[table][key])] if key in report.get(table, ()) else []


# ------------------------------------------------------------------------------------------------ of which are several


def _tiers() -> Iterator[Family]:
    for field in attrs.fields(TierCounters):
        read = _tier_counter(field.name)
        yield Family(f"lmcache_tier_{field.name}_total", "counter", field.metadata["sentence"], ("tier",), read)
    yield Family(
        "lmcache_tier_evicted_total",
        "counter",
        "blobs that it has dropped to make room for others",
        ("tier",),
        _tier_value("evicted"),
    )
    for name, key, sentence in (
        ("usable", "usable", "1 while it is read; 0 while it is left alone, for that has failed or it hangs"),
        ("writable", "writable", "1 while it is written; 0 while it is left alone, for that has failed or it hangs"),
        ("in_flight", "in_flight", "reads and writes of it that wait or are under way"),
        ("blobs", "blobs", "blobs that it holds; absent where only asking the other side would tell"),
        ("bytes", "bytes", "bytes that they take, headers included; absent as for blobs"),
        ("limit_bytes", "limit_bytes", "bytes that it may take; absent where it has no limit of its own"),
    ):
        yield Family(f"lmcache_tier_{name}", "gauge", sentence, ("tier",), _tier_value(key))


def _tier_value(key: str) -> Callable[[Report], Samples]:
    return lambda report: [((name,), tier[key]) for name, tier in _named_tiers(report) if tier[key] is not None]


def _tier_counter(key: str) -> Callable[[Report], Samples]:
    return lambda report: [((name,), tier["counters"][key]) for name, tier in _named_tiers(report)]


def _named_tiers(report: Report) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Tiers with names that are theirs alone: URLs without options, so of two on one host the second is `…#2`."""
    seen = collections.Counter[str]()
    for tier in report.get("tiers", ()):
        name = tier["tier"]
        seen[name] += 1
        yield (f"{name}#{seen[name]}" if seen[name] > 1 else name), tier


def _tenants() -> Iterator[Family]:
    for name, sentence in (
        ("cells", "cells that chunks of a tenant with limits hold"),
        ("quota_cells", "cells that its chunks may hold; absent where it has no quota"),
        ("guaranteed_cells", "cells that other tenants cannot take from it"),
    ):
        yield Family(f"lmcache_tenant_{name}", "gauge", sentence, ("tenant",), _tenant_value(name))


def _tenant_value(key: str) -> Callable[[Report], Samples]:
    return lambda report: [
        ((each["tenant"],), each[key]) for each in report.get("tenants", ()) if each[key] is not None
    ]


def _models() -> Iterator[Family]:
    yield Family(
        "lmcache_model_clients",
        "gauge",
        "registered clients; the role is scheduler, worker or peer",
        ("role", "model"),
        _model_clients,
    )
    yield Family(
        "lmcache_namespace_chunks",
        "gauge",
        "chunks of a namespace in the index; `lmcache status` shows digests, too",
        ("digest", "model"),
        _namespace_chunks,
    )


def _model_clients(report: Report) -> Samples:
    models = {each["digest"]: _model(each) for each in report.get("namespaces", ())}
    clients = report.get("clients", ())
    return collections.Counter((each["role"], models.get(each["namespace"], "")) for each in clients).items()


def _namespace_chunks(report: Report) -> Samples:
    return [((each["digest"], _model(each)), each["chunks"]) for each in report.get("namespaces", ())]


def _model(namespace: Mapping[str, Any]) -> str:
    model: str = namespace["facts"].get("model", "")
    return model


FAMILIES = (*_server(), *_tiers(), *_tenants(), *_models())
"""In the order in which they are told."""
