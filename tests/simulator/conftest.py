"""Traces for tests: written as public ones are, and read back."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lmcache.simulator.reading import read_trace
from lmcache.simulator.trace import Trace

MakeTrace = Callable[..., Trace]

HEADS = Path(__file__).parents[2] / "traces"


def lines_of(prompts: Sequence[Sequence[int]]) -> str:
    """Requests, each given by the ids of its chunks of 512 tokens."""
    return "".join(
        json.dumps({"timestamp": at, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": list(ids)}) + "\n"
        for at, ids in enumerate(prompts)
    )


@pytest.fixture
def make_trace(tmp_path: Path) -> MakeTrace:
    """Make a trace of prompts."""

    def make(*prompts: Sequence[int], bytes_per_token: int = 0) -> Trace:
        path = tmp_path / "made.jsonl"
        path.write_text(lines_of(prompts))
        return read_trace(path, bytes_per_token=bytes_per_token)

    return make
