"""The command that the docs show, typed as it stands there, and a user's requests over HTTP."""

import json
import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_stand import ENVIRONMENT, prompt, same_answer
from vllm_stand import ServerProcess

from lmcache.engines.sglang.hicache_keys import SGLANGS_OWN
from lmcache.engines.sglang.settings import read_settings
from lmcache.plugins.testing.ports import free_port

PAGE = Path(__file__).parents[3] / "docs" / "engines" / "sglang.md"

ON_CPU = (
    "--device cpu --dtype float32 --skip-tokenizer-init --attention-backend torch_native --sampling-backend pytorch "
    "--grammar-backend none --disable-overlap-schedule --max-total-tokens 4096 --mem-fraction-static 0.2 "
    "--max-running-requests 4 --skip-server-warmup --enable-cache-report --sleep-on-idle"
)
"""What a machine without a GPU needs besides."""


def shown() -> list[list[str]]:
    """The words of every command of the page that starts SGLang."""
    blocks = PAGE.read_text().split("```bash\n")[1:]
    commands = [block.partition("```")[0].replace("\\\n", " ").strip() for block in blocks]
    return [shlex.split(command) for command in commands if command.startswith("python -m sglang.launch_server")]


def test_the_page_shows_a_command_for_each_door_with_settings_that_are_taken() -> None:
    linker, hicache = shown()
    extra = json.loads(linker[linker.index("--unified-cache-external-linker-config") + 1])
    assert (extra["linker_module_path"], extra["linker"]) == ("lmcache.engines.sglang.linker", "LMCacheLinker")
    assert read_settings(extra["linker_extra_config"], "the page").address.port == 6555

    extra = json.loads(hicache[hicache.index("--hicache-storage-backend-extra-config") + 1])
    assert (extra["module_path"], extra["class_name"]) == ("lmcache.engines.sglang.hicache", "LMCacheStorage")
    assert read_settings(extra, "the page", SGLANGS_OWN).address.port == 6555


class HttpEngine:
    """`sglang.launch_server`, as a user starts it."""

    def __init__(self, command: list[str], model: Path, cache_port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        port = self.url.rpartition(":")[2]
        # patient, so that a busy machine is not taken for one that has stopped
        words = [
            w.replace('"lmcache.mp.port":6555', f'"lmcache.mp.port":{cache_port},"lmcache.deadline":5') for w in command
        ]
        words = [sys.executable if w == "python" else str(model) if w == "MODEL" else w for w in words]
        with log.open("w") as stream:
            self._process = subprocess.Popen(
                [*words, *ON_CPU.split(), "--port", port],
                env=os.environ | ENVIRONMENT,
                stdout=stream,
                stderr=stream,
            )
        self._log = log

    def await_start(self) -> None:
        end = time.monotonic() + 600
        while True:
            assert self._process.poll() is None, self._log.read_text()[-6000:]
            assert time.monotonic() < end, self._log.read_text()[-6000:]
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except OSError:
                time.sleep(0.2)
            else:
                return

    def post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.read()

    def generate(self, ids: list[int], **more: Any) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        answer = json.loads(
            self.post("/generate", input_ids=ids, sampling_params=sampling, return_logprob=True, **more)
        )
        meta = answer["meta_info"]
        return {
            "tokens": answer["output_ids"],
            "logprobs": [step[0] for step in meta["output_token_logprobs"]],
            "cached": meta["cached_tokens"],
            "details": meta.get("cached_tokens_details"),
        }

    def flush(self) -> None:
        """Drop the engine's own cache, once its last request has left nothing to do."""
        end = time.monotonic() + 30
        while True:
            try:
                self.post("/flush_cache")
            except urllib.error.HTTPError:
                assert time.monotonic() < end
                time.sleep(0.1)
            else:
                return

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def engine(sglang_models: Path, tmp_path: Path) -> Iterator[tuple[HttpEngine, ServerProcess]]:
    server = ServerProcess(free_port(), tmp_path / "server.log")
    server.start()
    engine = HttpEngine(shown()[0], sglang_models / "llama", server.port, tmp_path / "engine.log")
    try:
        engine.await_start()
        yield engine, server
    finally:
        engine.close()
        server.kill()


@pytest.mark.sglang
@pytest.mark.may_leave("SGLang's server leaves a file of its own in /dev/shm when it is told to end")
def test_a_user_s_requests_are_served_from_the_cache_after_a_flush_and_salts_keep_them_apart(
    engine: tuple[HttpEngine, ServerProcess],
) -> None:
    sglang, server = engine
    ids = prompt(9, 200)
    cold = sglang.generate(ids)
    assert cold["cached"] == 0
    sglang.flush()
    assert server.settle()["counters"]["shards_committed"] == 3

    served = sglang.generate(ids)
    assert served["cached"] == 192
    assert served["details"]["host"] == 192
    assert same_answer(cold, served)
    salted = sglang.generate(ids, cache_salt="somebody else's")
    assert salted["cached"] == 0
    assert same_answer(cold, salted)
    [namespace] = server.quiet()["namespaces"]
    assert namespace["chunk_size"] == 64
