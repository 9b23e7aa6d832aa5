"""The house rules that no linter sees: what a new interpreter loads, and what it must not do by loading it."""

import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lmcache
from lmcache.plugins.manager import PluginManager

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


ADAPTERS = {adapter.engine: adapter for adapter in PluginManager().adapters() if adapter.distributions}
"""Of engines that are somebody else's."""

REGISTRY = ROOT / "lmcache" / "plugins" / "sources.py"
"""The one file outside its own folder that an engine's adapter is named in: the list of built-in plugins."""

KNOW_NO_ENGINE = [
    *(
        path
        for package in ("geometry", "core", "plugins", "simulator")
        for path in (ROOT / "lmcache" / package).rglob("*.py")
    ),
    # shared by adapters; `engines/models` is a copy of one engine's rules, and says so
    *(ROOT / "lmcache" / "engines").glob("[!_]*.py"),
]


@pytest.mark.parametrize("engine", ADAPTERS)
def test_an_engine_is_named_in_its_own_folder_and_in_one_line_of_a_list(engine: str) -> None:
    names = "|".join(re.escape(name) for name in (engine, *ADAPTERS[engine].distributions))
    naming = {
        path: [line.strip() for line in path.read_text().splitlines() if re.search(names, line, re.IGNORECASE)]
        for path in KNOW_NO_ENGINE
    }
    assert naming.pop(REGISTRY) == [f'"{ADAPTERS[engine].__module__}",']
    assert {path: lines for path, lines in naming.items() if lines} == {}


@pytest.mark.parametrize("engine", ADAPTERS)
def test_no_adapter_imports_another_ones(engine: str) -> None:
    folder = ROOT.joinpath(*ADAPTERS[engine].__module__.split(".")).parent
    others = "|".join(
        {each.__module__.rpartition(".")[0] for each in ADAPTERS.values()} - {f"lmcache.engines.{folder.name}"}
    )
    importing = [path for path in folder.rglob("*.py") if re.search(rf"\b(?:{others})\b", path.read_text())]
    assert importing == []


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
