"""The example engine and its adapter: installed by pip, listed by fresh interpreters, and served by a real server."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache.cli.child_server import child_server
from lmcache.plugins.testing import EngineAdapterTests

EXAMPLE = Path(__file__).parents[2] / "examples" / "lmcache-pebble-engine"


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


def run(command, path, **options):
    env = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "error"}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=env, capture_output=True, text=True, check=False, **options
    )


def test_the_adapter_takes_fewer_than_150_lines():
    folder = EXAMPLE / "src" / "lmcache_pebble_engine"
    assert sum(len((folder / name).read_text().splitlines()) for name in ("adapter.py", "connector.py")) < 150


def test_it_is_listed_among_the_plugins_and_the_engines(site):
    listed = run(["-m", "lmcache", "plugins"], site).stdout
    assert (
        "pebble (entry point lmcache-pebble-engine 1.0.0)\n    engines: pebble (validated on the engine)\n"
        "    hooks: lmcache_register_engine_adapters\n"
    ) in listed
    done = run(["-m", "lmcache", "engines", "--json"], site)
    (pebble,) = [each for each in json.loads(done.stdout) if each["engine"] == "pebble"]
    assert (pebble["distribution"], pebble["version"]) == ("lmcache-pebble-engine", "1.0.0")
    assert (pebble["supported"], pebble["fit"], done.returncode) == (">=1,<2", "supported", 0)


@pytest.mark.timeout(600)
def test_its_own_tests_pass_against_what_was_installed(site, source):
    done = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"], site, cwd=source)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    assert passed > sum(test.startswith("test_") for test in dir(EngineAdapterTests))
    assert "skipped" not in done.stdout


def test_what_the_readme_shows_hits(site):
    with child_server("--l1-size-gb", "0.125") as address:
        first, second = (run(["-m", "lmcache_pebble_engine", address], site) for _ in range(2))
    answer = re.search(r"the answer is (.*)", first.stdout)[1]
    assert first.stdout == (
        f"0 of 1000 tokens came from the cache; the answer is {answer}\n"
        f"768 of 1000 tokens came from the cache; the answer is {answer}\n"
    )
    assert "failed" not in first.stderr + second.stderr  # every chunk is stored once it is whole, at the first attempt
    assert second.stdout == f"768 of 1000 tokens came from the cache; the answer is {answer}\n" * 2
