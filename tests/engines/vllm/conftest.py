"""Real engines and real servers for these tests, each in processes that end with the fixture."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache.core.control import Control, ServerAddress
from lmcache.errors import ServerUnavailable

DRIVER = Path(__file__).with_name("engine_driver.py")
START_SECONDS = 600


class EngineProcess:
    """A vLLM engine that a test talks to."""

    def __init__(self, options: dict[str, Any], log: Path, environment: dict[str, str] | None = None) -> None:
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        self.log = log
        with log.open("w") as stream:
            self._process = subprocess.Popen(
                [sys.executable, str(DRIVER), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env=os.environ | settings | (environment or {}),
                start_new_session=True,
            )
        self.answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, **arguments: Any) -> None:
        """Send a request; `answer` reads what came of it, whenever the test wants to know."""
        print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)

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
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
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
        for _ in range(200):
            with contextlib.suppress(ServerUnavailable), self.control(0.2) as control:
                control.ping()
                return
            assert self._process.poll() is None, self._log.read_text()
            time.sleep(0.05)
        pytest.fail(f"the server does not answer:\n{self._log.read_text()}")

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def control(self, deadline: float = 2.0) -> Control:
        return Control(ServerAddress(port=self.port), deadline)

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


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
