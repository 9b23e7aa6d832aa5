"""The extra config of the connector, as users write it."""

from typing import Any

import pytest

from lmcache.core.client import ServerAddress
from lmcache.engines.vllm.settings import read_settings
from lmcache.errors import ConfigError


def test_nothing_given_means_the_local_server_at_the_usual_port() -> None:
    settings = read_settings({})
    assert settings.address == ServerAddress("127.0.0.1", 5555)
    assert settings.store_decode
    assert settings.notes == ()


@pytest.mark.parametrize(
    ("extra", "address"),
    [
        ({"lmcache.mp.port": 6555}, "127.0.0.1:6555"),
        ({"lmcache.mp.port": "6555"}, "127.0.0.1:6555"),
        ({"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": 6555}, "localhost:6555"),
        ({"lmcache.mp.host": "localhost"}, "localhost:5555"),
        ({"lmcache.mp.host": "tcp://localhost:7000"}, "localhost:7000"),
    ],
)
def test_a_host_and_a_port_may_be_written_in_every_usual_way(extra: dict[str, Any], address: str) -> None:
    assert str(read_settings(extra).address) == address


def test_every_key_of_ours_is_taken() -> None:
    settings = read_settings(
        {"lmcache.deadline": 3, "lmcache.start_wait": 0, "lmcache.store_decode": False, "lmcache.weights_id": "v7"}
    )
    assert (settings.client.deadline, settings.start_wait, settings.store_decode, settings.weights_id) == (
        3.0,
        0.0,
        False,
        "v7",
    )


def test_keys_that_people_already_write_are_accepted_with_a_note_each() -> None:
    settings = read_settings({"lmcache.mp.mq_timeout": 30, "lmcache.mp.heartbeat_interval": 5})
    assert [note.partition(" ")[0] for note in settings.notes] == [
        "lmcache.mp.mq_timeout",
        "lmcache.mp.heartbeat_interval",
    ]


def test_an_unknown_key_is_refused_with_the_nearest_and_all_known_ones() -> None:
    with pytest.raises(ConfigError) as refused:
        read_settings({"lmcache.mp.prot": 6555})
    assert str(refused.value) == (
        "unknown key 'lmcache.mp.prot' in kv_connector_extra_config; did you mean lmcache.mp.port? known keys are "
        "lmcache.mp.host, lmcache.mp.port, lmcache.mp.keys, lmcache.deadline, lmcache.start_wait, "
        "lmcache.store_decode, "
        "lmcache.weights_id, lmcache.staging, lmcache.mp.mq_timeout, lmcache.mp.heartbeat_interval"
    )


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("lmcache.mp.host", 7, "a host name"),
        ("lmcache.mp.port", 0, "1 to 65535"),
        ("lmcache.mp.port", 65536, "1 to 65535"),
        ("lmcache.mp.port", True, "1 to 65535"),
        ("lmcache.mp.port", "http", "1 to 65535"),
        ("lmcache.deadline", 0, "above 0"),
        ("lmcache.deadline", "1s", "above 0"),
        ("lmcache.start_wait", -1, "above 0"),
        ("lmcache.store_decode", "yes", "true or false"),
        ("lmcache.weights_id", "", "not empty"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(key: str, value: Any, wanted: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_settings({key: value})
    assert key in str(refused.value)
    assert repr(value) in str(refused.value)
    assert wanted in refused.value.remedy
