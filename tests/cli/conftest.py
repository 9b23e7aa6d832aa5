"""The command line as users have it: real processes."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import attrs
import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

READY = re.compile(r"lmcache server ready on (?:127\.0\.0\.1|\[::1\]):(\d+): .*, epoch ([0-9a-f]{16})\n")


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONWARNINGS": "error", "PYTHONUNBUFFERED": "1", "COLUMNS": "100", **more}


@pytest.fixture
def lmcache() -> Run:
    """Run `lmcache ARGUMENTS` to its end."""

    def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "lmcache", *arguments],
            capture_output=True,
            text=True,
            env=environment(**(env or {})),
            check=False,
            timeout=60,
        )

    return run


@attrs.define
class RunningServer:
    """A server process that has said that it is ready."""

    process: subprocess.Popen[str]
    ready_line: str
    port: int
    epoch: str

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Send a signal, wait; returns exit code, the rest of standard output and standard error."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err


@pytest.fixture
def start_server() -> Iterator[Callable[..., RunningServer]]:
    """Start `lmcache server --port 0 --l1-size-gb 0.05 ARGUMENTS` and wait until it says that it is ready."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str, launcher: tuple[str, ...] = ("-m", "lmcache")) -> RunningServer:
        options = ["--log-level", "warning", "--l1-size-gb", "0.05"]
        if "--port" not in arguments:
            options += ["--port", "0"]
        process = subprocess.Popen(
            [sys.executable, *launcher, "server", *options, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        processes.append(process)
        assert process.stdout
        watchdog = threading.Timer(60, process.kill)  # a server that says nothing must not hang the test
        watchdog.start()
        line = process.stdout.readline()
        watchdog.cancel()
        watchdog.join()
        match = READY.fullmatch(line)
        assert match, line + process.communicate(timeout=30)[1]
        return RunningServer(process, line, int(match[1]), match[2])

    yield start
    for process in processes:
        process.kill()
        process.communicate()
