"""One frozen value for each kind of layer: what a block of it holds, in one layer on one rank.

They say what the spec classes of vLLM say, without vLLM. `content_bytes` is what a block holds and what the cache
stores; `page_bytes` is what the engine reserves for it, padding included, which decides how layers share blocks.
"""

import math
from typing import TypeAlias

import attrs

from lmcache.geometry.groups import GroupKind

BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "uint8": 1,
}
"""Bytes of one element, by the name of its type."""


@attrs.frozen
class Heads:
    """Attention with keys and values for each head."""

    block_size: int
    """Tokens."""
    heads: int
    """KV heads on one rank."""
    size: int
    """Elements of a key, and of a value."""
    dtype: str
    window: int = 0
    """Tokens of a sliding window; 0 for none."""
    span: int = 0
    """Tokens of a chunked-local span; 0 for none."""
    padded: int = 0
    """Bytes that the engine pads a page to; 0 for none."""

    @property
    def kind(self) -> GroupKind:
        """How its tokens depend on each other."""
        if self.span:
            return GroupKind.CHUNKED_LOCAL
        return GroupKind.SLIDING_WINDOW if self.window else GroupKind.FULL

    @property
    def family(self) -> tuple[object, ...]:
        """Layers of one family and one block size may share block ids, whatever their pages weigh."""
        return (self.kind, self.window or self.span)

    @property
    def content_bytes(self) -> int:
        """Bytes that a block holds."""
        return self.block_size * self.heads * 2 * self.size * BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes that the engine reserves for a block."""
        return self.padded or self.content_bytes

    @property
    def spec(self) -> str:
        """The class of vLLM that says the same."""
        return {
            GroupKind.FULL: "FullAttentionSpec",
            GroupKind.SLIDING_WINDOW: "SlidingWindowSpec",
            GroupKind.CHUNKED_LOCAL: "ChunkedLocalAttentionSpec",
        }[self.kind]

    def __str__(self) -> str:
        return f"keys and values, {self.heads} heads of {self.size}, {self.dtype}"


@attrs.frozen
class Latent:
    """One vector a token that all heads share, as in MLA, or one for several tokens. All ranks hold the same."""

    block_size: int
    """Tokens."""
    size: int
    """Elements of the vector."""
    dtype: str
    what: str = "latent vectors"
    """In a reader's words."""
    tokens_per_state: int = 1
    """Tokens that one vector stands for."""
    state_bytes: int = 0
    """Bytes of one vector in a packed format; 0 where `size` and `dtype` say it."""
    alignment: int = 1
    """Pages are padded to multiples of this many bytes."""
    window: int = 0
    """Tokens of a sliding window; 0 for none."""
    replayed: bool = False
    """The engine recomputes the window after a hit, so that nobody need store it."""
    replicated: bool = True
    """The engine says that all ranks hold the same bytes."""
    indexer: bool = False
    """It serves to find the tokens to attend to."""
    leader: bool = False
    """Its layer has an indexer of its own."""
    version: str = ""
    """Whose page format it is, where there are several."""
    cache_dtype: str = ""
    """The engine's name of the packed format."""

    @property
    def kind(self) -> GroupKind:
        """How its tokens depend on each other."""
        if self.replayed:
            return GroupKind.SCRATCH
        return GroupKind.SLIDING_WINDOW if self.window else GroupKind.FULL

    @property
    def family(self) -> tuple[object, ...]:
        """Full latents are of one family with full attention; windows of latents are not with other windows."""
        if self.window:
            return ("latent", self.window, self.replayed)
        return (GroupKind.FULL, 0)

    @property
    def content_bytes(self) -> int:
        """Bytes that a block holds."""
        return self.block_size // self.tokens_per_state * (self.state_bytes or self.size * BYTES[self.dtype])

    @property
    def page_bytes(self) -> int:
        """Bytes that the engine reserves for a block."""
        return math.ceil(self.content_bytes / self.alignment) * self.alignment

    @property
    def spec(self) -> str:
        """The class of vLLM that says the same."""
        return "SlidingWindowMLASpec" if self.window else "MLAAttentionSpec"

    def __str__(self) -> str:
        each = f"{self.state_bytes or self.size * BYTES[self.dtype]:,} bytes"
        return f"{self.what}, {each} " + (
            f"for {self.tokens_per_state} tokens" if self.tokens_per_state > 1 else "each"
        )


@attrs.frozen
class State:
    """A recurrent layer: a block holds the state after its last token."""

    block_size: int
    """Tokens from one snapshot to the next."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the tensors that make up a state, on one rank."""
    dtypes: tuple[str, ...]
    """Of each of them."""
    padded: int = 0
    """Bytes that the engine pads a page to; 0 for none."""
    checkpoints: int = 0
    """Blocks that the engine keeps for snapshots taken inside a prefill."""
    checkpoint_alignment: int = 0
    """Tokens that such snapshots are aligned to; 0 for none."""

    @property
    def kind(self) -> GroupKind:
        """How its tokens depend on each other."""
        return GroupKind.RECURRENT

    @property
    def family(self) -> tuple[object, ...]:
        """States of one size may share block ids."""
        return (self.kind, self.page_bytes, self.checkpoints, self.checkpoint_alignment)

    @property
    def content_bytes(self) -> int:
        """Bytes of a state."""
        return sum(math.prod(shape) * BYTES[dtype] for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    @property
    def page_bytes(self) -> int:
        """Bytes that the engine reserves for a state."""
        return self.padded or self.content_bytes

    @property
    def spec(self) -> str:
        """The class of vLLM that says the same."""
        return "MambaSpec"

    def __str__(self) -> str:
        parts = " + ".join(
            f"{'×'.join(map(str, shape))} {dtype}" for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )
        return f"states, {parts}"


@attrs.frozen
class Ring:
    """A few tokens that belong to one request and mean nothing to another."""

    block_size: int
    """Tokens that fit."""
    heads: int
    size: int
    """Elements a head."""
    dtype: str
    what: str
    """In a reader's words: what it holds."""
    sharded: bool = True
    """Whether decode context parallelism would shard it."""

    @property
    def kind(self) -> GroupKind:
        """Scratch."""
        return GroupKind.SCRATCH

    @property
    def family(self) -> tuple[object, ...]:
        """Rings share block ids."""
        return (self.kind,)

    @property
    def content_bytes(self) -> int:
        """Bytes of the ring."""
        return self.block_size * self.heads * self.size * BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """The same: nothing is padded."""
        return self.content_bytes

    @property
    def spec(self) -> str:
        """The class of vLLM that says the same."""
        return "CircularBufferSpec"

    def __str__(self) -> str:
        return self.what


LayerSpec: TypeAlias = Heads | Latent | State | Ring


@attrs.frozen
class CacheLayer:
    """A part of the model that keeps something for each token, or a state: one page in each of its blocks."""

    name: str
    """As the engine names it."""
    spec: LayerSpec


@attrs.frozen
class Layers:
    """All that a model keeps, in the engine's order."""

    layers: tuple[CacheLayer, ...]
    blocks_outermost: bool = False
    """The pages of all layers of a block lie together, so that groups need not have pages of one size."""
