"""Scrapes: each asks the server for one report and is answered with its metrics, over HTTP."""

import http.server
import logging
import socket
import socketserver
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import attrs

from lmcache.cli.metric_families import Report, metrics_of
from lmcache.errors import LMCacheError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

LOGGER = "lmcache.metrics"
PATH = "/metrics"

OPEN_METRICS = "application/openmetrics-text"
"""Who accepts this gets it; everybody else gets Prometheus's own text."""

CLIENT_SECONDS = 10.0
"""Who connects and then says nothing for so long, or reads nothing, is hung up on."""

log = logging.getLogger(LOGGER)


@attrs.define(eq=False)
class Scraper:
    """Asks the server for its report; any number of threads may call it. Logs when answers end or come again."""

    server: str
    ask: Callable[[], Report]
    _problem: str = attrs.field(default="", init=False)

    def __call__(self) -> Report:
        """The report, empty if there is none."""
        try:
            report = self.ask()
        except LMCacheError as error:
            self._note(str(error))
            return {}
        self._note("")
        return report

    def _note(self, problem: str) -> None:
        before, self._problem = self._problem, problem
        if problem == before:
            return
        if problem:
            log.warning("%s", problem)
        else:
            log.info("the server at %s answers again", self.server)


@attrs.frozen(eq=False)
class ReportCollector:
    """What a registry of prometheus_client asks at each scrape."""

    ask: Callable[[], Report]

    def collect(self) -> "Iterator[Metric]":
        """Metrics of one report."""
        return metrics_of(self.ask())


def registry_of(ask: Callable[[], Report]) -> "CollectorRegistry":
    """One of our own: the process that exports is of no interest, so there is nothing of it."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(ReportCollector(ask))
    return registry


class MetricsServer(socketserver.ThreadingTCPServer):
    """A thread for each connection: one that waits for a hung server holds up no other, nor the end."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, host: str, port: int, registry: "CollectorRegistry") -> None:
        """Listen, on any free port for 0. Raises OSError."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, address = found[0]
        super().__init__(address, partial(_Handler, registry))  # type: ignore[arg-type]  # any IP address will do

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Called where an exception is under way: log it, unless the other side has only had enough."""
        error = sys.exception()
        if not isinstance(error, ConnectionError):
            log.error("a request of %s could not be answered", client_address[0], exc_info=error)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request."""

    timeout = CLIENT_SECONDS

    def __init__(self, registry: "CollectorRegistry", *arguments: Any) -> None:
        self._registry = registry
        super().__init__(*arguments)

    def do_GET(self) -> None:  # its base looks for this name
        """The metrics, in the format that is asked for."""
        if urlsplit(self.path).path != PATH:
            self._answer(404, "text/plain; charset=utf-8", f"metrics are at {PATH}\n".encode())
        elif OPEN_METRICS in self.headers.get("Accept", ""):
            from prometheus_client.openmetrics.exposition import generate_latest as generate_open

            self._answer(200, f"{OPEN_METRICS}; version=1.0.0; charset=utf-8", generate_open(self._registry))
        else:
            from prometheus_client import generate_latest

            self._answer(200, "text/plain; version=0.0.4; charset=utf-8", generate_latest(self._registry))

    def version_string(self) -> str:
        """Who answers, and no version of Python."""
        return "lmcache"

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002  # its base calls it so
        """Nothing: scrapes come by the minute."""
