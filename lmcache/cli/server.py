"""`lmcache server`: builds the server from flags and plugins, and runs it until it is told to stop."""

import contextlib
import os
import signal
from types import FrameType
from typing import TYPE_CHECKING

import attrs
import click
from click.core import ParameterSource

from lmcache.cli.lasting import say, start_logging
from lmcache.cli.options import (
    NumberRange,
    PathName,
    WholeNumber,
    address_text,
    chunk_size_text,
    gigabytes,
    plugin_names,
    size_text,
    tenant_sizes,
)
from lmcache.errors import ConfigError

if TYPE_CHECKING:
    from lmcache.core.config import ServerConfig
    from lmcache.core.observing import Observer
    from lmcache.core.recording import Recorder
    from lmcache.core.server import Server
    from lmcache.plugins.manager import PluginManager


@click.command(short_help="Run the cache server.")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. Anything but loopback needs --keys, or --insecure.",
)
@click.option(
    "--port",
    type=WholeNumber("use 1 to 65535, or 0 for any free one"),
    default=5555,
    show_default=True,
    help="TCP port to listen on; 0 takes any free one.",
)
@click.option(
    "--keys",
    metavar="PATH",
    help="Let in only whoever has the keys, and encrypt what is said on TCP: server.key of `lmcache keys new`, or its "
    "folder. Engines on other hosts are served then.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Let in everybody who reaches the address, engines on other hosts included: they read and write the cache.",
)
@click.option(
    "--bulk-port",
    type=WholeNumber("use 1 to 65535, or 0 for any free one"),
    metavar="PORT",
    help="TCP port on which engines on other hosts are served; 0 takes any free one. Without the flag the next one "
    "after --port, if there is --keys or --insecure, and else none.",
)
@click.option(
    "--chunk-size",
    type=WholeNumber("give a number of tokens, like 256"),
    metavar="TOKENS",
    help="Tokens that are cached as one unit, a multiple of every KV group's tokens per block. Strict: an engine that "
    "it does not fit is refused. Without the flag each engine gets 256, rounded up to what its geometry allows. "
    "SGLang's chunks are its pages either way.",
)
@click.option(
    "--l1-size-gb",
    "l1_bytes",
    type=gigabytes,
    default="1",
    show_default=True,
    metavar="GB",
    help="Memory for cached KV, in GB of 2^30 bytes; fractions are fine.",
)
@click.option(
    "--l1-cell-kb",
    "cell_kib",
    type=WholeNumber("use 1024 unless every object is much smaller"),
    default=1024,
    show_default=True,
    metavar="KB",
    help="Size of the cells that L1 is cut into, in KB of 2^10 bytes.",
)
@click.option(
    "--hugepages",
    is_flag=True,
    help="Make L1 of huge pages that the administrator has set aside (sysctl vm.nr_hugepages); refused where there are "
    "too few.",
)
@click.option(
    "--eviction-policy",
    default="prefix-aware",
    show_default=True,
    metavar="NAME",
    help="Who goes first when L1 is full; `lmcache plugins` lists what there is.",
)
@click.option(
    "--quota",
    "quotas",
    multiple=True,
    metavar="TENANT=SIZE",
    help="Most that a tenant's chunks may take of L1, in GB or as 25%; TENANT * is each tenant that is not named. "
    "Repeatable.",
)
@click.option(
    "--guarantee",
    "guarantees",
    multiple=True,
    metavar="TENANT=SIZE",
    help="What other tenants cannot take from one, once its chunks fill it: in GB or as 25%. Repeatable.",
)
@click.option(
    "--admission",
    multiple=True,
    metavar="NAME",
    help="Ask an admission policy whether a chunk is to be stored at all; `lmcache plugins` lists them. Repeatable: "
    "each has a veto.",
)
@click.option(
    "--retention",
    multiple=True,
    metavar="NAME",
    help="Ask a retention policy how long chunks are to stay. Repeatable: of several hints the strictest counts.",
)
@click.option(
    "--max-workers",
    type=WholeNumber("use 1 to 256"),
    default=2,
    show_default=True,
    metavar="N",
    help="I/O threads at most, 1 to 256, made as they are needed: they put memory behind L1 before it is used. Engines "
    "do their copying themselves.",
)
@click.option(
    "--separate-object-groups",
    is_flag=True,
    expose_value=False,
    help="Accepted, and changes nothing: each KV group is always stored as objects of its own.",
)
@click.option(
    "--l2",
    "tiers",
    multiple=True,
    metavar="URL",
    help="A storage tier behind L1, like disk:///path?size_gb=100 or redis://host:6379. Repeatable: they are tried in "
    "order. `lmcache plugins` lists the kinds.",
)
@click.option(
    "--l2-deadline-s",
    type=NumberRange(0.01, 3600),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest time that a lookup waits for tiers; then what has come by then is the hit.",
)
@click.option(
    "--l2-min-speedup",
    type=NumberRange(0, 1000),
    default=1.0,
    show_default=True,
    metavar="FACTOR",
    help="How many times as fast as computing it reading a hit from tiers has to be, by the measured speeds of both; "
    "what is slower is computed. 0 reads everything.",
)
@plugin_names
@click.option(
    "--socket-dir",
    type=PathName(file_okay=False),
    help="Folder for the Unix socket, for containers that share a volume. Without it no file is made.",
)
@click.option(
    "--record",
    metavar="FILE",
    help="Write lookups and stores to FILE, for `lmcache simulate`: hashes, sizes, times and tenants, never tokens.",
)
@click.option(
    "--record-mb",
    type=WholeNumber("give a whole number of MB, 1 or more", 1),
    default=512,
    show_default=True,
    metavar="MB",
    help="Room for the recording, in MB of 2^20 bytes. When FILE takes half of it, it becomes FILE.1, and begins anew.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="What is logged, to standard error.",
)
def server(
    *,
    host: str,
    port: int,
    keys: str | None,
    insecure: bool,
    bulk_port: int | None,
    chunk_size: int | None,
    l1_bytes: int,
    cell_kib: int,
    hugepages: bool,
    eviction_policy: str,
    quotas: tuple[str, ...],
    guarantees: tuple[str, ...],
    admission: tuple[str, ...],
    retention: tuple[str, ...],
    max_workers: int,
    tiers: tuple[str, ...],
    l2_deadline_s: float,
    l2_min_speedup: float,
    plugin_names: tuple[str, ...],
    socket_dir: str | None,
    record: str | None,
    record_mb: int,
    log_level: str,
) -> None:
    """Run the cache server until SIGTERM or SIGINT, which let stores in flight finish; a second one ends it at once.

    SIGHUP, as of a terminal that is closed, is one of them, unless it is ignored.
    """
    from lmcache.core.config import KIB, ServerConfig

    _check_recording(record, record_mb)
    config = ServerConfig(
        host=host,
        port=port,
        keys=keys,
        insecure=insecure,
        bulk_port=bulk_port,
        chunk_size=chunk_size,
        l1_bytes=l1_bytes,
        cell_bytes=cell_kib * KIB,
        huge_page_bytes=_huge_page_bytes() if hugepages else 0,
        max_workers=max_workers,
        socket_dir=socket_dir,
        quotas=tenant_sizes("--quota", quotas, l1_bytes),
        guarantees=tenant_sizes("--guarantee", guarantees, l1_bytes),
        l2_deadline_s=l2_deadline_s,
        l2_min_speedup=l2_min_speedup,
    )
    start_logging(log_level)
    chosen = Chosen(plugin_names, eviction_policy, admission, retention, tiers)
    _serve(config, chosen, record, record_mb << 20)


