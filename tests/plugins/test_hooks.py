"""Every hook is documented with its exact signature, and every hook is called in processes as users start them."""

import ast
import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache.core import hookspecs
from lmcache.core.client import Client, ClientSettings, Engine, ServerAddress
from lmcache.core.protocol import Role
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.plugins.checks import HOOKS

HERE = Path(__file__).parent
REFERENCE = HERE.parents[1] / "docs" / "reference" / "hooks.md"


def signatures():
    """For each hook its `def` line as one would write it in an implementation."""
    functions = [node for node in ast.parse(inspect.getsource(hookspecs)).body if isinstance(node, ast.FunctionDef)]
    lines = [f"def {node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}" for node in functions]
    # quotes only keep imports away
    return [(node.name, line.replace("'", "")) for node, line in zip(functions, lines, strict=True)]


def test_the_hooks_are_the_functions_of_the_specification():
    assert list(HOOKS) == [name for name, _ in signatures()]


@pytest.mark.parametrize(("hook", "signature"), signatures())
def test_a_hook_has_its_section_with_its_exact_signature(hook, signature):
    section = REFERENCE.read_text().partition(f"\n### `{hook}`\n")[2].partition("\n#")[0]
    assert f"```python\n{signature}\n```" in section


def test_the_reference_describes_no_hook_that_does_not_exist():
    assert re.findall(r"\n### `(\w+)`\n", REFERENCE.read_text()) == list(HOOKS)


def test_every_hook_says_when_it_is_called():
    for name in HOOKS:
        assert "called once" in getattr(hookspecs, name).__doc__.lower(), name


@pytest.fixture
def installed(tmp_path):
    """The environment of a process in which the plugin with every hook is installed, and the file it writes to."""
    shutil.copy(HERE / "every_hook.py", tmp_path)
    metadata = tmp_path / "every_hook-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: every-hook\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[lmcache]\nevery = every_hook\n")
    log = tmp_path / "log"
    return {**os.environ, "PYTHONPATH": str(tmp_path), "EVERY_HOOK_LOG": str(log)}, log


def test_every_hook_is_called(installed):
    env, log = installed
    lmcache = [sys.executable, "-m", "lmcache"]
    done = subprocess.run([*lmcache, "classify"], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "GroupKind.SCRATCH\n"

    command = [*lmcache, "server", "--port", "0", "--l1-size-gb", "0.01", "--eviction-policy", "EVERY-HOOK"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as server:
        ready = re.match(r"lmcache server ready on (\S+): .* policy every-hook,", server.stdout.readline())
        hashes = store_until_one_goes(ready[1])
        server.send_signal(signal.SIGTERM)
    assert server.returncode == 0

    calls = log.read_text().splitlines()
    assert {call.split()[0] for call in calls} == set(HOOKS)
    assert "lmcache_register_commands cli" in calls
    assert "lmcache_classify_kv_spec every-hook Spec" in calls
    assert f"lmcache_server_started {ready[1]}" in calls
    assert [call for call in calls if "after" in call] == [
        f"lmcache_after_store {hashes[0]}",
        f"lmcache_after_lookup {CHUNK}",
        f"lmcache_after_store {hashes[1]}",
        f"lmcache_after_evict {hashes[0]}",
        f"lmcache_after_store {hashes[2]}",
    ]
    assert calls[-1] == "lmcache_server_stopping"


CHUNK = 256
LARGE = Geometry((KVGroup(GroupKind.FULL, CHUNK, (1 << 20,) * 4),))
"""Of a server of ten cells a chunk takes four."""


def store_until_one_goes(address):
    """Store three prompts of a chunk, the first of which is looked up, where there is room for two; returns hashes."""
    client = Client(
        ServerAddress.parse(address), Engine({"model": "m"}, LARGE, Role.WORKER), ClientSettings(deadline=30)
    )
    client.start(30)
    try:
        link = client.link()
        hashes = [bytes([number]) * 16 for number in range(3)]
        for number, chunk in enumerate(hashes):
            link.commit(link.reserve("", b"", chunk, 0, 0).reservation)
            if number == 0:
                link.drop(link.lookup("", chunk, CHUNK).wait().ticket)
    finally:
        client.close()
    return [chunk.hex() for chunk in hashes]
