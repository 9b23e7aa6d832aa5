"""The example tier and the example codec: installed by pip, found by fresh interpreters, and used as users would."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache.plugins.testing import CodecSuite, StorageTierSuite

EXAMPLES = Path(__file__).parents[2] / "examples"
INHERITED = {"lmcache-folder-tier": StorageTierSuite, "lmcache-xz-codec": CodecSuite}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Copies of the examples, so that building them leaves nothing in the repository."""
    folder = tmp_path_factory.mktemp("examples")
    for name in INHERITED:
        shutil.copytree(EXAMPLES / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    return folder


@pytest.fixture(scope="module")
def site(sources, tmp_path_factory):
    """A folder that both were installed into, as a user would."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command += ["--disable-pip-version-check", "--target", target, *(sources / name for name in INHERITED)]
    subprocess.run(command, check=True, timeout=120)
    return target


def run(command, path, **options):
    env = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=env, capture_output=True, text=True, check=False, **options
    )


def test_the_plugins_command_shows_what_they_bring(site):
    done = run(["-m", "lmcache", "plugins"], site)
    for lines in (
        (
            "folder (entry point lmcache-folder-tier 1.0.0)\n    storage tiers: folder\n"
            "    hooks: lmcache_register_storage_tiers\n"
        ),
        "xz (entry point lmcache-xz-codec 1.0.0)\n    codecs: xz\n    hooks: lmcache_register_codecs\n",
    ):
        assert lines in done.stdout


@pytest.mark.parametrize("name", INHERITED)
def test_its_own_tests_pass_against_what_was_installed(site, sources, name):
    done = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"], site, cwd=sources / name)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    assert passed >= sum(test.startswith("test_") for test in dir(INHERITED[name]))


STORE = """
import sys, time
from lmcache.core.blob import BlobIdentity, Loaded
from lmcache.plugins.manager import PluginManager
opened = PluginManager(sys.argv[3:]).open_tier(sys.argv[1])
identity = BlobIdentity(b"n" * 16, {"model": "m"}, b"c" * 16, 0, 0, "", 256)
payload = b"payload" * 10_000
if sys.argv[2] == "store":
    opened.blobs.store(identity, [memoryview(payload)], time.monotonic() + 60)
else:
    into = memoryview(bytearray(len(payload)))
    print(opened.blobs.load(identity, [into], time.monotonic() + 60).value, into == payload)
opened.blobs.tier.close()
"""


@pytest.mark.parametrize("way", ["entry point", "file"])
def test_a_blob_goes_through_both_from_one_process_to_another(site, sources, tmp_path, way):
    url = f"folder://{tmp_path}/blobs?make=yes&codec=xz"
    path, plugins = site, []
    if way == "file":
        path = ""
        plugins = [
            sources / "lmcache-folder-tier" / "src" / "lmcache_folder_tier" / "tier.py",
            sources / "lmcache-xz-codec" / "src" / "lmcache_xz_codec" / "codec.py",
        ]
    assert run(["-c", STORE, url, "store", *plugins], path).stderr == ""
    (blob,) = (tmp_path / "blobs").iterdir()
    assert blob.stat().st_size < 10_000
    assert run(["-c", STORE, url, "load", *plugins], path).stdout == "loaded True\n"

    flags = [word for plugin in plugins for word in ("--plugin", plugin)]
    listed = json.loads(run(["-m", "lmcache", "tier", "ls", "--json", *flags, url], path).stdout)
    assert [(row["codec"], row["blobs"]) for row in listed["namespaces"]] == [("xz", 1)]
    blob.write_bytes(blob.read_bytes()[:-1])
    verified = run(["-m", "lmcache", "tier", "verify", *flags, url], path)
    assert verified.returncode == 1
    assert f"{blob.name} damaged\n" in verified.stdout
