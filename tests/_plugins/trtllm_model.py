"""A toy model whose KV is a function of tokens, positions, layer, role and rank: any byte can be computed again.

As in a real model, the KV of a token depends on every token before it, on LoRA weights and on images at their places,
and not on a salt.
"""

import functools
import hashlib
from collections.abc import Sequence

import attrs
import numpy as np

TOKEN_BYTES = 16
"""Of one token in one buffer: four float32. No digest is a row of NaNs."""
VOCABULARY = 1000


@attrs.frozen
class LayerGroup:
    """Layers that share block ids."""

    layers: tuple[int, ...]
    window: int = 0
    """Tokens; 0 for full attention."""
    roles: tuple[str, ...] = ("key", "value")
    """Buffers of a layer that differ from rank to rank; of MLA, the only one, which does not."""
    replicated: tuple[str, ...] = ()
    """Buffers of a layer that are the same on every rank."""

    @property
    def buffers(self) -> tuple[tuple[int, str], ...]:
        """Layer and role of every buffer, in memory order."""
        return tuple((layer, role) for layer in self.layers for role in (*self.roles, *self.replicated))


@attrs.frozen
class Toy:
    """What is computed, and in which blocks."""

    groups: tuple[LayerGroup, ...] = (LayerGroup((0, 1)),)
    tokens_per_block: int = 4
    weights: int = 1

    @property
    def mla(self) -> bool:
        return all("value" not in group.roles for group in self.groups)

    def same_everywhere(self, group: LayerGroup, role: str) -> bool:
        return self.mla or role in group.replicated


PLAIN = Toy()
"""Two layers of full attention."""


Image = tuple[list[int], int, int]
"""Hash words, first position, length."""


def chain(tokens: Sequence[int], weights: str, images: Sequence[Image]) -> list[bytes]:
    """What each position knows of all that came before it; `weights` are the model's and a LoRA's."""
    states, state = [], hashlib.blake2b(weights.encode(), digest_size=16).digest()
    for position, token in enumerate(tokens):
        seen = [(words, position - start) for words, start, length in images if 0 <= position - start < length]
        state = hashlib.blake2b(state + f"{token} {seen}".encode(), digest_size=16).digest()
        states.append(state)
    return states


@functools.lru_cache(200_000)
def token_bytes(state: bytes, layer: int, role: str, rank: int) -> bytes:
    """The KV of one token in one buffer; `rank` is -1 where all ranks hold the same."""
    return hashlib.blake2b(state + f"{layer} {role} {rank}".encode(), digest_size=TOKEN_BYTES).digest()


def row(states: list[bytes], layer: int, role: str, rank: int) -> np.ndarray:
    """The KV of consecutive tokens in one buffer, as `[tokens, bytes]`."""
    joined = b"".join(token_bytes(state, layer, role, rank) for state in states)
    return np.frombuffer(joined, np.uint8).reshape(-1, TOKEN_BYTES)
