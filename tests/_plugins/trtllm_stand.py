"""What tests of the TensorRT-LLM adapter share: a real server, engines beside it, prompts."""

import contextlib
import itertools
import random
from collections.abc import Iterator
from typing import Any, Self

from reference_stand import start
from trtllm_executor import Executor
from trtllm_model import VOCABULARY

BLOCK = 4
CHUNK = 16
"""Tokens: four blocks of the toy model."""


class TrtllmServer:
    """`lmcache server` in a process of its own."""

    def __init__(self, port: int = 0, *flags: str) -> None:
        self.running = start("--chunk-size", str(CHUNK), *flags, port=port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self.running.kill()

    @contextlib.contextmanager
    def engine(self, names: Any, *arguments: Any, **options: Any) -> Iterator[Executor]:
        """An engine beside it; when it has ended, nothing is left of it in the server."""
        engine = Executor(names, self.running.address, *arguments, **options)
        try:
            yield engine
            self.running.wait_idle()
            gauges = self.running.gauges()
            assert (gauges["tickets"], gauges["reservations"]) == (0, 0)
        finally:
            engine.close()


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids that look like no other seed's."""
    generator = random.Random(seed)
    return [generator.randrange(VOCABULARY) for _ in range(tokens)]


_seeds = itertools.count(1000)


def fresh(tokens: int) -> list[int]:
    """Token ids that no test has had before."""
    return prompt(next(_seeds), tokens)
