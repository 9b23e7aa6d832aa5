"""Model shapes of the reference engine: which KV groups it has, how its layers mix tokens, and what a page then weighs.

`GEOMETRIES` names one shape for every kind of KV cache that real models have. They are small, and their block sizes,
windows and page sizes are deliberately awkward where real ones are.
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType

import attrs

from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

FLOAT_BYTES = 4


class Mixer(enum.Enum):
    """How a layer reads earlier tokens, which decides what its pages hold."""

    HEADS = "heads"
    """Attention with keys and values for each head."""
    LATENT = "latent"
    """Attention through one latent vector a token that all heads share, as in MLA: every rank holds the same bytes."""
    SPARSE = "sparse"
    """Latent attention to a few blocks only, chosen by the mean of each block's index keys. A block's mean is kept in a
    second page once the block is complete; until then a running sum lives in the request's scratch block (GLM's kpool
    tail)."""
    STATE = "state"
    """A gated linear recurrence: a block holds the state after its last token."""
    NONE = "none"
    """Scratch: has no layers of its own."""


@attrs.frozen
class GroupShape:
    """One KV group."""

    kind: GroupKind
    tokens_per_block: int
    """0 for scratch."""
    mixer: Mixer
    window: int = 0
    """Tokens; for windowed kinds."""


@attrs.frozen
class ModelShape:
    """A whole model. Two engines share KV only if all of this is equal, and their weights are."""

    name: str
    groups: tuple[GroupShape, ...]
    layers: tuple[int, ...]
    """The group of each layer, from the first layer on."""
    hidden: int = 64
    heads: int = 4
    head_size: int = 16
    latent_size: int = 24
    """Of a latent page's entry, the part without positions."""
    rotary_size: int = 8
    """Of a latent page's entry, the part that carries the position."""
    index_size: int = 8
    """Floats of an index key."""
    selected_blocks: int = 4
    """Complete blocks that a token of a sparse layer reads besides its own."""
    vocabulary: int = 512

    @property
    def scratch_group(self) -> int:
        """Number of the scratch group. Raises ValueError when there is none."""
        return [group.kind for group in self.groups].index(GroupKind.SCRATCH)

    def layers_of(self, group: int) -> tuple[int, ...]:
        """Numbers of the layers whose pages `group` holds."""
        return tuple(number for number, owner in enumerate(self.layers) if owner == group)

    def page_floats(self, group: int, ranks: int) -> tuple[int, ...]:
        """Floats of one block in each page array of `group`, on one of `ranks` ranks. A sparse layer has two arrays."""
        tokens, mixer = self.groups[group].tokens_per_block, self.groups[group].mixer
        heads = self.heads // ranks
        sizes: tuple[int, ...] = {
            Mixer.HEADS: (2 * tokens * heads * self.head_size,),
            Mixer.LATENT: (tokens * (self.latent_size + self.rotary_size),),
            Mixer.SPARSE: (tokens * (self.latent_size + self.rotary_size), self.index_size),
            Mixer.STATE: (heads * self.head_size**2,),
            Mixer.NONE: (),
        }[mixer]
        return sizes * len(self.layers_of(group))

    def geometry(self, ranks: int = 1) -> Geometry:
        """What the cache needs to know of this model on `ranks` ranks."""
        return Geometry(tuple(self._kv_group(number, ranks) for number in range(len(self.groups))), ranks)

    def _kv_group(self, number: int, ranks: int) -> KVGroup:
        group = self.groups[number]
        if group.kind is GroupKind.SCRATCH:
            return KVGroup(GroupKind.SCRATCH, 0, ())
        same_everywhere = group.mixer in {Mixer.LATENT, Mixer.SPARSE}
        return KVGroup(
            group.kind,
            group.tokens_per_block,
            tuple(FLOAT_BYTES * floats for floats in self.page_floats(number, ranks)),
            group.window,
            shards=1 if same_everywhere else ranks,
        )


def _full(tokens_per_block: int = 16, mixer: Mixer = Mixer.HEADS) -> GroupShape:
    return GroupShape(GroupKind.FULL, tokens_per_block, mixer)


def _sliding(window: int, tokens_per_block: int = 16) -> GroupShape:
    return GroupShape(GroupKind.SLIDING_WINDOW, tokens_per_block, Mixer.HEADS, window)


_SHAPES = (
    ModelShape("llama", (_full(),), (0, 0, 0, 0)),
    ModelShape("mla", (_full(mixer=Mixer.LATENT),), (0, 0, 0)),
    # windows of no whole number of blocks, and two groups of one kind
    ModelShape("gemma", (_sliding(100), _sliding(100), _full()), (0, 1, 0, 1, 2)),
    # a window shorter than a block, beside larger blocks
    ModelShape("gptoss", (_sliding(24, 32), _full(64)), (0, 1, 0, 1)),
    ModelShape("chunked", (GroupShape(GroupKind.CHUNKED_LOCAL, 16, Mixer.HEADS, window=128), _full()), (0, 0, 0, 1)),
    ModelShape("hybrid", (GroupShape(GroupKind.RECURRENT, 64, Mixer.STATE), _full()), (0, 0, 0, 1)),
    ModelShape("recurrent", (GroupShape(GroupKind.RECURRENT, 64, Mixer.STATE),), (0, 0)),
    ModelShape("glm53", (_full(64, Mixer.LATENT),), (0, 0, 0)),
    ModelShape(
        "glm53_flash",
        (_full(64, Mixer.SPARSE), GroupShape(GroupKind.SCRATCH, 0, Mixer.NONE)),
        (0, 0, 0),
    ),
    ModelShape(
        "everything",
        (
            _full(32),
            _sliding(40),
            GroupShape(GroupKind.CHUNKED_LOCAL, 16, Mixer.HEADS, window=64),
            GroupShape(GroupKind.RECURRENT, 32, Mixer.STATE),
            _full(16, Mixer.LATENT),
        ),
        (1, 2, 3, 4, 0),
    ),
)

GEOMETRIES: Mapping[str, ModelShape] = MappingProxyType({shape.name: shape for shape in _SHAPES})
"""Every shape by name."""
