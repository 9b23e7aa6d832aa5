"""The settings of SGLang's doors: what is taken, what is refused, and in which words."""

from typing import Any

import pytest

from lmcache.core.client import ServerAddress
from lmcache.engines.sglang.settings import Settings, read_settings
from lmcache.errors import ConfigError


def test_nothing_is_needed() -> None:
    assert read_settings({}, "the JSON") == Settings()
    assert read_settings({}, "the JSON").address == ServerAddress("127.0.0.1", 5555)


def test_everything_can_be_set() -> None:
    settings = read_settings(
        {
            "lmcache.mp.host": "tcp://127.0.0.2",
            "lmcache.mp.port": 6555,
            "lmcache.mp.keys": "/keys",
            "lmcache.deadline": 2,
            "lmcache.start_wait": 0,
            "lmcache.tier_wait": 0.5,
            "lmcache.weights_id": "w",
            "lmcache.tenant": "t",
            "lmcache.staging": True,
            "interface_v1": 1,
        },
        "the JSON",
        {"interface_v1"},
    )
    assert settings == Settings(ServerAddress("127.0.0.2", 6555), "/keys", 2.0, 0.0, 0.5, "w", "t", staging=True)
    assert (settings.client.deadline, settings.client.keys) == (2.0, "/keys")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "lmcache.mp.prot",
            1,
            "unknown key 'lmcache.mp.prot' in the JSON; did you mean lmcache.mp.port? known keys are",
        ),
        ("lmcache.mp.port", 0, "lmcache.mp.port is 0 in the JSON; give a TCP port, 1 to 65535"),
        ("lmcache.mp.port", True, "lmcache.mp.port is True in the JSON; give a TCP port"),
        ("lmcache.mp.host", 1, "lmcache.mp.host is 1 in the JSON; give a host name"),
        ("lmcache.deadline", 0, "lmcache.deadline is 0 in the JSON; give a number of seconds above 0"),
        ("lmcache.tier_wait", -1, "lmcache.tier_wait is -1 in the JSON; give a number of seconds"),
        ("lmcache.tenant", "", "lmcache.tenant is '' in the JSON; give a text that is not empty"),
        ("lmcache.staging", 1, "lmcache.staging is 1 in the JSON; give true or false"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_settings({key: value}, "the JSON")
    assert str(refused.value).startswith(message)
