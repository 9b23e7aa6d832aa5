"""The connector under a model of TensorRT-LLM's executor, one KV pool, beside a real server: byte for byte."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="the simulated KV caches are torch tensors")

from trtllm_names import FLAT, LAYOUTS, SALTED, installed
from trtllm_stand import CHUNK, TrtllmServer, prompt

OTHER = [7]


@pytest.fixture(scope="module")
def server() -> Iterator[TrtllmServer]:
    with TrtllmServer() as running:
        yield running


@pytest.fixture(params=[FLAT, SALTED, LAYOUTS], ids=lambda generation: f"G{generation}")
def names(request: pytest.FixtureRequest) -> Iterator[Any]:
    with installed(request.param) as found:
        yield found


def test_a_prompt_is_served_byte_for_byte_to_the_same_and_to_a_fresh_engine(names: Any, server: TrtllmServer) -> None:
    text = prompt(1, 50 + names.generation)
    with server.engine(names) as engine:
        cold = engine.generate(text)
        warm = engine.generate(text)
        assert (cold.taken, warm.taken) == (0, 3 * CHUNK)
        assert warm.answer == cold.answer
    with server.engine(names) as engine:
        assert engine.generate(text).taken == 3 * CHUNK
