"""The command line as users have it: real processes."""

import http.client
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


METRICS_READY = re.compile(
    r"lmcache metrics ready on (http://(127\.0\.0\.1|\[::1\]):(\d+)/metrics): the server at \S+\n"
)


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
class RunningCommand:
    """A process that has said that it is ready."""

    process: subprocess.Popen[str]
    ready_line: str
    port: int

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Send a signal, wait; returns exit code, the rest of standard output and standard error."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err


@attrs.define
class RunningServer(RunningCommand):
    """A server."""

    epoch: str


@attrs.define
class RunningExporter(RunningCommand):
    """`lmcache metrics`; `port` is where it is scraped."""

    host: str

    def get(self, path: str = "/metrics", **headers: str) -> tuple[int, str, str]:
        """Status, content type and body of an answer."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.getheader("Content-Type", ""), answer.read().decode()
        finally:
            connection.close()


def ready_line(process: subprocess.Popen[str]) -> str:
    """The first line that a process prints; it is ended if it says nothing, which must not hang the test."""
    assert process.stdout
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    line = process.stdout.readline()
    watchdog.cancel()
    watchdog.join()
    return line


@pytest.fixture
def start_lmcache() -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Start `python ARGUMENTS` and wait for its first line; what still runs after the test is killed."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        processes.append(process)
        return process, ready_line(process)

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def start_metrics(start_lmcache) -> Callable[..., RunningExporter]:
    """Start `lmcache metrics --listen 0 ARGUMENTS` and wait until it says that it is ready."""

    def start(*arguments: str) -> RunningExporter:
        listen = () if "--listen" in arguments else ("--listen", "0")
        process, line = start_lmcache("-m", "lmcache", "metrics", *listen, *arguments)
        match = METRICS_READY.fullmatch(line)
        assert match, line + process.communicate(timeout=30)[1]
        return RunningExporter(process, line, int(match[3]), match[2].strip("[]"))

    return start


@pytest.fixture
def start_server(start_lmcache) -> Callable[..., RunningServer]:
    """Start `lmcache server --port 0 --l1-size-gb 0.05 ARGUMENTS` and wait until it says that it is ready."""

    def start(*arguments: str, launcher: tuple[str, ...] = ("-m", "lmcache")) -> RunningServer:
        options = ["--log-level", "warning", "--l1-size-gb", "0.05"]
        if "--port" not in arguments:
            options += ["--port", "0"]
        process, line = start_lmcache(*launcher, "server", *options, *arguments)
        match = READY.fullmatch(line)
        assert match, line + process.communicate(timeout=30)[1]
        return RunningServer(process, line, int(match[1]), match[2])

    return start
