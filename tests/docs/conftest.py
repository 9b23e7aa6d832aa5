"""What tests of the docs share: a real server, and the built site."""

import functools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).parents[2]
READY = re.compile(r"lmcache \w+ ready on (127\.0\.0\.1:\d+|http://\S+): .*\n")


@attrs.frozen
class Running:
    """A server, or what serves its metrics, that has said that it is ready."""

    process: subprocess.Popen[str]
    address: str

    def end(self) -> tuple[int, str]:
        """Send SIGTERM and wait; returns exit code and log."""
        self.process.send_signal(signal.SIGTERM)
        _, log = self.process.communicate(timeout=30)
        return self.process.returncode, log


Start = Callable[..., Running]


def _start(command: str, arguments: Sequence[str], folder: Path, more: Mapping[str, str]) -> Running:
    process = subprocess.Popen(
        [sys.executable, "-m", "lmcache", command, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONWARNINGS": "error", **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    watchdog = threading.Timer(60, process.kill)  # one that says nothing must not hang the test
    watchdog.start()
    line = process.stdout.readline()
    watchdog.cancel()
    watchdog.join()
    ready = READY.fullmatch(line)
    if ready is None:
        process.kill()
        pytest.fail(f"lmcache {command} said {line!r} and {process.communicate()[1]!r}")
    return Running(process, ready[1])


@pytest.fixture
def start() -> Iterator[Start]:
    """Start `lmcache COMMAND ARGUMENTS` in a folder; whatever the test leaves running is ended."""
    running: list[Running] = []

    def start(command: str, *arguments: str, folder: Path = ROOT, **environment: str) -> Running:
        running.append(_start(command, arguments, folder, environment))
        return running[-1]

    yield start
    for each in running:
        if each.process.poll() is None:
            each.end()


@pytest.fixture
def start_server(start: Start) -> Start:
    """The same for `lmcache server`."""
    return functools.partial(start, "server")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a small server."""
    running = _start("server", ["--port", "0", "--l1-size-gb", "0.125"], ROOT, {})
    yield running.address
    running.end()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built docs. Warnings are errors, as in `make docs`."""
    pytest.importorskip("sphinx", reason="the docs are built where sphinx is installed: lmcache[docs]")
    out = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", out / "doctrees", "docs", out],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return out
