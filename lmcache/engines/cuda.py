"""What calls CUDA itself because torch does not: locking memory for the device, and many copies in one call.

The only such module. Nothing of it has run on a GPU yet (docs/benchmarks/index.md lists what has not): what can be
proved without one is proved with the CPU in the device's place. Imports torch.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from lmcache.core.numa import ANYWHERE
from lmcache.errors import ConfigError

PCI_DEVICES = Path("/sys/bus/pci/devices")
"""Where the kernel shows what is plugged in, and where."""

Addresses = npt.NDArray[np.uint64]

_PORTABLE, _MAPPED = 1, 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
_SUCCESS = 0
_BATCHES_SINCE = 12080
"""CUDA 12.8: the first with cuMemcpyBatchAsync; asking for that version gives its signature on newer drivers, too."""
_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: the source may be written until the stream comes to the copy


def check_device(device: torch.device) -> None:
    """Refuse an accelerator that nobody has tried. Raises ConfigError.

    `cpu` is what this can be proved on.
    """
    hip = getattr(torch.version, "hip", None)
    if device.type == "cuda" and hip:
        raise ConfigError(
            f"the KV caches are on {device} of ROCm {hip}, which lmcache has not been tried on",
            remedy="run without the connector; CUDA devices and CPUs are served",
        )
    if device.type not in {"cpu", "cuda"}:
        raise ConfigError(
            f"the KV caches are on {device}, a kind of device that lmcache has not been tried on",
            remedy="run without the connector; CUDA devices and CPUs are served",
        )


def device_node(device: torch.device) -> int:
    """The NUMA node that a CUDA device is attached to, as the kernel knows it; `ANYWHERE` where it does not."""
    if device.type != "cuda":
        return ANYWHERE
    found = torch.cuda.get_device_properties(device)
    try:
        slot = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        return int((PCI_DEVICES / slot / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):  # an older torch, or a container without /sys
        return ANYWHERE


class CudaLocks:
    """Locks host memory, so that a CUDA device reads and writes it by itself. Any thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lock(self, address: int, size: int) -> None:
        """Lock [address, address + size). Raises OSError where the driver or the host refuses."""
        # a thread that has chosen no device would open device 0 for it, at half a gigabyte of its memory
        with torch.cuda.device(self._device):
            runtime = torch.cuda.cudart()
            self._check("cudaHostRegister", runtime.cudaHostRegister(address, size, _PORTABLE | _MAPPED), runtime)

    def unlock(self, address: int) -> None:
        """Undo `lock`. Raises OSError."""
        with torch.cuda.device(self._device):
            runtime = torch.cuda.cudart()
            self._check("cudaHostUnregister", runtime.cudaHostUnregister(address), runtime)

    def _check(self, call: str, result: Any, runtime: Any) -> None:
        if result != runtime.cudaError.success:
            raise OSError(f"{call} says {result}")


class CopyMany(Protocol):
    """Submits many copies at once."""

    def __call__(self, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        """On the calling thread's current stream. Raises OSError."""


def copy_many(device: torch.device) -> CopyMany | None:
    """The driver's batched copies, or None where it has none."""
    if device.type != "cuda":
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        find = driver.cuGetProcAddress_v2
    except (OSError, AttributeError):
        return None
    found, told = ctypes.c_void_p(), ctypes.c_int()
    flags = ctypes.c_uint64(0)
    error = find(b"cuMemcpyBatchAsync", ctypes.byref(found), _BATCHES_SINCE, flags, ctypes.byref(told))
    if error != _SUCCESS or not found.value:
        return None
    return BatchedCopies(found.value, NamedStreams(device))


class NamedStreams:
    """The calling thread's current stream, or one of its own that stands in for the default stream.

    The driver takes no batch on the default stream (`CUstream` 0), on which scripts and tests work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stand_in: Any = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[int]:
        """A context for a call to the driver: gives the stream; what is submitted keeps its order."""
        current = self._module.current_stream(self._device)
        if current.cuda_stream:
            yield int(current.cuda_stream)
            return
        if self._stand_in is None:
            self._stand_in = self._module.Stream(self._device)
        self._stand_in.wait_stream(current)
        try:
            yield int(self._stand_in.cuda_stream)
        finally:
            current.wait_stream(self._stand_in)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", ctypes.c_uint),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


MEMCPY_BATCH = ctypes.CFUNCTYPE(
    ctypes.c_uint,
    *(ctypes.c_void_p,) * 3,  # targets, sources, sizes
    ctypes.c_size_t,  # how many
    *(ctypes.c_void_p,) * 2,  # attributes, and for each the first copy that it is for
    ctypes.c_size_t,  # how many attributes
    *(ctypes.c_void_p,) * 2,  # which copy failed; stream
)
"""`CUresult cuMemcpyBatchAsync(…)` of CUDA 12.8."""


class BatchedCopies:
    """`CopyMany` by a function of that signature at an address."""

    def __init__(self, function: int, stream: Callable[[], AbstractContextManager[int]]) -> None:
        """`stream` gives a stream that is not the default one."""
        self._call = MEMCPY_BATCH(function)
        self._stream = stream
        self._attributes = _Attributes(source_access_order=_IN_STREAM_ORDER)

    def __call__(self, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        """As `CopyMany`. The arrays are read before this returns."""
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        with self._stream() as stream:
            error = self._call(
                *(targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(targets)),
                *(ctypes.addressof(self._attributes), ctypes.addressof(first), 1),
                *(ctypes.addressof(failed), stream),
            )
        if error != _SUCCESS:
            raise OSError(f"cuMemcpyBatchAsync says {error}, at copy {failed.value} of {len(targets)}")
