"""Runs several real engines one after the other in one process, which pays for vLLM's imports once.

    python identity_driver.py OPTIONS_JSON      keyword arguments of vllm.LLM that all of them have

Takes commands as `engine_driver.py` does, `start` and `stop` besides.
"""

import gc
import time
from pathlib import Path
from typing import Any

import attrs
from engine_driver import Driver, obey

from lmcache.engines import unchanged


class Engines(Driver):
    """At most one engine at a time."""

    def __init__(self, common: dict[str, Any]) -> None:
        import vllm  # noqa: F401 - imported before the first engine is timed

        gc.freeze()
        self.common = common
        self.running = False
        self.beginning = unchanged.process_beginning()

    def start(self, **options: Any) -> float:
        """Start an engine that believes what was written before it; returns the seconds that it took."""
        self.stop()
        began = time.monotonic()
        # an engine has a process of its own as a rule, which begins when this one is started
        shift = time.time_ns() - self.beginning.ns
        beginning = attrs.evolve(self.beginning, ns=self.beginning.ns + shift, boot_ns=self.beginning.boot_ns + shift)
        unchanged._beginning = lambda process: beginning
        super().__init__(self.common | options)
        self.running = True
        return time.monotonic() - began

    def stop(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        if self.running:
            self.running = False
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm, self.names
            cleanup_dist_env_and_memory()
            # what is left is modules, for the most part; vLLM collects garbage four times for each engine
            gc.freeze()

    def close(self) -> None:
        self.stop()

    def second_seed(self, folder: str) -> str:
        """Make the model of all engines once more, with other weights."""
        from lmcache.engines.vllm.tiny_models import make_model

        return str(make_model(Path(folder), "llama", seed=1))

    def lora(self, name: str, number: int, path: str, **more: Any) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(name, number, path, **more)

    def ask(self, prompt: Any, lora: list[Any] | None = None, max_tokens: int = 6) -> dict[str, Any]:
        """Answer one prompt, with a LoRA that is given as name, number and path."""
        request = self.lora(*lora) if lora else None
        [output] = self.llm.generate([prompt], self.params(max_tokens), lora_request=request, use_tqdm=False)
        return self.answer(output)

    def serve(self, ids: list[int], lora: list[Any] | None = None, salt: str | None = None) -> dict[str, Any]:
        """Answer with what the cache has, and nothing of the engine's own."""
        self.wipe()
        return self.ask(self.prompt(ids, salt), lora)

    def cold(self, ids: list[int], lora: list[Any] | None = None) -> dict[str, Any]:
        """Answer as an engine without any cache."""
        return self.uncached(self.prompt(ids, None), lora)

    def uncached(self, prompt: Any, lora: list[Any] | None = None) -> dict[str, Any]:
        self.wipe()
        with self.connector_off():
            return self.ask(prompt, lora)

    def embedded(self, seed: int, length: int) -> dict[str, Any]:
        """Answers to one prompt that is given as embeddings: cold, and twice by an engine with its cache."""
        import torch

        prompt = {"prompt_embeds": torch.randn(length, 256, generator=torch.Generator().manual_seed(seed))}
        answers = {"cold": self.uncached(prompt)}
        for name in ("first", "second"):
            self.wipe()
            answers[name] = self.ask(prompt)
        return answers

    def update(self, path: str, reset: bool = False) -> None:
        """Exchange the model's weights in the running engine; with `reset`, say so to everybody who may be told."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        if reset:
            assert self.reset(reset_connector=True)

    def exchanged(self, ids: list[int], salt: str, lora: list[Any], path: str) -> dict[str, Any]:
        """Answer a prompt while its LoRA is exchanged for the one in `path`, after its first piece was computed."""
        self.wipe()
        prompt = self.prompt(ids, salt)
        self.llm.llm_engine.add_request("exchanged", prompt, self.params(4), lora_request=self.lora(*lora))
        while not any(request.num_computed_tokens for request in self.names["scheduler"].requests.values()):
            self.step()
        self.llm.llm_engine.add_lora(self.lora(lora[0], lora[1], path, load_inplace=True))
        return self.finish()["exchanged"]


if __name__ == "__main__":
    obey(Engines)
