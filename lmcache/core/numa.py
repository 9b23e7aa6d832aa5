"""On which NUMA node the slabs of the arena lie: near the devices of the workers. Linux, by mbind(2), without libnuma.

A policy that is set on a shared memory file holds for the file, whoever touches its pages first, and must be set
before. On a host with one node nothing of this does anything.
"""

import ctypes
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("lmcache.server")

NODES = Path("/sys/devices/system/node")
"""Where the kernel shows its nodes."""

ANYWHERE = -1
"""Number of no node: nobody knows, or it does not matter."""

_MBIND = {"x86_64": 237, "aarch64": 235}.get(platform.machine())
"""Number of the system call: the C library has no function for it."""
_MPOL_PREFERRED = 1
"""There if there is memory, and elsewhere before failing."""
_WORD = 64
_libc = ctypes.CDLL(None, use_errno=True)

Prefer = Callable[[int, int, int], None]
"""Of [address, address + size) the pages shall be made on a node. Raises OSError."""


def nodes_with_memory() -> frozenset[int]:
    """Numbers of this host's nodes; none where the kernel knows no nodes."""
    try:
        return frozenset(_numbers((NODES / "has_memory").read_text()))
    except (OSError, ValueError):
        return frozenset()


def prefer(address: int, size: int, node: int) -> None:
    """`Prefer`, by the kernel."""
    if _MBIND is None:
        raise OSError(f"the number of mbind(2) on {platform.machine()} is not known here")
    words = node // _WORD + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // _WORD] = 1 << node % _WORD
    # the kernel takes one bit less than it is told of
    bits = words * _WORD + 1
    # whole words, for what a varargs call leaves in the upper half of one is not defined
    address_, size_, mode, bits_, flags = (ctypes.c_ulong(n) for n in (address, size, _MPOL_PREFERRED, bits, 0))
    if _libc.syscall(ctypes.c_long(_MBIND), address_, size_, mode, mask, bits_, flags):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


class Placement:
    """Gives each slab a node. For the server's thread."""

    def __init__(self, nodes: frozenset[int], prefer: Prefer = prefer) -> None:
        """`nodes` are those with memory."""
        self._nodes = nodes if len(nodes) > 1 else frozenset()
        self._prefer = prefer
        self._placed: dict[int, int] = {}

    def near(self, node: int) -> None:
        """A worker has come whose device is on this node. It stays so: engines come back where they were."""
        if node in self._nodes and node not in self._placed:
            self._placed[node] = 0
            log.info("L1 grows on NUMA nodes %s, where the engines' devices are", sorted(self._placed))

    def place(self, address: int, size: int) -> None:
        """Before these bytes are touched: the next node in turn, of those that devices are near. Raises nothing."""
        if not self._placed:
            return
        node = min(self._placed, key=lambda each: (self._placed[each], each))
        try:
            self._prefer(address, size, node)
        except OSError as error:
            self._nodes, self._placed = frozenset(), {}
            log.warning(
                "L1 cannot be put near the devices, and lies wherever the kernel puts it: %s. In a container the "
                "server needs the capability SYS_NICE for it (`--cap-add SYS_NICE`)",
                error,
            )
        else:
            self._placed[node] += size

    @property
    def placed(self) -> dict[int, int]:
        """Bytes on each node that devices are near."""
        return dict(self._placed)


def _numbers(text: str) -> list[int]:
    """Of a list as the kernel writes it: `0-1,4`."""
    found: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.extend(range(int(first), int(last or first) + 1))
    return found
