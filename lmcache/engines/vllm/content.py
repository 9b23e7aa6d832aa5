"""What changes the KV of a request besides its tokens, and which requests are never cached. Scheduler process only."""

import functools
import hashlib
import logging
import string
from typing import Any, Protocol

import attrs

from lmcache.core.hints import NO_HINTS, Hints
from lmcache.core.keys import ChainHash, ContentItem, chain_root, tenant_of
from lmcache.engines.vllm.lora import Evidence, Lora, LoraBook
from lmcache.engines.vllm.wishes import Wishes, wishes_of
from lmcache.errors import ConfigError

log = logging.getLogger(__name__)

DIGEST_DIGITS = 64
"""Fewest hexadecimal digits of an item's name that is taken for a digest of its content (vLLM's have 64 or 128)."""

_HEX = frozenset(string.hexdigits)


class EngineRequest(Protocol):
    """As much of vLLM's request as the cache looks at."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    cache_salt: str | None
    lora_request: Any
    prompt_embeds: Any
    mm_features: list[Any]
    resumable: bool
    skip_reading_prefix_cache: bool
    all_token_ids: Any
    kv_transfer_params: dict[str, Any] | None


@attrs.frozen
class Content:
    """Where a request's chain starts, and who it belongs to."""

    root: ChainHash
    items: tuple[ContentItem, ...]
    tenant: str
    """What the request calls its tenant; else a short digest of the salt, never the salt itself, which is a secret."""
    lora: Lora | None = None
    number: int = 0
    """Of the LoRA, in vLLM."""
    hints: Hints = NO_HINTS
    """How long the request wants its chunks kept."""

    def certain(self) -> bool:
        """Whether the engine still computes the request with the weights that its root names. A few stat calls."""
        return self.lora is None or self.lora.certain()

    def evidence(self) -> Evidence | None:
        """What a worker has to find so when it has computed KV, or it must not store it."""
        return self.lora.evidence(self.number) if self.lora is not None else None


@attrs.frozen
class NeverCached:
    """A request that the cache leaves alone, and why."""

    reason: str


def content_of(request: EngineRequest, generation: str, loras: LoraBook) -> Content | NeverCached:
    """Tell what, besides tokens, decides the request's KV.

    `generation` is empty until the engine's cache is reset, and something never used before after each reset: entries
    stored earlier are then out of this engine's reach.
    """
    # whatever else is true of the request, the book must see every LoRA that is named
    lora = loras.find(request.lora_request) if request.lora_request is not None else None
    reason = _why_never(request, lora)
    if reason:
        return NeverCached(reason)
    # as in vLLM's own prefix cache, an empty salt is none
    salt = request.cache_salt or ""
    facts = {"salt": salt} if salt else {}
    if generation:
        facts["generation"] = generation
    number = 0
    if lora is not None:
        facts["lora"] = lora.digest
        number = request.lora_request.lora_int_id
    wishes = _wishes(request)
    tenant = wishes.tenant or tenant_of(salt)
    return Content(chain_root(facts), tuple(map(_item, request.mm_features)), tenant, lora, number, wishes.hints)


def _wishes(request: EngineRequest) -> Wishes:
    try:
        return wishes_of(request.kv_transfer_params)
    except ConfigError as error:
        _complain(str(error))
        return Wishes()


@functools.lru_cache(64)  # a client that is wrong is so with every request
def _complain(text: str) -> None:
    log.warning("lmcache: what a request says of its chunks is left out: %s (said once)", text)


def _why_never(request: EngineRequest, lora: Lora | None) -> str:
    if lora is not None and lora.reason:
        return lora.reason
    if lora is not None and request.lora_request.load_inplace:
        return "it makes the engine load its LoRA anew; load changed weights under another name instead"
    if request.prompt_embeds is not None:
        return "its prompt is given as embeddings, which tokens do not describe"
    if request.resumable:
        return "its input is streamed, so tokens that were computed can still be taken back"
    if any(not _is_digest(feature.identifier) for feature in request.mm_features):
        return "a multimodal item is known by a name and not by a digest of its content"
    return ""


def _is_digest(name: str) -> bool:
    return len(name) >= DIGEST_DIGITS and _HEX.issuperset(name)


def _item(feature: Any) -> ContentItem:
    place = feature.mm_position
    digest = hashlib.sha256(f"{feature.modality}\0{feature.identifier}\0{place.length}".encode()).digest()
    return ContentItem(place.offset, place.offset + place.length, digest)
