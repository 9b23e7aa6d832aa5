"""The example distribution: installed by pip, found by fresh interpreters, and obeyed by a real server."""

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache.core.client import Client, ClientSettings, Engine, ServerAddress
from lmcache.core.protocol import Role
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.plugins.testing import EvictionPolicySuite

EXAMPLE = Path(__file__).parents[2] / "examples" / "lmcache-fifo-policy"

CELL = 4096
CHUNK = 16
GEOMETRY = Geometry((KVGroup(GroupKind.FULL, CHUNK, (CELL,)),))
"""One chunk is one block, one page, one cell."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the example, so that building it leaves nothing in the repository."""
    copy = tmp_path_factory.mktemp("example") / "source"
    return Path(shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__", ".*")))


@pytest.fixture(scope="module")
def site(source, tmp_path_factory):
    """A folder that the example was installed into, as a user would."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*command, "--disable-pip-version-check", "--target", target, source], check=True, timeout=120)
    return target


@pytest.fixture(params=["entry point", "distribution", "module", "file"])
def way(request, site, source):
    """A way to the plugin: the folder on PYTHONPATH and the flags that it takes."""
    code = source / "src"
    return {
        "entry point": (site, []),
        "distribution": (site, ["--plugin", "lmcache-fifo-policy"]),
        "module": (code, ["--plugin", "lmcache_fifo_policy.policy"]),
        "file": ("", ["--plugin", str(code / "lmcache_fifo_policy" / "policy.py")]),
    }[request.param]


def environment(path):
    return {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}


def test_a_fresh_interpreter_finds_the_policy(way):
    path, flags = way
    script = (
        "import sys; from lmcache.plugins.manager import PluginManager; "
        "print(PluginManager(sys.argv[2::2]).find_policy('MY-FIFO').__qualname__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *flags], env=environment(path), capture_output=True, text=True, check=True
    )
    assert done.stdout == "FIFO\n"


def test_the_plugins_command_shows_where_it_comes_from(site):
    done = subprocess.run(
        [sys.executable, "-m", "lmcache", "plugins"], env=environment(site), capture_output=True, text=True, check=True
    )
    assert (
        "fifo (entry point lmcache-fifo-policy 1.0.0)\n"
        "    eviction policies: my-fifo\n"
        "    hooks: lmcache_register_eviction_policies\n"
    ) in done.stdout


def test_its_own_tests_pass_against_what_was_installed(site, source):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=source, env=environment(site), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    inherited = sum(name.startswith("test_") for name in dir(EvictionPolicySuite))
    assert re.search(rf"\b{inherited + 1} passed\b", done.stdout)


# --------------------------------------------------------------------------------------------------- on a real server


@contextlib.contextmanager
def server(path, *flags):
    """A server with room for four chunks, on a free port; gives its address."""
    size = ["--l1-size-gb", str(4 * CELL / 2**30), "--l1-cell-kb", str(CELL // 1024), "--chunk-size", str(CHUNK)]
    command = [sys.executable, "-m", "lmcache", "server", "--port", "0", *size, *flags]
    process = subprocess.Popen(command, env=environment(path), stdout=subprocess.PIPE, text=True)
    try:
        ready = re.match(r"lmcache server ready on (\S+): ", process.stdout.readline())
        assert ready, "the server did not start"
        yield ServerAddress.parse(ready[1])
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def link(address, role):
    client = Client(address, Engine({"model": "none"}, GEOMETRY, role), ClientSettings(deadline=10.0))
    client.start(wait=10.0)
    try:
        yield client.link()
    finally:
        client.close()


def chain_hash(prompt):
    return hashlib.sha256(prompt.encode()).digest()[:16]


def store(worker, prompt):
    reserved = worker.reserve("", b"", chain_hash(prompt), 0, 0)
    assert len(reserved.cells) == 4, f"no cell for {prompt}"
    worker.commit(reserved.reservation)


def use(scheduler, prompt):
    """Look a prompt up, and let its ticket go again; whether the server has it."""
    found = scheduler.lookup("", chain_hash(prompt), CHUNK).wait()
    scheduler.drop(found.ticket)
    return found.tokens == CHUNK


def evicted(address):
    """Fill a server with prompts a to d, use a, store e; which of the five the server no longer has."""
    with link(address, Role.WORKER) as worker, link(address, Role.SCHEDULER) as scheduler:
        for prompt in "abcd":
            store(worker, prompt)
        assert use(scheduler, "a")
        store(worker, "e")
        return [prompt for prompt in "abcde" if not use(scheduler, prompt)]


def test_a_server_evicts_what_was_stored_first_although_it_was_just_used(way):
    path, flags = way
    with server(path, *flags, "--eviction-policy", "my-fifo") as address:
        assert evicted(address) == ["a"]


def test_the_same_prompts_under_lru_show_that_the_policy_is_what_decides():
    with server("", "--eviction-policy", "lru") as address:
        assert evicted(address) == ["b"]


def test_without_its_plugin_the_policy_is_unknown_in_one_line():
    command = [sys.executable, "-m", "lmcache", "server", "--eviction-policy", "my-fifo"]
    done = subprocess.run(command, env=environment(""), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "lmcache: no plugin offers the eviction policy 'my-fifo'; known: ARC, FIFO, GDSF, LFU, LRU, S3-FIFO, SIEVE, "
        "SLRU, W-TinyLFU, prefix-aware; did you mean 'FIFO'? "
        "use a known one, or add the plugin that offers it with --plugin\n"
    )
