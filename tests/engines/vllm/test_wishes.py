"""What a request may say of its chunks in `kv_transfer_params`: what is read, refused, and left to others."""

import pytest

from lmcache.core.hints import NO_HINTS, Hints, Priority
from lmcache.engines.vllm.wishes import Wishes, wishes_of
from lmcache.errors import ConfigError


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True, "lmcache": 5, "ttl_s": 3}])
def test_what_is_not_ours_is_left_alone(params: dict[str, object] | None) -> None:
    assert wishes_of(params) == Wishes("", NO_HINTS)


def test_everything_that_may_be_said_is_heard() -> None:
    said = {"lmcache.tenant": "a", "lmcache.ttl_s": 0.5, "lmcache.priority": "LOW", "lmcache.session_end": True}

    assert wishes_of(said) == Wishes("a", Hints(0.5, Priority.LOW, ends_session=True))
    assert wishes_of({"lmcache.priority": "normal"}) == Wishes("", Hints(None, Priority.NORMAL))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ttl", 3, "lmcache.ttl in kv_transfer_params is not known; did you mean lmcache.ttl_s?"),
        ("colour", 3, "lmcache.colour in kv_transfer_params is not known; there are lmcache.tenant, lmcache.ttl_s"),
        ("ttl_s", "1h", "lmcache.ttl_s in kv_transfer_params is '1h'; give a number of seconds, like 3600"),
        ("ttl_s", -1, "lmcache.ttl_s in kv_transfer_params is -1; give a number of seconds"),
        ("ttl_s", float("nan"), "lmcache.ttl_s in kv_transfer_params is nan; give a number of seconds"),
        ("ttl_s", float("inf"), "lmcache.ttl_s in kv_transfer_params is inf; give a number of seconds"),
        ("ttl_s", 10**400, "lmcache.ttl_s in kv_transfer_params is 1000"),
        ("ttl_s", True, "lmcache.ttl_s in kv_transfer_params is True; give a number of seconds"),
        ("priority", "urgent", "is 'urgent'; give one of low, normal, high"),
        ("priority", 1, "lmcache.priority in kv_transfer_params is 1; give one of low, normal, high"),
        ("session_end", "yes", "lmcache.session_end in kv_transfer_params is 'yes'; give true or false"),
        ("tenant", "x" * 257, "give a name of at most 256 printable characters"),
        ("tenant", "\x1b[31m", "lmcache.tenant in kv_transfer_params is '\\x1b[31m'; give a name of at most 256"),
        ("tenant", "\ud800", "lmcache.tenant in kv_transfer_params is '\\ud800'; give a name of at most 256"),
        ("tenant", 7, "lmcache.tenant in kv_transfer_params is 7; give a name"),
    ],
)
def test_what_makes_no_sense_is_named_with_what_to_write(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        wishes_of({f"lmcache.{name}": value})
    assert message in str(error.value)
