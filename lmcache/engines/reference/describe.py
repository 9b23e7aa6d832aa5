"""Adapter, part 1: what the cache must know of this engine. All that gives the same tokens other bytes is a fact."""

from lmcache.core.client import Engine
from lmcache.core.protocol import Role
from lmcache.engines.reference.shapes import ModelShape

LAYOUT = "reference 1"
"""Raised when pages come to hold the same numbers in another order."""


def describe(shape: ModelShape, *, seed: int, ranks: int, role: Role, rank: int = 0) -> Engine:
    """One process of the engine, as it introduces itself to the server.

    The geometry speaks for itself (block sizes, windows, pages, ranks); the facts are all the rest. The weights are
    named by what they are made from, not by the model's name alone: two seeds under one name must not share KV.
    """
    facts = {
        "engine": "reference",
        "model": f"reference/{shape.name}",
        "weights": f"seed {seed} of {shape}",
        "dtype": "float32",
        "layout": LAYOUT,
    }
    return Engine(facts, shape.geometry(ranks), role, rank)
