"""Runs a real vLLM engine in a process of its own and does what a test asks, one JSON line at a time.

    python engine_driver.py OPTIONS_JSON      keyword arguments of vllm.LLM

Not imported by tests: they start it (see `vllm_stand.py`), so that an engine and all that it starts end with one kill.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "_plugins"))

from driver_loop import obey


class Driver:
    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        defaults = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "max_model_len": 8192,
            "seed": 0,
            "max_num_seqs": 8,
            "disable_log_stats": False,
        }
        self.llm = LLM(**defaults | options)
        self.names: dict[str, Any] = {"llm": self.llm, "driver": self} | self.insides()

    def insides(self) -> dict[str, Any]:
        """What tests that plant a fault take hold of; there is none when the engine core runs in another process."""
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        if core is None or core.scheduler.connector is None:
            return {}
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group()
        return {
            "scheduler": core.scheduler,
            "connectors": (core.scheduler.connector, worker),
            "looking": core.scheduler.connector._scheduler,
            "loader": worker._worker._loader,
            "storer": worker._worker._storer,
        }

    def params(self, max_tokens: int, **more: Any) -> Any:
        from vllm import SamplingParams

        defaults = {"temperature": 0, "logprobs": 3, "detokenize": False, "ignore_eos": True}
        return SamplingParams(max_tokens=max_tokens, **defaults | more)

    def prompt(self, ids: list[int], salt: str | None) -> dict[str, Any]:
        return {"prompt_token_ids": ids} | ({"cache_salt": salt} if salt is not None else {})

    def generate(
        self, prompts: list[list[int]], max_tokens: int, salt: str | None, **more: Any
    ) -> list[dict[str, Any]]:
        inputs = [self.prompt(ids, salt) for ids in prompts]
        outputs = self.llm.generate(inputs, self.params(max_tokens, **more), use_tqdm=False)
        return [self.answer(output) for output in outputs]

    def answer(self, output: Any) -> dict[str, Any]:
        made = output.outputs[0]
        chosen = made.logprobs or []
        return {
            "tokens": list(made.token_ids),
            "logprobs": [step[token].logprob for step, token in zip(chosen, made.token_ids, strict=False)],
            "cached": output.num_cached_tokens,
            "finish": made.finish_reason,
        }

    def without_cache(self, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        """What the engine answers when its connector does nothing at all. Its own prefix cache is as it is."""
        with self.connector_off():
            return self.generate(prompts, max_tokens, None)

    @contextlib.contextmanager
    def connector_off(self) -> Iterator[None]:
        """As long as this lasts, the connector does nothing at all."""
        halves = [vars(connector) for connector in self.names["connectors"]]
        kept = [(half["_scheduler"], half["_worker"]) for half in halves]
        for half in halves:
            half.update(_scheduler=None, _worker=None)
        try:
            yield
        finally:
            for half, (scheduler, worker) in zip(halves, kept, strict=True):
                half.update(_scheduler=scheduler, _worker=worker)

    def budget(self, tokens: int) -> int:
        """From now on compute at most so many tokens a step; returns how many it were."""
        scheduler = self.names["scheduler"]
        before, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, tokens
        return before

    def add(self, name: str, ids: list[int], max_tokens: int, salt: str | None = None, **more: Any) -> None:
        """Queue a request and do nothing for it yet."""
        self.llm.llm_engine.add_request(name, self.prompt(ids, salt), self.params(max_tokens, **more))

    def step(self, times: int = 1) -> dict[str, Any]:
        """Let the engine make some steps; returns the answers that were finished."""
        done = [output for _ in range(times) for output in self.llm.llm_engine.step() if output.finished]
        return {output.request_id: self.answer(output) for output in done}

    def finish(self) -> dict[str, Any]:
        """Step until nothing is left to do."""
        answers: dict[str, Any] = {}
        while self.llm.llm_engine.has_unfinished_requests():
            answers |= self.step()
        return answers

    def abort(self, name: str) -> None:
        self.llm.llm_engine.abort_request([name])

    def reset(self, reset_connector: bool = False) -> bool:
        return self.llm.reset_prefix_cache(reset_connector=reset_connector)

    def wipe(self) -> bool:
        """Drop the engine's own prefix cache and overwrite every page, so that none is right because it once was."""
        import torch

        layers = self.llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        caches = [layer.kv_cache for layer in layers if hasattr(layer, "kv_cache")]
        tensors = [part for cache in caches for part in (cache if isinstance(cache, list | tuple) else (cache,))]
        for storage in {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}.values():
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0x3C)  # 0.0115, in any float
        return self.reset()

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def run(self, code: str, **values: Any) -> Any:
        names = self.names | values
        exec(code, names)
        return names.get("result")


if __name__ == "__main__":
    obey(Driver)
