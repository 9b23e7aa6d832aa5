"""Real engines and real servers for tests, each in processes of its own that end when they are closed."""

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from core_stand import PATIENCE_S, wait_until

from lmcache.core.control import Control, ServerAddress
from lmcache.errors import ServerUnavailable
from lmcache.plugins.testing import Answer, EngineUnderTest
from lmcache.plugins.testing.ports import free_port

DRIVER = Path(__file__).parents[1] / "engines" / "vllm" / "engine_driver.py"
LOGPROB_TOLERANCE = 1e-4
SHARED_ENGINE = {"max_model_len": 5248, "max_num_batched_tokens": 1000}
"""Prefills in pieces that are no multiple of a chunk."""
BLOCKS = 44
"""Of the shared engine: one prompt of 5,248 tokens fits, five of 1,025 do not."""


LINKED = "result = all(half._client.linked for half in map(driver.names.get, ('looking', 'storer')) if half)"
"""The server knows of a link a moment before the engine does, and a lookup in between would be a miss. Workers that are
processes of their own do not say."""


class EngineProcess:
    """A vLLM engine that a test talks to."""

    def __init__(
        self,
        options: dict[str, Any],
        log: Path,
        environment: dict[str, str] | None = None,
        driver: Path = DRIVER,
        command: Sequence[str] = (),
        python: str = sys.executable,
    ) -> None:
        """`command` is what runs it, where it is not to be run as it is."""
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # threads that wait for each other on a busy machine of two cores cost more than they bring
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        self.log = log
        with log.open("w") as stream:
            self._process = subprocess.Popen(
                [*command, python, str(driver), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env=os.environ | settings | (environment or {}),
                start_new_session=True,
            )
        self._starting = True

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, **arguments: Any) -> None:
        """Send a request; `answer` reads what came of it, whenever the test wants to know."""
        self.await_start()
        print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)

    def await_start(self) -> None:
        """Return when the engine is ready: several can start at once, and nobody waits before it is needed."""
        if self._starting:
            self._starting = False
            self.answer()

    def answer(self) -> Any:
        line = self._process.stdout.readline()
        if not line:
            pytest.fail(f"the engine ended with {self._process.wait()}:\n{self.log.read_text()[-6000:]}")
        reply = json.loads(line)
        assert "error" not in reply, reply["error"]
        return reply["result"]

    def call(self, do: str, **arguments: Any) -> Any:
        self.ask(do, **arguments)
        return self.answer()

    def generate(self, *prompts: list[int], max_tokens: int = 8, salt: str | None = None, **more: Any) -> list[dict]:
        return self.call("generate", prompts=list(prompts), max_tokens=max_tokens, salt=salt, **more)

    def forget(self) -> None:
        """Drop the engine's own prefix cache."""
        assert self.call("reset")

    def run(self, code: str, **values: Any) -> Any:
        """Run Python in the engine's process; the name `result` comes back."""
        return self.call("run", code=code, **values)

    def close(self) -> None:
        """Let the engine shut down, and end what is left of it."""
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self.kill()

    def kill(self) -> None:
        """End the engine and all that it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()


class ServerProcess:
    """`lmcache server` on a port of its own, started, stopped and killed as a test needs it."""

    def __init__(self, port: int, log: Path, *flags: str) -> None:
        self.port = port
        self.flags = flags
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str) -> None:
        command = [sys.executable, "-m", "lmcache", "server", "--port", str(self.port), "--l1-size-gb", "1"]
        with self._log.open("a") as stream:
            self._process = subprocess.Popen([*command, *(flags or self.flags)], stdout=stream, stderr=stream)
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            with contextlib.suppress(ServerUnavailable), self.control() as control:
                # until then it answers, and has no room for anything
                if control.status()["gauges"]["cells_backed"]:
                    return
            assert self._process.poll() is None, self._log.read_text()
            time.sleep(0.05)
        pytest.fail(f"the server does not answer:\n{self._log.read_text()}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def control(self) -> Control:
        return Control(ServerAddress(port=self.port), PATIENCE_S)

    def await_clients(self, number: int) -> None:
        """Return when that many clients, neither more nor fewer, are registered."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            with self.control() as control:
                if control.status()["gauges"]["clients"] == number:
                    return
            time.sleep(0.05)
        pytest.fail(f"there are never {number} clients:\n{self._log.read_text()[-3000:]}")

    def settle(self) -> dict[str, Any]:
        """Wait until no store is in flight; returns the server's report."""
        with self.control() as control:
            control.wait_idle()
            return control.status()

    def quiet(self) -> dict[str, Any]:
        """As `settle`, and check that no ticket is left."""
        report = self.settle()
        assert report["gauges"]["tickets"] == 0
        assert report["gauges"]["reservations"] == 0
        return report


