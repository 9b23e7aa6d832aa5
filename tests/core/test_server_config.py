"""The server's settings: every bad one is refused with its name, the value, and what to do."""

import mmap
from typing import Any

import pytest

from lmcache.core import config
from lmcache.core.config import GIB, KIB, ServerConfig
from lmcache.core.memory import MemoryFigure
from lmcache.errors import ConfigError, MemoryLimitError

NO_PAGES = (
    f"is not a multiple of the host's memory page, {mmap.PAGESIZE // KIB} KiB; "
    "use 1024 unless every object is much smaller"
)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": -1}, "--port -1 is no TCP port; use 1 to 65535, or 0 for any free one"),
        ({"port": 65536}, "--port 65536 is no TCP port; use 1 to 65535, or 0 for any free one"),
        ({"chunk_size": 0}, "--chunk-size 0 is not positive; give a number of tokens, like 256"),
        ({"chunk_size": -256}, "--chunk-size -256 is not positive; give a number of tokens, like 256"),
        ({"max_workers": 0}, "--max-workers 0 is not positive; use at least 1"),
        (
            {"max_workers": 257},
            (
                "--max-workers 257 is more than 256 threads, and a few keep up with any engine; use 2, or as many as "
                "there are engines that store at once"
            ),
        ),
        ({"cell_bytes": 100 * KIB + 1}, f"--l1-cell-kb 100.001 {NO_PAGES}"),
        ({"cell_bytes": 0}, f"--l1-cell-kb 0 {NO_PAGES}"),
        ({"cell_bytes": -mmap.PAGESIZE}, f"--l1-cell-kb {-mmap.PAGESIZE // KIB} {NO_PAGES}"),
        (
            {"l1_bytes": 0},
            "--l1-size-gb 0 holds no cell of 1024 KiB; give more memory, or smaller cells with --l1-cell-kb",
        ),
        (
            {"l1_bytes": -GIB},
            "--l1-size-gb -1 holds no cell of 1024 KiB; give more memory, or smaller cells with --l1-cell-kb",
        ),
        ({"host": ""}, "--host '' is not just the name or address of a host; write something like --host 127.0.0.1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ServerConfig(**settings)
    assert str(error.value) == message
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.1", "::", "example.com", "*"])
def test_a_host_in_reach_of_others_needs_keys_or_a_word(host: str) -> None:
    with pytest.raises(ConfigError) as error:
        ServerConfig(host=host)
    assert str(error.value) == (
        f"--host {host} is not a loopback address: whoever reaches it could read and write the cache; make keys with "
        "`lmcache keys new FOLDER` and give them with --keys FOLDER, or accept that with --insecure"
    )
    assert ServerConfig(host=host, insecure=True).host == host
    assert ServerConfig(host=host, keys="folder").host == host


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"keys": "folder", "insecure": True},
            "--keys and --insecure contradict each other; drop --insecure: with keys it is secure",
        ),
        ({"bulk_port": 65536}, "--bulk-port 65536 is no TCP port; use 1 to 65535, or 0 for any free one"),
        ({"bulk_port": -1}, "--bulk-port -1 is no TCP port; use 1 to 65535, or 0 for any free one"),
        ({"bulk_port": 5555}, "--bulk-port 5555 is --port, too; give each a port of its own"),
        (
            {"port": 65535, "keys": "folder"},
            "no port follows --port 65535; choose one for the bulk channel with --bulk-port",
        ),
    ],
)
def test_settings_of_the_bulk_channel_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ServerConfig(**settings)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("settings", "bulk"),
    [({}, False), ({"keys": "folder"}, True), ({"insecure": True}, True), ({"bulk_port": 0}, True)],
)
def test_there_is_a_bulk_channel_where_engines_on_other_hosts_are_wanted(settings: dict[str, Any], bulk: bool) -> None:
    assert ServerConfig(**settings).bulk == bulk


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_every_loopback_address_is_fine(host: str) -> None:
    assert ServerConfig(host=host).host == host


def test_as_many_workers_as_are_allowed_are_taken() -> None:
    assert ServerConfig(max_workers=256).max_workers == 256


def test_the_arena_is_whole_cells() -> None:
    made = ServerConfig(l1_bytes=10 * KIB, cell_bytes=4 * KIB)

    assert (made.cells, made.arena_bytes) == (2, 8 * KIB)


def test_more_memory_than_there_could_ever_be_is_refused_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "total_memory", lambda: MemoryFigure(2 * GIB, "the container's limit (/box)"))
    ServerConfig(l1_bytes=2 * GIB).check_memory()

    with pytest.raises(MemoryLimitError) as error:
        ServerConfig(l1_bytes=100 * GIB).check_memory()
    assert str(error.value) == (
        "--l1-size-gb 100 is more than the container's limit (/box), 2.0 GB; use at most 1.6, or give "
        "the host (container) more memory"
    )


def test_a_tiny_container_is_not_told_to_use_more_than_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "total_memory", lambda: MemoryFigure(GIB // 16, "the container's limit (/box)"))

    with pytest.raises(MemoryLimitError) as error:
        ServerConfig(l1_bytes=GIB // 2).check_memory()
    assert "0.062 GB; use at most 0.05," in str(error.value)
