"""The main job on a real vLLM: a tiny Llama, prompts of several lengths, cold and served from the cache."""

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmcache.core.control import Control, ServerAddress
from lmcache.engines.demo import DemoRow, Progress
from lmcache.engines.vllm.settings import HOST, PORT
from lmcache.engines.vllm.tiny_models import VOCABULARY, make_model
from lmcache.geometry.chunking import DEFAULT_CHUNK_SIZE, cached_tokens

L1_GB = 0.5

MODEL = "llama"
PROMPTS = (1537, 2600, 5040)
"""Tokens of each prompt."""
ANSWER_TOKENS = 8
LOGPROB_TOLERANCE = 1e-4
"""Cold and served logprobs differ by the rounding of float32 only."""

ENVIRONMENT = {
    # the engine in this process, and quiet: what it has to say would run through the table
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""What is set, unless the user has set it, before vLLM is imported."""


def run(address: str, on_progress: Progress) -> Iterator[DemoRow]:
    """Yield a row for each of `PROMPTS`."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as folder:
        on_progress("making a tiny model")
        model = make_model(Path(folder), MODEL)
        on_progress("starting vLLM: half a minute, most of it imports")
        llm = _start(model, ServerAddress.parse(address))
        try:
            # what the first request of a process costs besides
            _ask(llm, _prompt(0, 300))
            for tokens in PROMPTS:
                yield _ask_twice(llm, tokens, address, on_progress)
        finally:
            llm.llm_engine.engine_core.shutdown()


def _start(model: Path, address: ServerAddress) -> Any:
    from vllm import LLM

    return LLM(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=8192,
        seed=0,
        disable_log_stats=False,
        use_tqdm_on_load=False,
        kv_transfer_config={
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {HOST: address.host, PORT: address.port},
        },
    )


def _ask_twice(llm: Any, tokens: int, address: str, on_progress: Progress) -> DemoRow:
    prompt = _prompt(tokens, tokens)
    on_progress(f"{tokens} tokens, cold")
    cold = _ask(llm, prompt)
    with Control(ServerAddress.parse(address)) as control:
        control.wait_idle()
    llm.reset_prefix_cache()
    on_progress(f"{tokens} tokens, served from the cache")
    served = _ask(llm, prompt)
    return DemoRow(
        f"vLLM, {MODEL}",
        tokens,
        cold.metrics.first_token_latency,
        _computed(cold),
        served.metrics.first_token_latency,
        _computed(served),
        served.num_cached_tokens,
        # a prompt of whole chunks keeps one token, hence one block, to compute: none of these is
        cached_tokens(DEFAULT_CHUNK_SIZE, tokens - 1),
        _same(cold, served),
    )


def _ask(llm: Any, prompt: list[int]) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, logprobs=1, detokenize=False, ignore_eos=True)
    [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return output


def _prompt(seed: int, tokens: int) -> list[int]:
    generator = random.Random(seed)  # noqa: S311 - the same prompts every time, and nothing secret
    return [generator.randrange(3, VOCABULARY) for _ in range(tokens)]


def _computed(output: Any) -> int:
    """Tokens that went through the model: what was not cached, and every sampled token but the last."""
    return int(len(output.prompt_token_ids) - output.num_cached_tokens + ANSWER_TOKENS - 1)


def _same(one: Any, other: Any) -> bool:
    a, b = one.outputs[0], other.outputs[0]
    return list(a.token_ids) == list(b.token_ids) and all(
        abs(x[token].logprob - y[token].logprob) <= LOGPROB_TOLERANCE
        for x, y, token in zip(a.logprobs, b.logprobs, a.token_ids, strict=True)
    )
