"""Another host for tests: a network namespace with a cable to this one. No Unix socket of ours reaches it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from core_stand import wait_until
from reference_stand import DEADLINE_S, RunningServer

_FOLDERS = [str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]
IP = shutil.which("ip", path=os.pathsep.join(_FOLDERS))
ENGINE = Path(__file__).with_name("other_host_engine.py")


def why_none() -> str:
    """Why there can be no other host here; empty if there can."""
    if os.geteuid() != 0:
        return "a network namespace takes root"
    if IP is None:
        return "there is no `ip`; make test fetches it where apt-get can"
    name = f"lmcache-probe-{os.getpid()}"
    probe = subprocess.run([IP, "netns", "add", name], capture_output=True, text=True, check=False)
    if probe.returncode:
        return f"no network namespace can be made: {probe.stderr.strip()}"
    subprocess.run([IP, "netns", "del", name], check=True)
    return ""


class OtherHost:
    """A namespace, at `there`, and our end of the cable to it, at `here`."""

    def __init__(self, number: int = 0) -> None:
        self.name = f"lmc{os.getpid() % 100000}-{number}"
        third = os.getpid() % 250 + 1
        self.here, self.there = f"10.{200 + number}.{third}.1", f"10.{200 + number}.{third}.2"
        self._cable = f"{self.name}a"
        self._processes: list[subprocess.Popen[str]] = []
        _ip("netns", "add", self.name)
        try:
            _ip("link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", self.name)
            _ip("addr", "add", f"{self.here}/24", "dev", self._cable)
            _ip("link", "set", self._cable, "up")
            for end in ("eth0", "lo"):
                _ip("-n", self.name, "link", "set", end, "up")
            _ip("-n", self.name, "addr", "add", f"{self.there}/24", "dev", "eth0")
        except BaseException:
            self.close()
            raise

    def command(self, *words: str) -> list[str]:
        """`words`, to be run there."""
        return [str(IP), "netns", "exec", self.name, *words]

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command there to its end."""
        return subprocess.run(
            self.command(*words), capture_output=True, text=True, check=False, env={**os.environ, **environment}
        )

    def engine(self, shape: str, server: str, keys: str = "", **settings: Any) -> "RemoteEngine":
        """Start a reference engine there, patient with its server."""
        engine = RemoteEngine(self, {"shape": shape, "server": server, "deadline": DEADLINE_S, **settings}, keys)
        self._processes.append(engine.process)
        return engine

    def cut(self) -> None:
        """Pull the cable: nothing gets through any more, and nobody is told."""
        _ip("link", "set", self._cable, "down")

    def mend(self) -> None:
        """Plug it in again."""
        _ip("link", "set", self._cable, "up")

    def close(self) -> None:
        """End what runs there, and the namespace."""
        for process in self._processes:
            process.kill()
            process.communicate()
        subprocess.run([str(IP), "link", "del", self._cable], capture_output=True, check=False)
        _ip("netns", "del", self.name)


class RemoteEngine:
    """A reference engine in a process on another host."""

    def __init__(self, host: OtherHost, settings: dict[str, Any], keys: str) -> None:
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "LMCACHE_KEYS": keys}
        self.process = subprocess.Popen(
            host.command(sys.executable, str(ENGINE), json.dumps(settings)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.pids: list[int] = self.ask()["pids"]

    def send(self, **command: Any) -> None:
        """Tell it to do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def ask(self, **command: Any) -> Any:
        """Tell it to do something, and wait for what comes of it."""
        if command:
            self.send(**command)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            pytest.fail(f"the engine on the other host ended: {self.process.communicate()[1]}")
        return json.loads(line)

    def generate(self, prompt: Sequence[int], max_tokens: int = 4) -> dict[str, Any]:
        """What it answers: `tokens`, a digest of all logits, and how many tokens were `hit` and `computed`."""
        answer: dict[str, Any] = self.ask(generate=list(prompt), max_tokens=max_tokens)
        return answer

    def forget(self) -> None:
        """Let it forget the KV that it holds itself."""
        self.ask(forget=True)

    def await_links(self, server: RunningServer) -> None:
        """Until scheduler and worker, both of one process, have their links to this boot of the server."""
        wait_until(lambda: self.ask(epochs=True) == [server.epoch])

    def close(self) -> str:
        """End it in order; what it has logged."""
        self.send(end=True)
        errors: str = self.process.communicate()[1]
        return errors

    def kill(self) -> None:
        """kill -9, its ranks included."""
        for pid in self.pids:
            os.kill(pid, 9)
        self.process.kill()
        self.process.communicate()


def other_host(number: int = 0) -> Iterator[OtherHost]:
    """For a fixture: skips where none can be made."""
    if reason := why_none():
        pytest.skip(reason)
    host = OtherHost(number)
    yield host
    host.close()


def _ip(*words: str) -> None:
    done = subprocess.run([str(IP), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stderr)
