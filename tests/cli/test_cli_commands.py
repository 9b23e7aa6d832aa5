"""The list of commands: ours, and those that plugins of installed distributions add."""

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

from lmcache.cli.main import COMMANDS, cli

HELLO = """
import click
from lmcache.core.hookspecs import hookimpl

@click.command()
def {name}():
    \"\"\"Say hello.\"\"\"
    click.echo("hello from a plugin")

@hookimpl
def lmcache_register_commands(cli):
    cli.add_command({name})
"""


@pytest.fixture
def distribution(tmp_path: Path) -> Path:
    """A folder that, on PYTHONPATH, holds an installed distribution `greeter` with a plugin module."""
    info = tmp_path / "greeter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greeter\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lmcache]\ngreeter = greeter_plugin\n")
    (tmp_path / "greeter_plugin.py").write_text(HELLO.format(name="hello"))
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_its_short_help_is_the_listed_one(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)

    assert command is not None
    assert command.name == name
    assert command.short_help == COMMANDS[name]


def test_help_lists_every_command_and_imports_none(lmcache) -> None:
    script = """
import sys
from lmcache.cli.main import main
code = main(["--help"])
print(sorted(name for name in sys.modules if name.startswith("lmcache.cli.")))
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)

    assert (done.returncode, done.stderr) == (0, "")
    for name, sentence in COMMANDS.items():
        assert any(line.split(maxsplit=1) == [name, sentence] for line in done.stdout.splitlines())
    assert done.stdout.endswith("\n['lmcache.cli.main', 'lmcache.cli.options']\n")
    assert lmcache().stdout == lmcache("-h").stdout == done.stdout.rpartition("['")[0]


def test_a_distribution_adds_a_command(lmcache, distribution: Path) -> None:
    done = lmcache("hello", env={"PYTHONPATH": str(distribution)})
    listing = lmcache("--help", env={"PYTHONPATH": str(distribution)})

    assert (done.returncode, done.stdout, done.stderr) == (0, "hello from a plugin\n", "")
    assert listing.stdout.endswith("\nCommands of plugins:\n  hello  Say hello.\n")


def test_a_command_cannot_take_the_name_of_ours(lmcache, distribution: Path) -> None:
    (distribution / "greeter_plugin.py").write_text(HELLO.format(name="ping"))
    done = lmcache("hello", env={"PYTHONPATH": str(distribution)})

    assert done.returncode == 2
    assert done.stderr == (
        "lmcache: plugin 'greeter' (entry point of greeter 1.0) failed in lmcache_register_commands: PluginError: "
        "the command 'ping' is there already; give the plugin's command another name; repair it, or leave it out "
        "with --plugin no:greeter\n"
    )


def test_a_broken_plugin_costs_the_help_a_line_and_our_commands_nothing(lmcache, distribution: Path) -> None:
    (distribution / "greeter_plugin.py").write_text("import a_module_that_is_not_there\n")
    env = {"PYTHONPATH": str(distribution)}
    listing = lmcache("--help", env=env)
    unknown = lmcache("hello", env=env)
    version = lmcache("--version", env=env)
    without = lmcache("plugins", "--plugin", "no:greeter", env=env)

    assert listing.returncode == 0
    assert all(f"\n  {name} " in listing.stdout for name in COMMANDS)
    assert (
        listing.stderr
        == unknown.stderr
        == (
            "lmcache: plugin 'greeter' (entry point of greeter 1.0) cannot be imported: ModuleNotFoundError: No "
            "module named 'a_module_that_is_not_there'; repair or reinstall it, or leave it out with --plugin "
            "no:greeter\n"
        )
    )
    assert unknown.returncode == 2
    assert (version.returncode, version.stderr) == (0, "")
    assert (without.returncode, without.stderr) == (0, "")


def test_plugins_lists_what_each_brings(lmcache) -> None:
    spoken = lmcache("plugins")
    listed = json.loads(lmcache("plugins", "--json").stdout)

    assert "lmcache.plugins.eviction.lru (built-in)\n    eviction policies: LRU\n" in spoken.stdout
    by_name = {each["name"]: each for each in listed}
    assert by_name["lmcache.plugins.eviction.lru"] == {
        "name": "lmcache.plugins.eviction.lru",
        "origin": "built-in",
        "distribution": "",
        "hooks": ["lmcache_register_eviction_policies"],
        "policies": ["LRU"],
        "admission": [],
        "retention": [],
        "tiers": [],
        "codecs": [],
        "adapters": [],
    }
    assert by_name["lmcache.engines.vllm.adapter"]["adapters"] == ["vllm"]
    assert by_name["lmcache.engines.sglang.adapter"]["adapters"] == ["sglang"]
