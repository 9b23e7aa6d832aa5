"""The server's settings, checked once, before anything is opened."""

import ipaddress
import mmap
from collections.abc import Mapping

import attrs

from lmcache.core.accounts import EVERYBODY_ELSE, Limits
from lmcache.core.control import check_host
from lmcache.core.huge_pages import huge_page_pool
from lmcache.core.memory import total_memory
from lmcache.errors import ConfigError, MemoryLimitError
from lmcache.geometry.groups import MAX_TOKENS

GIB = 1 << 30
KIB = 1 << 10

MOST_WORKERS = 256
"""I/O threads; more would only wait for one another."""


def _check_port(_: object, _attribute: "attrs.Attribute[int]", value: int) -> None:
    if not 0 <= value <= 65535:
        raise ConfigError(f"--port {value} is no TCP port", remedy="use 1 to 65535, or 0 for any free one")


def is_loopback(host: str) -> bool:
    """Whether only this host reaches the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@attrs.frozen
class ServerConfig:
    """What `lmcache server` was asked for."""

    host: str = "127.0.0.1"
    """Anything but loopback needs `keys`, or `insecure`."""
    port: int = attrs.field(default=5555, validator=_check_port)
    """TCP; 0 takes a free one."""
    chunk_size: int | None = None
    """Tokens, strict for every engine; None lets each geometry take the smallest fit from 256 on."""
    l1_bytes: int = GIB
    """Size of the arena, rounded down to whole cells."""
    cell_bytes: int = 1 << 20
    """Size of a cell."""
    huge_page_bytes: int = 0
    """Size of the huge pages that the arena is to be made of; 0 for ordinary memory."""
    max_workers: int = 2
    """I/O threads at most, made as they are needed: they put memory behind the arena."""
    socket_dir: str | None = None
    """Folder for the Unix socket; None uses the abstract namespace, which leaves no file."""
    quotas: Mapping[str, int] = attrs.field(factory=dict)
    """Bytes of L1 that a tenant's chunks may take; `*` is each tenant that is not named."""
    l2_deadline_s: float = 10.0
    """Seconds after which a lookup that tiers are being looked at for is answered with what has come."""
    l2_min_speedup: float = 1.0
    """Times as fast as computing that reading from tiers has to be, by measure of both; 0 reads everything."""
    guarantees: Mapping[str, int] = attrs.field(factory=dict)
    """Bytes of L1 that others cannot take from a tenant, once its chunks fill them."""
    keys: str | None = None
    """File or folder of the CURVE keys that whoever speaks TCP has to prove; None asks nobody."""
    insecure: bool = False
    """Whether the user accepts that anybody who reaches the address reads and writes the cache."""
    bulk_port: int | None = None
    """TCP port of the bulk channel; 0 takes a free one; None the next after `port`, where there is one."""

    def __attrs_post_init__(self) -> None:
        self._check_network()
        if self.chunk_size is not None and self.chunk_size < 1:
            raise ConfigError(
                f"--chunk-size {self.chunk_size} is not positive", remedy="give a number of tokens, like 256"
            )
        if self.chunk_size is not None and self.chunk_size > MAX_TOKENS:
            raise ConfigError(f"--chunk-size {self.chunk_size} is absurd", remedy="give a number of tokens, like 256")
        if self.max_workers < 1:
            raise ConfigError(f"--max-workers {self.max_workers} is not positive", remedy="use at least 1")
        if self.max_workers > MOST_WORKERS:
            raise ConfigError(
                f"--max-workers {self.max_workers} is more than {MOST_WORKERS} threads, and a few keep up with any "
                "engine",
                remedy="use 2, or as many as there are engines that store at once",
            )
        if self.cell_bytes < mmap.PAGESIZE or self.cell_bytes % mmap.PAGESIZE:
            raise ConfigError(
                f"--l1-cell-kb {self.cell_bytes / KIB:g} is not a multiple of the host's memory page, "
                f"{mmap.PAGESIZE // KIB} KiB",
                remedy="use 1024 unless every object is much smaller",
            )
        self._check_huge_pages()
        if self.l1_bytes < self.cell_bytes:
            raise ConfigError(
                f"--l1-size-gb {self.l1_bytes / GIB:g} holds no cell of {self.cell_bytes // KIB} KiB",
                remedy="give more memory, or smaller cells with --l1-cell-kb",
            )
        self._check_limits()

    def _check_huge_pages(self) -> None:
        if self._unit % self.cell_bytes or (self.huge_page_bytes and self._unit % self.huge_page_bytes):
            raise ConfigError(
                f"--l1-cell-kb {self.cell_bytes // KIB} neither divides a huge page of {self.huge_page_bytes // KIB} "
                "KiB nor is a multiple of it",
                remedy="use 1024, or another power of two; or leave out --hugepages",
            )
        if self.cell_bytes <= self.l1_bytes < self._unit:
            raise ConfigError(
                f"--l1-size-gb {self.l1_bytes / GIB:g} holds no huge page of {self.huge_page_bytes // KIB} KiB",
                remedy="give more memory, or leave out --hugepages",
            )

    def _check_network(self) -> None:
        check_host(self.host)
        if not is_loopback(self.host) and not (self.keys or self.insecure):
            raise ConfigError(
                f"--host {self.host} is not a loopback address: whoever reaches it could read and write the cache",
                remedy="make keys with `lmcache keys new FOLDER` and give them with --keys FOLDER, or accept that with "
                "--insecure",
            )
        if self.keys and self.insecure:
            raise ConfigError(
                "--keys and --insecure contradict each other", remedy="drop --insecure: with keys it is secure"
            )
        if self.bulk_port is not None:
            if not 0 <= self.bulk_port <= 65535:
                raise ConfigError(
                    f"--bulk-port {self.bulk_port} is no TCP port", remedy="use 1 to 65535, or 0 for any free one"
                )
            if self.bulk_port and self.bulk_port == self.port:
                raise ConfigError(f"--bulk-port {self.bulk_port} is --port, too", remedy="give each a port of its own")
        elif self.bulk and self.port == 65535:
            raise ConfigError("no port follows --port 65535", remedy="choose one for the bulk channel with --bulk-port")

    @property
    def bulk(self) -> bool:
        """Whether engines on other hosts are to be served: then there is a bulk channel."""
        return bool(self.keys) or self.insecure or self.bulk_port is not None

    def _check_limits(self) -> None:
        for tenant, size in self.quotas.items():
            if size > self.l1_bytes:
                raise ConfigError(
                    f"--quota {tenant}={size / GIB:g} is more than L1 has ({self.l1_bytes / GIB:g} GB): "
                    "it limits nothing",
                    remedy=f"write --quota {tenant}=20% for a share of L1, or a number of GB below it",
                )
        for flag, limits in (("--quota", self.quotas), ("--guarantee", self.guarantees)):
            for tenant, size in limits.items():
                if size < self.cell_bytes:
                    raise ConfigError(
                        f"{flag} {tenant}={size / GIB:g} holds no cell of {self.cell_bytes // KIB} KiB",
                        remedy="give the tenant more, or smaller cells with --l1-cell-kb",
                    )
        if EVERYBODY_ELSE in self.guarantees:
            raise ConfigError(
                "--guarantee * promises a share of L1 to any number of tenants",
                remedy="name the tenants whose share is to be guaranteed",
            )
        promised = sum(self.guarantees.values())
        if promised > self.arena_bytes:
            raise ConfigError(
                f"--guarantee promises {promised / GIB:g} GB in all, and L1 has {self.arena_bytes / GIB:g}",
                remedy="promise less, or give L1 more memory with --l1-size-gb",
            )
        for tenant, size in self.guarantees.items():
            quota = self.quotas.get(tenant, self.quotas.get(EVERYBODY_ELSE, size))
            if size > quota:
                raise ConfigError(
                    f"tenant {tenant} is guaranteed {size / GIB:g} GB, more than its quota of {quota / GIB:g}",
                    remedy="raise its --quota, or lower its --guarantee",
                )

    @property
    def limits(self) -> Limits:
        """Quotas and guarantees in whole cells."""
        return Limits(
            {tenant: size // self.cell_bytes for tenant, size in self.quotas.items()},
            {tenant: size // self.cell_bytes for tenant, size in self.guarantees.items()},
        )

    @property
    def cells(self) -> int:
        """Cells that the arena grows to."""
        return self.l1_bytes // self._unit * (self._unit // self.cell_bytes)

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena: whole cells, and whole huge pages if it is to be made of them."""
        return self.cells * self.cell_bytes

    @property
    def _unit(self) -> int:
        """Bytes that the arena is a multiple of."""
        return max(self.cell_bytes, self.huge_page_bytes)

    def check_memory(self) -> None:
        """Raise MemoryLimitError when this host or container could never hold the arena."""
        if self.huge_page_bytes:
            huge_page_pool().check(self.arena_bytes)
            return
        total = total_memory()
        if self.l1_bytes > total.bytes:
            raise MemoryLimitError(
                f"--l1-size-gb {self.l1_bytes / GIB:g} is more than {total.source}, {_gigabytes(total.bytes)} GB",
                remedy=f"use at most {_gigabytes(total.bytes * 4 // 5)}, or give the host (container) more memory",
            )


def _gigabytes(size: int) -> str:
    """With one decimal, or as many as a small size needs."""
    return f"{size / GIB:.1f}" if size >= GIB else f"{size / GIB:.2g}"
