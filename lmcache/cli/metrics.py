"""`lmcache metrics`: a server's figures for Prometheus, from a process of its own beside it."""

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from lmcache.cli.options import address_text, server_address
from lmcache.errors import ConfigError, with_extra

if TYPE_CHECKING:
    import threading
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry

SCRAPE_SECONDS = 5.0
"""A server that has not answered by then is away: Prometheus itself waits ten seconds, as a rule."""


@click.command(short_help="Serve a server's figures to Prometheus.")
@server_address
@click.option(
    "--listen",
    metavar="[HOST:]PORT",
    default="127.0.0.1:9555",
    show_default=True,
    help="Where Prometheus finds them, at /metrics; without a host on this host only, port 0 takes any free one. "
    "Whoever reaches the address can read them.",
)
@click.option("--once", is_flag=True, help="Print them once, and end.")
def metrics(host: str, port: int, keys: str | None, listen: str, *, once: bool) -> None:
    """Serve what `lmcache status` shows to Prometheus, until SIGTERM or SIGINT.

    Each scrape asks the server. While none answers, lmcache_up is 0 and there is nothing else.
    """
    _check_extra()
    if once:
        _print(host, port, keys)
        return
    where = _listened(listen)
    told = _told_by_signals()  # before anybody is told that it is there, who might end it at once
    with _serving(_registry(host, port, keys), *where) as server:
        at = address_text(where[0], server.server_port)
        click.echo(f"lmcache metrics of {address_text(host, port)} ready on http://{at}/metrics")
        told.wait()


def _check_extra() -> None:
    try:
        import prometheus_client  # noqa: F401 - to say at once that it is missing
    except ImportError as error:
        raise ConfigError(
            f"lmcache metrics needs prometheus-client, which cannot be imported: {error}", remedy=with_extra("metrics")
        ) from error


def _print(host: str, port: int, keys: str | None) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    from lmcache.cli.conversation import conversation
    from lmcache.cli.exposition import ServerMetrics

    with conversation(host, port, keys) as (control, _):
        report = control.status()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServerMetrics(lambda: report))
    click.echo(generate_latest(registry).decode(), nl=False)


def _registry(host: str, port: int, keys: str | None) -> "CollectorRegistry":
    """What is scraped. Raises ConfigError for an address or keys that cannot be right."""
    import logging

    from prometheus_client import CollectorRegistry

    from lmcache.cli.exposition import ServerMetrics
    from lmcache.core.control import Control, ServerAddress, check_host, client_keys

    check_host(host)
    found = client_keys(keys or "")

    def ask() -> dict[str, Any]:
        # a conversation each: scrapes may overlap, and one conversation is one thread's
        with Control(ServerAddress(host, port), SCRAPE_SECONDS, found) as control:
            return control.status()

    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServerMetrics(ask))
    return registry


def _listened(listen: str) -> tuple[str, int]:
    """Host and port of `--listen`."""
    found = re.fullmatch(r"(?:(?P<host>[^:\[\]]+|\[[0-9a-fA-F:.]+\]):)?(?P<port>\d{1,5})", listen)
    if found is None or int(found["port"]) > 65535:
        raise ConfigError(
            f"--listen {listen!r} is no address to listen on", remedy="write PORT, HOST:PORT or [HOST]:PORT, like 9555"
        )
    return (found["host"] or "127.0.0.1").strip("[]"), int(found["port"])


@contextlib.contextmanager
def _serving(registry: "CollectorRegistry", host: str, port: int) -> "Iterator[WSGIServer]":
    from prometheus_client import start_http_server

    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"--listen {address_text(host, port)} cannot be had: {error.strerror or error}",
            remedy="give another port, or a host that is one of this machine's",
        ) from error
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _told_by_signals() -> "threading.Event":
    """What SIGTERM and SIGINT set from now on."""
    import signal
    import threading

    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    return told
