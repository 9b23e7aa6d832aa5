"""Plugins that are told of a server's start may ask it, and may take as long as they like: it serves, and it ends."""

import signal
from pathlib import Path

import pytest

ASKS = """
from lmcache.core.control import Control, ServerAddress
from lmcache.core.hookspecs import hookimpl

@hookimpl
def lmcache_server_started(address):
    with Control(ServerAddress.parse(address), deadline=60) as control:
        control.ping()
    print("asked", flush=True)
"""

HANGS = """
import time
from lmcache.core.hookspecs import hookimpl

@hookimpl
def lmcache_server_started(address):
    time.sleep(3600)

@hookimpl
def lmcache_server_stopping():
    print("stopping", flush=True)
"""


@pytest.fixture
def plugin(tmp_path: Path):
    def write(text: str) -> str:
        file = tmp_path / "told.py"
        file.write_text(text)
        return str(file)

    return write


def test_a_plugin_that_is_told_that_the_server_answers_can_ask_it(start_server, plugin) -> None:
    server = start_server("--plugin", plugin(ASKS))
    assert server.process.stdout.readline() == "asked\n"


def test_a_plugin_that_never_returns_keeps_nobody_from_the_server_nor_it_from_its_end(
    lmcache, start_server, plugin
) -> None:
    server = start_server("--plugin", plugin(HANGS))
    assert lmcache("ping", "--port", str(server.port)).returncode == 0
    server.process.send_signal(signal.SIGTERM)
    out, _ = server.process.communicate()
    assert (server.process.returncode, out) == (0, "stopping\n")
