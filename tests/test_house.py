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


STARTS = {
    "server": ["server", "--port", "0", "--l1-size-gb", "0.1"],
    "status": ["status", "--port", "1"],  # nobody listens there
    "the list of commands": ["--help"],
}
"""What somebody waits for, by what they typed."""

NOT_FOR_A_START = {
    # ZeroMQ's helper for monitors brings it along
    "asyncio",
    "lmcache.core.adapter",
    "lmcache.core.blob",
    "lmcache.core.codec",
    "lmcache.core.promotion",
    "lmcache.core.recording",
    "lmcache.core.tier",
    "lmcache.core.tiering",
    "lmcache.engines",
    "lmcache.plugins.admission",
    "lmcache.plugins.codecs",
    "lmcache.plugins.opening",
    "lmcache.plugins.storage",
    "lmcache.simulator",
}
"""Modules of what was not chosen, and packages, with all that is in them."""


def loaded_by(command: list[str]) -> set[str]:
    """Modules that a new interpreter has when a command is done, or when a server would begin to serve."""
    script = """
import json, sys
from lmcache.cli.main import main
if sys.argv[1] == "server":
    from lmcache.core import server
    server.Server.run = lambda self: None
main(sys.argv[1:])
print("\\n" + json.dumps(sorted(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, *command], stdout=subprocess.PIPE, text=True, check=True, timeout=60
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("start", STARTS)
def test_a_start_loads_nothing_of_what_was_not_chosen(start: str) -> None:
    loaded = loaded_by(STARTS[start])

    assert f"lmcache.cli.{start}" in loaded or start not in ("server", "status")
    assert loaded & NOT_FOR_A_START == set()
    assert {name.partition(".")[0] for name in loaded} & (ENGINES | DEAR) == set()


def test_a_server_loads_the_kinds_of_plugins_that_it_was_asked_for(tmp_path: Path) -> None:
    loaded = loaded_by([*STARTS["server"], "--l2", f"disk://{tmp_path}?size_gb=0.1", "--admission", "second-use"])

    assert {"lmcache.plugins.storage.disk", "lmcache.plugins.admission.second_use"} <= loaded
    assert "lmcache.engines" not in loaded


def test_what_asks_no_plugin_loads_none() -> None:
    loaded = loaded_by(STARTS["status"])

    assert {name for name in loaded if name.startswith("lmcache.plugins")} == set()
    assert "pluggy" not in loaded
    assert "importlib.metadata" not in loaded


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
    assert naming.pop(REGISTRY) == [f'"{ADAPTERS[engine].__module__}": _ENGINES,']
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
