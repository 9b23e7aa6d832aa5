"""`lmcache engines`: what is installed, what is supported, what was validated; no engine is imported."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache.engines.reference.adapter import ReferenceAdapter
from lmcache.engines.vllm.adapter import VllmAdapter

ABACUS = """
from lmcache.core.adapter import EngineAdapter, Validation
from lmcache.core.hookspecs import hookimpl

class Abacus(EngineAdapter):
    engine = "abacus"
    module = "a_module.that_must_not_be_imported"
    distributions = ("abacus", "abacus-lite")
    supported = ">=2.1,<3"
    validation = Validation.SIMULATOR
    status = "beads of every colour; no rods"

@hookimpl
def lmcache_register_engine_adapters():
    return [Abacus]
"""

Install = Callable[[str, str], None]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder that, on PYTHONPATH, has the plugin; engines can be installed in it."""
    (tmp_path / "abacus_plugin.py").write_text(ABACUS)
    return tmp_path


@pytest.fixture
def install(site: Path) -> Install:
    """Install an engine, as far as its metadata goes: whoever imports it fails."""

    def installing(name: str, version: str) -> None:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (site / f"{name.replace('-', '_')}.py").write_text("raise SystemExit('the engine was imported')\n")

    return installing


@pytest.fixture
def engines(lmcache, site: Path):
    """Run `lmcache engines` with the plugin and the folder."""

    def run(*arguments: str, path: str = str(site)):
        return lmcache("engines", "--plugin", "abacus_plugin", *arguments, env={"PYTHONPATH": path})

    return run


LINES = "    supported: >=2.1,<3\n    simulator-tested, not validated on the engine: beads of every colour; no rods\n"


def test_an_engine_that_is_not_installed_is_listed_with_what_is_supported(engines) -> None:
    done = engines()
    assert (done.returncode, done.stderr) == (0, "")
    assert f"abacus: not installed\n{LINES}" in done.stdout


@pytest.mark.parametrize("name", ["abacus", "abacus-lite"])
def test_an_installed_engine_is_listed_with_its_version_and_is_not_imported(
    engines, install: Install, name: str
) -> None:
    install(name, "2.4.0")
    done = engines()
    assert (done.returncode, done.stderr) == (0, "")
    assert f"abacus: {name} 2.4.0, supported\n{LINES}" in done.stdout


def test_the_first_of_several_names_counts(engines, install: Install) -> None:
    install("abacus-lite", "9.0")
    install("abacus", "2.1")
    assert f"abacus: abacus 2.1, supported\n{LINES}" in engines().stdout


@pytest.mark.parametrize("version", ["2.0.9", "3.0.0rc1", "3.1", "0.1.dev3+gabc"])
def test_a_version_outside_the_range_is_said_so_and_makes_the_exit_code_1(
    engines, install: Install, version: str
) -> None:
    install("abacus", version)
    done = engines()
    assert (done.returncode, done.stderr) == (1, "")
    assert f"abacus: abacus {version}, outside the supported range\n{LINES}" in done.stdout
    assert engines("--json").returncode == 1


def test_the_built_in_engines_say_what_their_adapters_say(engines) -> None:
    done = engines()
    assert (
        f"reference: comes with its adapter\n    validated on the engine: {ReferenceAdapter.status}\n"
    ) in done.stdout
    assert f"    supported: {VllmAdapter.supported}\n    validated on the engine: {VllmAdapter.status}\n" in done.stdout


def test_the_same_comes_as_json(engines, install: Install) -> None:
    install("abacus", "2.4.0")
    by_name = {each["engine"]: each for each in json.loads(engines("--json").stdout)}
    assert {"reference", "vllm", "abacus"} <= set(by_name)
    assert by_name["abacus"] == {
        "engine": "abacus",
        "distribution": "abacus",
        "version": "2.4.0",
        "supported": ">=2.1,<3",
        "fit": "supported",
        "validation": "simulator-tested, not validated on the engine",
        "status": "beads of every colour; no rods",
        "module": "a_module.that_must_not_be_imported",
    }


def test_plugins_says_on_what_an_adapter_was_validated(lmcache, site: Path) -> None:
    done = lmcache("plugins", "--plugin", "abacus_plugin", env={"PYTHONPATH": str(site)})
    assert "    engines: abacus (simulator-tested, not validated on the engine)\n" in done.stdout
    assert "    engines: vllm (validated on the engine)\n" in done.stdout


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ("    supported = ", "    more = ", "does not say its supported"),
        ("    status = ", "    more = ", "does not say its status"),
        ('">=2.1,<3"', '"2.1"', "supported is '2.1' is no range of versions"),
    ],
)
def test_an_adapter_that_does_not_say_what_it_must_is_refused_by_name(
    engines, site: Path, line: str, instead: str, message: str
) -> None:
    (site / "abacus_plugin.py").write_text(ABACUS.replace(line, instead))
    done = engines()
    assert done.returncode == 2
    assert done.stderr.startswith("lmcache: the engine adapter abacus_plugin.Abacus")
    assert message in done.stderr
