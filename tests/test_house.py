"""The house rules that no linter sees: what a new interpreter loads, and what it must not do by loading it."""

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import lmcache

ENGINES = {"torch", "vllm", "sglang", "tensorrt_llm", "numpy"}
DEAR = {"rich", "prometheus_client", "matplotlib", "zstandard", "cryptography", "redis", "obstore"}
"""Paid for only by who shows a table, exports metrics, draws, compresses, encrypts or has such a tier."""

LIGHT = ["lmcache.geometry", "lmcache.core", "lmcache.plugins", "lmcache.simulator", "lmcache.cli"]
"""Packages that must work where no engine is."""

ROOT = Path(lmcache.__file__).parent.parent


def modules_of(package: str) -> list[str]:
    """Every module of one of our packages, subpackages included, without importing any."""
    folder = ROOT.joinpath(*package.split("."))
    found = [package]
    for module in pkgutil.iter_modules([str(folder)], f"{package}."):
        found += modules_of(module.name) if module.ispkg else [module.name]
    return found


def facts_after_importing(modules: list[str]) -> dict[str, list[str]]:
    """What a new interpreter has once it has imported `modules`: top-level packages, threads, descriptors it opened."""
    script = """
import json, os, sys, threading
import importlib
opened = set(os.listdir("/proc/self/fd"))
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps({
    "packages": sorted({name.partition(".")[0] for name in sys.modules}),
    "threads": [thread.name for thread in threading.enumerate()],
    "descriptors": sorted(set(os.listdir("/proc/self/fd")) - opened),
}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, *modules], stdout=subprocess.PIPE, text=True, check=True, timeout=60
    )
    facts: dict[str, list[str]] = json.loads(done.stdout)
    return facts


@pytest.mark.parametrize(
    "package", ["lmcache.geometry", "lmcache.core", "lmcache.plugins", "lmcache.simulator", "lmcache.cli"]
)
def test_no_module_outside_engines_loads_an_engine_or_numpy(package: str) -> None:
    facts = facts_after_importing(modules_of(package))

    assert ENGINES.intersection(facts["packages"]) == set()
    assert DEAR.intersection(facts["packages"]) == set()


def test_loading_everything_opens_nothing_and_starts_no_thread() -> None:
    facts = facts_after_importing([module for package in LIGHT for module in modules_of(package)])

    assert facts["threads"] == ["MainThread"]
    assert facts["descriptors"] == []


def test_geometry_and_core_know_nothing_of_the_command_line() -> None:
    facts = facts_after_importing(modules_of("lmcache.geometry") + modules_of("lmcache.core"))

    assert "click" not in facts["packages"]


def test_adapters_are_listed_without_their_engines() -> None:
    script = """
import json, sys
from lmcache.plugins.manager import PluginManager
manager = PluginManager()
engines = [engine for each in manager.describe() for engine in each.adapters]
print(json.dumps([engines, sorted({name.partition(".")[0] for name in sys.modules})]))
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    engines, packages = json.loads(done.stdout)

    assert {"reference", "vllm"} <= set(engines)
    assert (ENGINES | DEAR | {"click"}).intersection(packages) == set()


def test_a_server_without_tiers_or_a_recording_starts_without_what_these_take() -> None:
    script = """
import json, sys
from lmcache.cli.main import main
from lmcache.core import server
def started(self):
    print(json.dumps(sorted(name for name in sys.modules if name.startswith("lmcache."))))
server.Server.run = started
main(["server", "--port", "0", "--l1-size-gb", "0.1"])
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))

    assert "lmcache.core.service" in loaded
    for name in ("core.tiering", "core.promotion", "core.blob", "core.recording", "plugins.opening"):
        assert f"lmcache.{name}" not in loaded, name


def test_importing_lmcache_itself_loads_nothing_but_the_version() -> None:
    script = (
        "import sys; old = set(sys.modules); import lmcache; print(sorted(set(sys.modules) - old), lmcache.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True, timeout=60)

    assert done.stdout == f"['lmcache'] {lmcache.__version__}\n"


def test_imports_point_one_way() -> None:
    pytest.importorskip("importlinter", reason="import-linter is part of the dev extra")
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert done.returncode == 0, done.stdout
