"""The bytes behind vLLM's tensors. Imports torch, so only a worker may load it."""

from typing import Any

import numpy as np
import torch

from lmcache.engines.vllm.describe import Bytes
from lmcache.errors import ConfigError


class StorageBytes:
    """Each storage as one NumPy array of bytes, made once, so that layers that share memory are views of one array."""

    def __init__(self) -> None:
        self._arrays: dict[int, Bytes] = {}

    def of(self, layer: str, tensor: torch.Tensor) -> Bytes:
        """All bytes of the storage behind `tensor`. Raises ConfigError where NumPy cannot reach them."""
        if tensor.device.type != "cpu":
            raise ConfigError(
                f"the KV cache of layer {layer} is on {tensor.device}, and this version copies from CPU memory only",
                remedy="run vLLM for CPU, or without the connector",
            )
        storage: Any = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._arrays:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._arrays[address] = np.asarray(whole.numpy())
        return self._arrays[address]
