"""From what stands after `--l2` to an open tier with its codec."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import attrs

from lmcache.core.blob import BlobStore
from lmcache.core.blob_format import CODEC_BYTES
from lmcache.core.codec import Codec
from lmcache.core.tier import StorageTier
from lmcache.core.tier_url import StorePolicy, TierSettings, TierURL
from lmcache.errors import ConfigError, LMCacheError, PluginError
from lmcache.plugins.codecs.chain import Chain
from lmcache.plugins.offers import Offers

T = TypeVar("T")


@attrs.frozen
class OpenedTier:
    """A tier that is open, and how the user wants it to be used."""

    blobs: BlobStore
    settings: TierSettings


def open_tier(url: str, tiers: Offers[StorageTier], codecs: Offers[Codec]) -> OpenedTier:
    """Open what `url` names. Raises ConfigError for whatever keeps it from being opened as it is written."""
    parsed = TierURL.parse(url)
    tier_class = tiers.find(parsed.scheme)
    codec_classes = [codecs.find(name) for name in parsed.query.get("codec", "").split("+") if name]
    codec_options = {name: sentence for each in codec_classes for name, sentence in each.options.items()}
    settings, for_codecs = parsed.settle(tier_class.options, tier_class.secrets, codec_options, tier_class.threads)
    codec = _make_codec(codec_classes, for_codecs)
    tier = _made(f"the storage tier {settings.location}", tier_class, lambda: tier_class(settings.location))
    chunks = tier.store_of_chunks()
    if chunks is not None:
        if codec:
            raise ConfigError(f"--l2 {settings.location} keeps chunks as they are", remedy="leave codec= out")
        if chunks.in_order and settings.store_policy is StorePolicy.ON_EVICT:
            raise ConfigError(
                f"--l2 {settings.location} takes a chunk only where it has the one before, and what leaves L1 first is "
                f"the end of a chain",
                remedy="use store=write-through, or store=never to read only",
            )
        return OpenedTier(chunks, settings)
    return OpenedTier(BlobStore(tier, codec), settings)


def _make_codec(classes: Sequence[type[Codec]], options: Mapping[str, str]) -> Codec | None:
    links = []
    for each in classes:
        own = {name: options[name] for name in each.options if name in options}
        links.append(_made(f"the codec {each.name!r}", each, lambda each=each, own=own: each(own)))  # type: ignore[misc]
    if not links:
        return None
    codec = links[0] if len(links) == 1 else Chain(links)
    if not codec.name.isascii() or len(codec.name) > CODEC_BYTES:
        raise ConfigError(
            f"codec={codec.name} does not fit in the header of a blob", remedy=f"use at most {CODEC_BYTES} characters"
        )
    return codec


def _made(what: str, made_of: type[T], make: Callable[[], T]) -> T:
    try:
        return make()
    except LMCacheError:
        raise
    except (Exception, SystemExit) as error:  # a plugin's own code runs here, and may raise anything
        where = f"{made_of.__module__}.{made_of.__qualname__}"
        raise PluginError(f"{what}, {where}, cannot be opened: {type(error).__name__}: {error}") from error
