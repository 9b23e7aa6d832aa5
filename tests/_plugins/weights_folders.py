"""Folders with weights for tests, and beginnings of processes that have read them or have not."""

import json
import struct
import time
from pathlib import Path

import attrs

from lmcache.engines.unchanged import Beginning, process_beginning

LATER_NS = 15_000_000_000
"""More than any doubt about clocks."""


def safetensors(path: Path, tensors: dict[str, bytes], **metadata: str) -> Path:
    """Write a file of that format with these bytes as tensors."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))
    return path


def lora_folder(folder: Path, fill: bytes = b"a", rank: int = 4) -> Path:
    """Write a LoRA as far as its files go: nobody can compute with it."""
    folder.mkdir(parents=True, exist_ok=True)
    safetensors(folder / "adapter_model.safetensors", {"a": fill * 1000, "b": fill * 100_000})
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": 8}))
    return folder


def begins_later() -> Beginning:
    """A process that begins after all that was written until now: what it reads is what was written."""
    now = process_beginning()
    shift = time.time_ns() + LATER_NS - now.ns
    return attrs.evolve(now, ns=now.ns + shift, boot_ns=now.boot_ns + shift)


def begins_now() -> Beginning:
    """A process that begins now, a moment after what was written before and a moment before what will be written."""
    time.sleep(0.05)
    now = process_beginning()
    shift = time.time_ns() - now.ns
    time.sleep(0.05)
    return attrs.evolve(now, ns=now.ns + shift, boot_ns=now.boot_ns + shift)
