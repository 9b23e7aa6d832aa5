"""The bytes behind an engine's tensors in memory that the CPU reaches. Imports torch, so only a worker may load it."""

from typing import Any

import numpy as np
import torch

from lmcache.engines.copy import Bytes


class StorageBytes:
    """Each storage as one NumPy array of bytes, made once, so that layers that share memory are views of one array."""

    def __init__(self) -> None:
        self._arrays: dict[int, Bytes] = {}

    def of(self, tensor: torch.Tensor) -> Bytes:
        """All bytes of the storage behind a CPU tensor."""
        storage: Any = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._arrays:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._arrays[address] = np.asarray(whole.numpy())
        return self._arrays[address]
