"""What an adapter does about a version of its engine that its tests have not run on."""

import logging

import pytest

from lmcache.core.adapter import EngineAdapter, Validation
from lmcache.engines.versions import check_interface, warn_of_version
from lmcache.errors import ConfigError


class Abacus(EngineAdapter):
    engine = "abacus"
    module = "abacus.lmcache"
    distributions = ("abacus",)
    supported = ">=2.1,<3"
    validation = Validation.SIMULATOR
    status = "everything"


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> None:
    warn_of_version.cache_clear()


def test_a_version_in_the_range_is_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        warn_of_version(Abacus, "2.7.1+cpu")
    assert caplog.messages == []


@pytest.mark.parametrize("version", ["2.0", "3.0rc1", "4", "main"])
def test_another_version_is_warned_of_once_with_both_versions(caplog: pytest.LogCaptureFixture, version: str) -> None:
    for _ in range(3):
        warn_of_version(Abacus, version)
    assert caplog.messages == [
        (
            "lmcache: its adapter for abacus is simulator-tested, not validated on the engine (abacus >=2.1,<3); "
            f"this is {version}: it may well work, but nobody has looked; `lmcache engines` lists what was validated"
        )
    ]


def test_an_engine_that_lacks_something_is_refused_with_what_was_found_what_is_supported_and_what_to_do() -> None:
    with pytest.raises(ConfigError) as refused:
        check_interface(Abacus, "1.9", ["slide_beads", "count"])
    assert str(refused.value) == (
        "abacus 1.9 does not offer slide_beads, count, which its adapter needs; "
        "use abacus >=2.1,<3, or run it without lmcache"
    )


def test_an_engine_that_has_everything_is_not_refused_for_its_version() -> None:
    check_interface(Abacus, "0.1.dev1+gabcdef", [])
