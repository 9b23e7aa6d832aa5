"""Runs a real SGLang engine on the CPU in a process of its own and does what a test asks, one JSON line at a time.

    python engine_driver.py OPTIONS_JSON      keyword arguments of sglang.Engine

Not imported by tests: they start it (see `sglang_stand.py`), so that an engine and what it starts end with one kill.
"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "_plugins"))

from driver_loop import obey

DEFAULTS = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "max_total_tokens": 4096,
    "mem_fraction_static": 0.2,
    "page_size": 16,
    "max_running_requests": 4,
    "log_level": "info",
    "random_seed": 1,
    "enable_cache_report": True,
    # several engines share two cores
    "sleep_on_idle": True,
}


class Driver:
    def __init__(self, options: dict[str, Any]) -> None:
        import sglang

        self.engine = sglang.Engine(**DEFAULTS | options)

    def generate(self, prompts: list[list[int]], max_tokens: int, **more: Any) -> list[dict[str, Any]]:
        """Answers, and where SGLang says that the cached tokens of each came from."""
        answers = self.engine.generate(
            input_ids=prompts,
            sampling_params={"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True},
            return_logprob=True,
            **more,
        )
        return [
            {
                "tokens": answer["output_ids"],
                "logprobs": [step[0] for step in answer["meta_info"]["output_token_logprobs"]],
                "cached": answer["meta_info"]["cached_tokens"],
                "details": answer["meta_info"].get("cached_tokens_details"),
                "finish": answer["meta_info"]["finish_reason"],
            }
            for answer in answers
        ]

    def abort_after(self, ids: list[int], steps: int) -> None:
        """Begin to answer a prompt, abort it once it has come to so many tokens, and see it end."""
        name = f"abort-{time.monotonic_ns()}"
        answers = self.engine.generate(
            input_ids=ids,
            sampling_params={"temperature": 0, "max_new_tokens": 32, "ignore_eos": True},
            stream=True,
            rid=name,
        )
        for number, _ in enumerate(answers):
            if number == steps:
                self.engine.tokenizer_manager.abort_request(name)

    def flush(self) -> None:
        """Drop the engine's own cache, once its last request has left nothing to do."""
        end = time.monotonic() + 30
        while not self.engine.flush_cache().success:
            assert time.monotonic() < end, "the engine is never idle"
            time.sleep(0.05)

    def exchange_weights(self, folder: str) -> None:
        """Load other weights into the running engine, which forgets what it computed with the old ones."""
        done = self.engine.update_weights_from_disk(folder)
        assert done[0] if isinstance(done, tuple | list) else done, done

    def close(self) -> None:
        self.engine.shutdown()


if __name__ == "__main__":
    obey(Driver)