class Stand:
    """An engine with a server beside it, at an address of their own."""

    def __init__(
        self, folder: Path, model: Path, clients: int, flags: tuple[str, ...] = (), deadline: float = 5, **options: Any
    ) -> None:
        """`deadline` is patient, so that a busy machine is not taken for a server that has stopped."""
        self._clients = clients
        self._deadline = deadline
        self.server = ServerProcess(free_port(), folder / "server.log")
        self.engine: EngineProcess | None = None
        self._folder = folder
        self._options = {"model": str(model), "kv_transfer_config": self.transfer()} | options

    def transfer(self, **extra: Any) -> dict[str, Any]:
        """What users write after --kv-transfer-config."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.port": self.server.port,
                "lmcache.start_wait": 0,
                "lmcache.deadline": self._deadline,
                **extra,
            },
        }

    def start_engine(self, **environment: str) -> None:
        self.engine = EngineProcess(self._options, self._folder / "engine.log", environment)

    def serve(self, *flags: str) -> None:
        """Start a new, empty server in place of the one that runs, and wait until the engine has found it."""
        self.server.kill()
        self.server.start(*flags)
        if self.engine is not None:
            self.await_engine()

    def await_engine(self) -> None:
        self.engine.await_start()
        self.server.await_clients(self._clients)
        wait_until(lambda: self.engine.run(LINKED))

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.server.kill()


class VllmUnderTest(EngineUnderTest):
    """An engine as the conformance suite of adapters drives it, in a process of its own."""

    clients = 2
    can_abort = True
    can_be_killed = True

    def __init__(self, model: Path, server: str, log: Path) -> None:
        self._names = itertools.count()
        extra = {"lmcache.mp.port": int(server.rpartition(":")[2]), "lmcache.start_wait": 0, "lmcache.deadline": 5}
        transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        # prefills in pieces that are no multiple of a chunk
        options = {"model": str(model), "kv_transfer_config": transfer, "max_num_batched_tokens": 1000}
        self._engine = EngineProcess(options | {"max_model_len": 2048}, log)
        self._engine.await_start()

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, salt: str = "") -> list[Answer]:
        try:
            answers = self._engine.generate(*map(list, prompts), max_tokens=max_tokens, salt=salt or None)
        except pytest.fail.Exception as end:
            raise RuntimeError("the engine has ended") from end
        return [Answer(tuple(each["tokens"]), each["cached"], tuple(each["logprobs"])) for each in answers]

    def linked(self) -> bool:
        return self._engine.run(LINKED)

    def drop_own_cache(self) -> None:
        self._engine.forget()

    def abort_after(self, prompt: Sequence[int], steps: int) -> None:
        name = f"aborted {next(self._names)}"
        self._engine.call("add", name=name, ids=list(prompt), max_tokens=8)
        self._engine.call("step", times=steps)
        self._engine.call("abort", name=name)
        self._engine.run("while scheduler.requests or looking.busy(): driver.step()")

    def kill(self) -> None:
        self._engine.kill()

    def close(self) -> None:
        self._engine.close()


def prompt(seed: int, length: int) -> list[int]:
    """Token ids that look like no other seed's."""
    generator = random.Random(seed)
    return [generator.randrange(3, 1000) for _ in range(length)]


def same_answer(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Equal tokens, and logprobs that differ by rounding only."""
    return one["tokens"] == other["tokens"] and all(
        abs(a - b) <= LOGPROB_TOLERANCE for a, b in zip(one["logprobs"], other["logprobs"], strict=True)
    )
