"""The main job on the reference engine: every geometry, in one process, and one on two ranks."""

from collections.abc import Iterator

import numpy as np

from lmcache.core.control import Control, ServerAddress
from lmcache.engines.demo import DemoRow, Progress
from lmcache.engines.reference.engine import Engine
from lmcache.engines.reference.requests import Output
from lmcache.engines.reference.shapes import GEOMETRIES, ModelShape
from lmcache.geometry.chunking import default_chunk_size
from lmcache.geometry.hits import longest_hit

L1_GB = 0.25

PROMPT_TOKENS = 1537
ANSWER_TOKENS = 8

RUNS = (
    ("llama", 1),
    ("llama", 2),
    ("mla", 1),
    ("gemma", 1),
    ("chunked", 1),
    ("hybrid", 1),
    ("glm53", 1),
    ("glm53_flash", 1),
)
"""Geometries and their ranks."""


def run(address: str, on_progress: Progress) -> Iterator[DemoRow]:
    """Yield a row for each of `RUNS`."""
    for name, ranks in RUNS:
        title = name if ranks == 1 else f"{name}, {ranks} ranks"
        on_progress(f"{title}: starting the engine")
        with Engine(GEOMETRIES[name], server=address, ranks=ranks) as engine:
            yield _ask_twice(engine, title, GEOMETRIES[name], ranks, address, on_progress)


def _ask_twice(
    engine: Engine, title: str, shape: ModelShape, ranks: int, address: str, on_progress: Progress
) -> DemoRow:
    prompt = np.random.default_rng(len(title)).integers(0, shape.vocabulary, PROMPT_TOKENS).tolist()
    # what the first request of a process costs besides: first calls, memory touched for the first time
    engine.generate([prompt[::-40]], max_tokens=1)
    on_progress(f"{title}: {PROMPT_TOKENS} tokens, cold")
    (cold,) = engine.generate([prompt], ANSWER_TOKENS)
    with Control(ServerAddress.parse(address)) as control:
        control.wait_idle()
    engine.drop_prefix_cache()
    on_progress(f"{title}: {PROMPT_TOKENS} tokens, served from the cache")
    (served,) = engine.generate([prompt], ANSWER_TOKENS)
    return DemoRow(
        title,
        PROMPT_TOKENS,
        cold.first_token_s,
        cold.computed_tokens,
        served.first_token_s,
        served.computed_tokens,
        served.hit_tokens,
        expected_hit(shape, ranks, PROMPT_TOKENS),
        same_answer(cold, served),
    )


def expected_hit(shape: ModelShape, ranks: int, prompt_tokens: int, chunk_size: int = 0) -> int:
    """Tokens that a prompt must hit once it has been stored; without `chunk_size`, at the server's default."""
    geometry = shape.geometry(ranks)
    chunk_size = chunk_size or default_chunk_size(geometry)
    stored = [(1 << len(geometry.groups)) - 1] * (prompt_tokens // chunk_size)
    return longest_hit(geometry, chunk_size, stored, prompt_tokens - 1).tokens


def same_answer(one: Output, other: Output) -> bool:
    """Whether two answers are the same, to the last bit of every logit."""
    return one.tokens == other.tokens and all(
        np.array_equal(a, b) for a, b in zip(one.logits, other.logits, strict=True)
    )
