"""A real vLLM in a process of its own, which does what `vllm_rows.py` asks: a JSON object a line, in and out.

    python -m lmcache.bench.vllm_driver OPTIONS_JSON      keyword arguments of vllm.LLM

With `VLLM_ENABLE_V1_MULTIPROCESSING=0` the engine core runs in this process, and a step can be timed in it.
"""

import contextlib
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

DEFAULTS = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 5248,
    "max_num_seqs": 8,
    "seed": 0,
    "disable_log_stats": False,
    "use_tqdm_on_load": False,
}


class Driver:
    """Each public method is one thing to ask for."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**DEFAULTS | options)
        self._engine = self._llm.llm_engine
        self._names = (str(number) for number in itertools.count())
        self._running: list[str] = []

    def decode(self, prompts: list[list[int]], tokens: int) -> None:
        """Start requests, one a prompt, and step until all of them have sampled a token."""
        self._running = [next(self._names) for _ in prompts]
        for name, prompt in zip(self._running, prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, self._params(tokens))
        begun: set[str] = set()
        while len(begun) < len(prompts):
            begun |= {output.request_id for output in self._engine.step() if output.outputs[0].token_ids}

    def steps(self, count: int) -> list[tuple[float, float]]:
        """Seconds of CPU, over all threads, and of wall clock of each of `count` engine steps."""
        times = []
        for _ in range(count):
            cpu, wall = time.process_time(), time.perf_counter()
            self._engine.step()
            times.append((time.process_time() - cpu, time.perf_counter() - wall))
        return times

    def stop(self) -> None:
        """Abort what was started by `decode`."""
        self._engine.abort_request(self._running)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def first_token(self, prompt: list[int]) -> dict[str, Any]:
        """Ask for one token: seconds of wall clock until it is there, the token, and tokens that were not computed."""
        started = time.perf_counter()
        [output] = self._llm.generate([{"prompt_token_ids": prompt}], self._params(1), use_tqdm=False)
        return {
            "wall": time.perf_counter() - started,
            "token": output.outputs[0].token_ids[0],
            "cached": output.num_cached_tokens,
        }

    def forget(self) -> bool:
        """Drop the engine's own prefix cache."""
        return bool(self._llm.reset_prefix_cache())

    def inside_connector(self, count: int) -> list[float]:
        """Seconds that each of `count` steps spends in the connector's methods, both roles."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        roles = [self._engine.engine_core.engine_core.scheduler.connector, get_kv_transfer_group()]
        spent = [0.0]
        with contextlib.ExitStack() as stack:
            for role in roles:
                _time_methods(role, spent, stack)
            return [self._spent_in_step(spent) for _ in range(count)]

    def _spent_in_step(self, spent: list[float]) -> float:
        spent[0] = 0.0
        self._engine.step()
        return spent[0]

    def _params(self, tokens: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)

    def close(self) -> None:
        """Shut the engine down."""
        self._engine.engine_core.shutdown()


def _time_methods(connector: Any, spent: list[float], stack: contextlib.ExitStack) -> None:
    """Until `stack` is closed, add to `spent` what calls of `connector`'s methods from outside cost."""
    depth = [0]

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if depth[0]:
                return method(*args, **kwargs)
            depth[0] += 1
            started = time.perf_counter()  # reading the CPU clock would cost more than most of these methods
            try:
                return method(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - started
                depth[0] -= 1

        return call

    for name in dir(type(connector)):
        method = getattr(connector, name)
        if not name.startswith("_") and callable(method) and not isinstance(method, type):
            setattr(connector, name, timed(method))
            stack.callback(delattr, connector, name)


def main() -> None:
    """Answer requests until standard input ends."""
    # vLLM and what it starts write to standard output; answers keep the pipe for themselves
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        driver = Driver(json.loads(sys.argv[1]))
        print(json.dumps({"result": None}), file=answers, flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            try:
                reply = {"result": getattr(driver, request.pop("do"))(**request)}
            except Exception:  # noqa: BLE001 - whatever it is, the one who asks is told
                reply = {"error": traceback.format_exc()}
            print(json.dumps(reply), file=answers, flush=True)
        driver.close()


if __name__ == "__main__":
    main()
