"""`lmcache metrics`: what a server reports, for Prometheus and its kin, served by a process beside it."""

import re
import signal
import threading
from functools import partial
from typing import TYPE_CHECKING

import attrs
import click
from click.core import ParameterSource

from lmcache.cli.options import address_text, server_address
from lmcache.errors import ConfigError, with_extra

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from lmcache.cli.metric_families import Report
    from lmcache.cli.scraping import MetricsServer


@attrs.frozen
class ListenAddress:
    """Where metrics are served."""

    host: str
    port: int


def listen_address(text: str) -> ListenAddress:
    """Read `[HOST:]PORT`, an IPv6 host in brackets; anything else fails with what to write instead."""
    found = re.fullmatch(r"(?:(?:\[([0-9a-fA-F:.]+)\]|([^\s:/\[\]]+)):)?([0-9]{1,5})", text)
    if not found or int(found[3]) > 65535:
        raise click.BadParameter(
            f"{text!r} is not [HOST:]PORT; write something like 9555, 127.0.0.1:9555 or [::1]:9555; 0 is any free port"
        )
    return ListenAddress(found[1] or found[2] or "127.0.0.1", int(found[3]))


@click.command(short_help="Serve what a server reports to Prometheus.")
@server_address
@click.option(
    "--listen",
    type=listen_address,
    default="127.0.0.1:9555",
    show_default=True,
    metavar="[HOST:]PORT",
    help="Where metrics are served, without a password: on loopback unless a host is named. Port 0 takes any free one.",
)
@click.option(
    "--once", is_flag=True, help="Print the metrics once, and end; exit code 1 if the server does not answer."
)
def metrics(host: str, port: int, keys: str | None, listen: ListenAddress, once: bool) -> None:
    """Serve what `lmcache status` shows as Prometheus metrics, until SIGTERM or SIGINT. Needs prometheus-client.

    The server is asked anew for each scrape. While it does not answer, scrapes are told so by lmcache_up 0.
    """
    _check_extra()
    if once:
        _print(host, port, keys)
    else:
        _check_address(host, keys)
        _serve(listen, host, port, keys)


def _check_extra() -> None:
    try:
        import prometheus_client  # noqa: F401  # whether it is there
    except ImportError as error:
        raise ConfigError(
            f"lmcache metrics needs prometheus-client, which cannot be imported: {error}", remedy=with_extra("metrics")
        ) from error


def _print(host: str, port: int, keys: str | None) -> None:
    from prometheus_client import generate_latest

    from lmcache.cli.scraping import registry_of

    if click.get_current_context().get_parameter_source("listen") is not ParameterSource.DEFAULT:
        raise ConfigError("--once prints, and --listen serves", remedy="leave one of them out")
    report = _report(host, port, keys)
    click.echo(generate_latest(registry_of(lambda: report)), nl=False)


def _check_address(host: str, keys: str | None) -> None:
    """ConfigError for what no server could ever be asked with. Whether one is there may change at any time."""
    from lmcache.core.control import check_host, client_keys

    check_host(host)
    client_keys(keys or "")


def _report(host: str, port: int, keys: str | None) -> "Report":
    """One conversation: they are not for several threads, and each ends within its deadline."""
    from lmcache.cli.conversation import conversation

    with conversation(host, port, keys) as (control, _):
        return control.status()


def _serve(listen: ListenAddress, host: str, port: int, keys: str | None) -> None:
    from lmcache.cli.lasting import say, start_logging
    from lmcache.cli.scraping import LOGGER, PATH, Scraper, registry_of

    start_logging("info")
    ends = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # in threads to come as well, so that it is we who take them below
    server = address_text(host, port)
    with _open(listen, registry_of(Scraper(server, partial(_report, host, port, keys)))) as web:
        thread = threading.Thread(target=web.serve_forever, name="lmcache-metrics")
        thread.start()
        try:
            address = address_text(listen.host, web.port)
            say(f"lmcache metrics ready on http://{address}{PATH}: the server at {server}", LOGGER)
            signal.sigwait(ends)
        finally:
            web.shutdown()
            thread.join()


def _open(listen: ListenAddress, registry: "CollectorRegistry") -> "MetricsServer":
    from lmcache.cli.scraping import MetricsServer

    try:
        return MetricsServer(listen.host, listen.port, registry)
    except OSError as error:
        import errno
        import socket

        from lmcache.core.listeners import cannot_listen

        number = errno.ENODEV if isinstance(error, socket.gaierror) else error.errno or 0
        raise cannot_listen(listen.host, listen.port, number, "--listen", "--listen") from error
