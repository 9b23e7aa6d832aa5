"""What changes the KV of a request besides its tokens, and which requests are never cached. Scheduler process only."""

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import attrs

from lmcache.core.keys import ChainHash, ContentItem, chain_root, tenant_of

HIDDEN = ("prompt_embedding_table", "multimodal_embedding", "py_multimodal_data")
"""Attributes of a request with what tokens do not describe, where it has it."""


@attrs.frozen
class Content:
    """Where a request's chain starts, and who it belongs to."""

    root: ChainHash
    items: tuple[ContentItem, ...]
    tenant: str


@attrs.frozen
class NeverCached:
    """A request that the cache leaves alone, and why."""

    reason: str


def content_of(request: Any, engine_id: str) -> Content | NeverCached:
    """Tell what, besides tokens, decides the request's KV.

    `engine_id` is this engine's alone: TensorRT-LLM tells a LoRA by a number that means other weights elsewhere.
    """
    if getattr(request, "is_dummy_request", False) or getattr(request, "is_cuda_graph_dummy", False):
        return NeverCached("it is a dummy that warms the engine up")
    items = _items(request)
    if items is None:
        return NeverCached("a multimodal item has no hash, or no place in the prompt")
    if not items and any(getattr(request, name, None) is not None for name in HIDDEN):
        return NeverCached("a part of its input is neither tokens nor an item with a hash")
    facts = {}
    salt = _salt(request)
    if salt:
        facts["salt"] = salt
    lora = getattr(request, "lora_task_id", None)
    if lora is not None:
        facts["lora"] = f"{engine_id} {lora}"
    return Content(chain_root(facts), items, tenant_of(salt))


def _salt(request: Any) -> str:
    """As in TensorRT-LLM's own prefix cache, an empty salt is none; some versions give a number in its place."""
    salt = getattr(request, "cache_salt", None)
    if salt:
        return str(salt)
    number = getattr(request, "cache_salt_id", None)
    return "" if number is None else f"number {number}"


def _items(request: Any) -> tuple[ContentItem, ...] | None:
    """The multimodal items with their places; None where something of one is missing."""
    hashes, places, lengths = (
        getattr(request, name, None) or ()
        for name in ("multimodal_hashes", "multimodal_positions", "multimodal_lengths")
    )
    if not len(hashes) == len(places) == len(lengths):
        return None
    items = [
        ContentItem(int(start), int(start) + int(length), _digest(words, int(length)))
        for words, start, length in zip(hashes, places, lengths, strict=True)
    ]
    return None if any(item.stop <= item.start for item in items) else tuple(items)


def _digest(words: Sequence[int], length: int) -> bytes:
    """TensorRT-LLM gives a digest as signed 32-bit words."""
    return hashlib.sha256(b"".join(struct.pack("<q", int(word)) for word in (length, *words))).digest()