def _huge_page_bytes() -> int:
    from lmcache.core.huge_pages import huge_page_pool

    return huge_page_pool().page_bytes


def _check_recording(record: str | None, record_mb: int) -> None:
    """ConfigError for a bound that would bound nothing: whoever gives one expects a recording."""
    given = click.get_current_context().get_parameter_source("record_mb") is not ParameterSource.DEFAULT
    if given and record is None:
        raise ConfigError(
            f"--record-mb {record_mb} bounds a recording, and no --record asks for one",
            remedy="add --record FILE, or leave --record-mb out",
        )


@attrs.frozen
class Chosen:
    """Plugins that the user wants, by name."""

    plugins: tuple[str, ...]
    eviction: str
    admission: tuple[str, ...]
    retention: tuple[str, ...]
    tiers: tuple[str, ...]
    """URLs."""


def _serve(config: "ServerConfig", chosen: Chosen, record: str | None, record_bytes: int) -> None:
    from lmcache.core.server import Server
    from lmcache.plugins.manager import PluginManager

    plugins = PluginManager(chosen.plugins)
    policy = plugins.make_policy(chosen.eviction)
    speakers = plugins.make_speakers(chosen.admission, chosen.retention)
    about = {"policy": policy.name, "cells": config.cells, "cell_bytes": config.cell_bytes}
    with _recording(record, record_bytes, about) as recorder, _observing(plugins) as observer:
        tiers = [(tier.blobs, tier.settings) for tier in map(plugins.open_tier, chosen.tiers)]
        running = Server(config, policy, recorder, speakers, tiers, observer)
        _stop_on_signals(running)
        say(_ready_line(running, policy.name), "lmcache.server")
        _run(running, plugins, observer)


def _recording(
    path: str | None, limit_bytes: int, about: dict[str, object]
) -> "contextlib.AbstractContextManager[Recorder | None]":
    if path is None:
        return contextlib.nullcontext()
    from lmcache.core.recording import recording

    return recording(path, limit_bytes, about)


def _observing(plugins: "PluginManager") -> "contextlib.AbstractContextManager[Observer | None]":
    observer = plugins.observer()
    return contextlib.closing(observer) if observer else contextlib.nullcontext()


HOOK_SECONDS = 2.0
"""Plugins that still do what they do at the start when the server has ended have so long to come to an end."""


def _run(running: "Server", plugins: "PluginManager", observer: "Observer | None") -> None:
    import threading

    address = address_text(running.config.host, running.port)
    # beside the loop: a plugin is told that the server answers, so it may ask, or take as long as it likes
    started = threading.Thread(target=plugins.server_started, args=(address,), name="lmcache-started", daemon=True)
    started.start()
    try:
        running.run()
    finally:
        signal.set_wakeup_fd(-1)  # the number may soon be another file's
        started.join(HOOK_SECONDS)
        if observer:
            observer.close()  # what has happened comes before the end
        plugins.server_stopping()


def _stop_on_signals(running: "Server") -> None:
    """The first signal drains, the second ends the process: its memory and sockets end with it."""
    seen = 0

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            os._exit(128 + number)
        running.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup means what it says
        signal.signal(signal.SIGHUP, stop)
    # a signal that comes to another thread, or just before the loop starts to wait, does not end the wait by itself
    signal.set_wakeup_fd(running.wake_descriptor, warn_on_full_buffer=False)


def _ready_line(running: "Server", policy: str) -> str:
    config = running.config
    address = address_text(config.host, running.port)
    pages = f" of huge pages of {size_text(config.huge_page_bytes)}" if config.huge_page_bytes else ""
    return (
        f"lmcache server ready on {address}: L1 {size_text(config.arena_bytes)}{pages} in {config.cells} cells, "
        f"policy {policy}, chunk size {chunk_size_text(config.chunk_size)}, epoch {running.epoch}"
    )
