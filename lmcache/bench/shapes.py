"""The page shapes that copying is measured on: what one block weighs in one layer, and how many layers there are."""

import attrs

from lmcache.engines.reference.shapes import GEOMETRIES
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup


@attrs.frozen
class PageShape:
    """One cached group of pages of one size, as some engine has it."""

    name: str
    geometry: Geometry
    chunk_size: int
    """Tokens."""
    one_allocation: bool = True
    """Whether all layers lie in one allocation, or each in its own: engines do either."""

    @property
    def number(self) -> int:
        """Number of the cached group."""
        return self.geometry.cached_groups[0]

    @property
    def group(self) -> KVGroup:
        """The cached group."""
        return self.geometry.groups[self.number]

    @property
    def blocks(self) -> int:
        """Blocks of a chunk."""
        return self.chunk_size // self.group.tokens_per_block

    @property
    def pages(self) -> int:
        """Pages of a chunk, over all layers."""
        return self.blocks * len(self.group.page_bytes)

    @property
    def object_bytes(self) -> int:
        """Bytes of the pages of one chunk."""
        return self.blocks * self.group.block_bytes

    @property
    def mixed(self) -> bool:
        """Whether pages differ in size."""
        return len(set(self.group.page_bytes)) > 1

    def __str__(self) -> str:
        own = "" if self.one_allocation else ", each layer allocated by itself"
        up_to = "up to " if self.mixed else ""
        return f"{self.name}: {self.pages} × {up_to}{max(self.group.page_bytes) / 1024:g} KiB a chunk{own}"


def page_shapes() -> tuple[PageShape, ...]:
    """The reference engine, Llama-8B and GLM-5.3."""
    llama = Geometry((KVGroup(GroupKind.FULL, 16, (64 << 10,) * 32),))
    # its kpool tail is scratch: never stored, and no bytes of ours
    glm = Geometry((KVGroup(GroupKind.FULL, 64, (73_728,) * 78), KVGroup(GroupKind.SCRATCH, 0, ())))
    return (
        # small pages; four times the usual chunk, because the target speaks of objects of 1 MB and more
        PageShape("reference engine", GEOMETRIES["llama"].geometry(), 1024),
        PageShape("Llama-8B", llama, 256),
        PageShape("Llama-8B", llama, 256, one_allocation=False),
        PageShape("GLM-5.3", glm, 256),
    )


def device_shapes() -> tuple[PageShape, ...]:
    """Full groups of models that are served from GPUs; the bytes of a page are those of vLLM on one rank."""

    def full(name: str, tokens: int, pages: tuple[int, ...], chunk: int = 256) -> PageShape:
        return PageShape(name, Geometry((KVGroup(GroupKind.FULL, tokens, pages),)), chunk)

    return (
        full("GLM-5.3", 64, (73_728,) * 78),
        # latents in FP8 with their scales, and the keys of the indexer in every fourth layer or so
        full("GLM-5.2-FP8", 64, (41_984,) * 78 + (8_448,) * 21),
        full("Llama-70B, TP 8", 16, (8_192,) * 80),
        full("gpt-oss-120b", 16, (32_768,) * 18),
        full("Qwen3-Next, TP 2", 544, (557_056,) * 12, chunk=544),
    )
