"""Answers questions about made-up engines (`spec_engine`), one JSON line each, until its standard input ends.

python spec_driver.py FOLDER        FOLDER has the configuration of any decoder that vLLM knows
"""

import dataclasses
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}

import attrs
import spec_models
from spec_engine import Engine, Pool, make_config, plan, transfer
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec

from lmcache.engines.vllm import register
from lmcache.engines.vllm.connector import LMCacheMPConnector
from lmcache.engines.vllm.describe import logged_blocks
from lmcache.errors import GeometryError


class Driver:
    """Has at most one engine at a time."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._engine: Engine | None = None

    def open(self, model: str, port: int, ranks: int = 0, **pool: Any) -> None:
        """Start an engine in place of the one before."""
        self.close()
        made = spec_models.MODELS[model]()
        made = attrs.evolve(made, ranks=ranks) if ranks else made
        self._engine = Engine(self._folder, made, port, Pool(**pool))

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            gc.collect()

    def describe(self) -> dict[str, Any]:
        """The geometry that our connector has found, and the line that it logs."""
        geometry = self._engine.geometry
        return {
            "log": logged_blocks(self._engine.ranks[0].connector._groups),
            "ranks": geometry.ranks,
            "alignment": geometry.alignment,
            "groups": [
                [group.kind.value, group.tokens_per_block, group.window, group.shards, list(group.page_bytes)]
                for group in geometry.groups
            ],
        }

    def prefill(self, tokens: list[int]) -> dict[str, Any]:
        return self._engine.prefill(tokens)

    def recall(self, tokens: list[int], forget: bool = True) -> dict[str, Any]:
        return self._engine.recall(tokens, forget)

    def refusal(self) -> str:
        """What our connector says to a class of specs that derives from full attention and that nobody classified."""

        @register_kv_cache_spec(manager_class=FullAttentionManager, uniform_type_base_spec=FullAttentionSpec)
        @dataclasses.dataclass(frozen=True, kw_only=True)
        class SkippingSpec(FullAttentionSpec):
            """Full attention that skips every other token: nothing that its base's name tells."""

        spec = SkippingSpec(block_size=16, num_kv_heads=8, head_size=64, dtype=spec_models.BF16)
        model = spec_models.Model({f"model.layers.{n}.attn": spec for n in range(4)}, block_size=16)
        config = make_config(self._folder, model, Pool(blocks=100, longest=1024, budget=1024))
        config.kv_transfer_config = transfer(0)
        _, cache = plan(config, model)
        try:
            LMCacheMPConnector(config, KVConnectorRole.SCHEDULER, cache)
        except GeometryError as error:
            return str(error)
        return "it was taken"


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    register.register()
    gc.freeze()  # what vLLM has made by importing stays, and need not be looked at again each time
    driver = Driver(sys.argv[1])
    for line in sys.stdin:
        question = json.loads(line)
        ask: Callable[..., Any] = getattr(driver, question.pop("do"))
        try:
            answer = {"result": ask(**question)}
        except Exception:  # noqa: BLE001 - the test is told
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)
    driver.close()


if __name__ == "__main__":
    sys.exit(main())
