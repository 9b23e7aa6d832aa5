"""A server's report as metrics of Prometheus. Imports prometheus-client when the first of them is made."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from lmcache.core.metrics import GAUGES, Counters, TierCounters
from lmcache.errors import LMCacheError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

PREFIX = "lmcache_"

TIER_GAUGES = {
    "usable": "whether it is read: 0 while it is left alone, for that failed or hung",
    "writable": "whether it is written: 0 while it is left alone, for that failed or hung",
    "in_flight": "reads and writes that wait or are under way",
    "blobs": "blobs that it holds, where it knows",
    "bytes": "bytes that they take, headers included",
    "limit_bytes": "bytes that it may take",
}
"""What a report says of each tier besides its counters."""

TENANT_GAUGES = {
    "cells": "cells of L1 that its chunks hold",
    "quota_cells": "cells that they may hold at most",
    "guaranteed_cells": "cells that other tenants cannot take from it",
}
"""What a report says of each tenant that has a quota, a guarantee or a chunk."""

Report = Mapping[str, Any]


@attrs.define(eq=False)
class ServerMetrics:
    """A collector of prometheus-client's, which asks the server anew for each scrape. Any thread; raises nothing."""

    ask: Callable[[], Report]
    """Returns the server's report; raises LMCacheError where there is none to be had."""
    _away: str = ""

    def collect(self) -> "Iterator[Metric]":
        """All metrics, or that there is no server to ask."""
        try:
            report = self.ask()
        except LMCacheError as error:
            self._tell(str(error))
            yield _gauge("up", "whether the server answered this scrape", [({}, 0)])
            return
        self._tell("")
        yield _gauge("up", "whether the server answered this scrape", [({}, 1)])
        yield from server_metrics(report)

    def _tell(self, why: str) -> None:
        if why != self._away:
            self._away = why
            log.warning("%s", why or "the server answers")


def server_metrics(report: Report) -> "Iterator[Metric]":
    """What one report says. Values that it does not have, as those of another version may, are left out."""
    about = ("version", "epoch", "eviction_policy", "address")
    yield _gauge("server_info", "who it is; always 1", [({name: str(report[name]) for name in about}, 1)])
    yield _gauge("uptime_seconds", "since it was started", [({}, report["uptime_s"])])
    yield _gauge("l1_bytes", "what L1 can grow to", [({}, report["l1_bytes"])])
    yield _gauge(
        "cell_bytes", "size of a cell: what is counted in cells is so many bytes", [({}, report["cell_bytes"])]
    )
    for name, (_, sentence) in GAUGES.items():
        # what ends in _total only grows, for Prometheus and its tools
        yield _gauge(name.removesuffix("_total"), sentence, [({}, report["gauges"].get(name))])
    for name, sentence in _sentences(Counters):
        yield _counter(name, sentence, [({}, report["counters"].get(name))])
    yield from _tiers(report["tiers"])
    yield from _tenants(report["tenants"])
    yield from _models(report)


def _tiers(tiers: Sequence[Report]) -> "Iterator[Metric]":
    for name, sentence in _sentences(TierCounters):
        counted = [({"tier": tier["tier"]}, tier["counters"].get(name)) for tier in tiers]
        yield _counter(f"tier_{name}", sentence, counted)
    dropped = [({"tier": tier["tier"]}, tier.get("evicted")) for tier in tiers]
    yield _counter("tier_evicted", "blobs that it has dropped to make room", dropped)
    for name, sentence in TIER_GAUGES.items():
        yield _gauge(f"tier_{name}", sentence, [({"tier": tier["tier"]}, tier.get(name)) for tier in tiers])


def _tenants(tenants: Sequence[Report]) -> "Iterator[Metric]":
    for name, sentence in TENANT_GAUGES.items():
        yield _gauge(f"tenant_{name}", sentence, [({"tenant": each["tenant"]}, each.get(name)) for each in tenants])


def _models(report: Report) -> "Iterator[Metric]":
    """What is said of namespaces and clients, by the name of the model: a namespace's own is no name to look for."""
    names = {each["digest"]: each["facts"].get("model", "") for each in report["namespaces"]}
    chunks: dict[tuple[str, ...], int] = {}
    clients: dict[tuple[str, ...], int] = {}
    for each in report["namespaces"]:
        key = (names[each["digest"]], each["digest"])
        chunks[key] = each["chunks"]
    for client in report["clients"]:
        key = (names.get(client["namespace"], ""), client["role"])
        clients[key] = clients.get(key, 0) + 1
    for name, second, sentence, counted in (
        ("namespace_chunks", "namespace", "chunks in the index", chunks),
        ("model_clients", "role", "registered clients", clients),
    ):
        yield _gauge(name, sentence, [({"model": m, second: s}, number) for (m, s), number in counted.items()])


Samples = Iterable[tuple[Mapping[str, str], float | None]]
"""Labels and value of each."""


def _gauge(name: str, sentence: str, samples: Samples) -> "Metric":
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(PREFIX + name, sentence)
    for labels, value in samples:
        if value is not None:
            family.add_sample(family.name, dict(labels), float(value))
    return family


def _sentences(counters: type) -> Iterator[tuple[str, str]]:
    """Name and sentence of each counter of a table."""
    return ((field.name, field.metadata["sentence"]) for field in attrs.fields(counters))


def _counter(name: str, sentence: str, samples: Samples) -> "Metric":
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(PREFIX + name, sentence)
    for labels, value in samples:
        if value is not None:
            family.add_sample(f"{family.name}_total", dict(labels), float(value))
    return family
