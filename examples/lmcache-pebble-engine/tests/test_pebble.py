"""Pebble keeps the contract of engine adapters, to the last bit, with no more than 150 lines of adapter."""

from collections.abc import Sequence
from pathlib import Path

from lmcache_pebble_engine import adapter, connector
from lmcache_pebble_engine.engine import VOCABULARY, Pebble

from lmcache.core.client import ClientSettings, ServerAddress
from lmcache.plugins.testing import Answer, EngineAdapterTests, EngineUnderTest, Weights


class PebbleUnderTest(EngineUnderTest):
    clients = 2
    can_abort = True

    def __init__(self, server: str, seed: int) -> None:
        self.engine = Pebble(seed)
        self.engine.cache = self.cache = connector.LMCache(
            self.engine, ServerAddress.parse(server), ClientSettings(deadline=5.0)
        )

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, salt: str = "") -> list[Answer]:
        return [
            Answer(tuple(done.generated), done.cached, tuple(float(x) for row in done.logits for x in row))
            for done in self.engine.answer(prompts, max_tokens, salt)
        ]

    def linked(self) -> bool:
        return all(client.linked for client in self.cache.clients)

    def drop_own_cache(self) -> None:
        self.engine.drop_own_cache()

    def abort_after(self, prompt: Sequence[int], steps: int) -> None:
        request = self.engine.add(prompt, 8)
        for _ in range(steps):
            self.engine.step()
        self.engine.abort(request)
        while self.engine.busy:
            self.engine.step()

    def close(self) -> None:
        self.cache.close()


class TestPromises(EngineAdapterTests):
    adapter = adapter.PebbleAdapter
    chunk_size = 32
    hit_step = 8
    wrong_chunk_size = 20
    token_ids = range(VOCABULARY)

    @classmethod
    def start_engine(cls, server: str, weights: Weights) -> EngineUnderTest:
        return PebbleUnderTest(server, seed=1 if weights is Weights.USUAL else 2)


def test_an_adapter_takes_fewer_than_150_lines() -> None:
    lines = [line for module in (adapter, connector) for line in Path(module.__file__).read_text().splitlines()]
    assert len(lines) < 150
