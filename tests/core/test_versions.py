"""Versions are ordered, and ranges cover them, as Python's packaging rules say."""

import itertools

import pytest

from lmcache.core.versions import VersionRange
from lmcache.errors import ConfigError

ORDERED = [
    "0.1.dev7",
    "0.32.0.dev3",
    "0.32.0a1",
    "0.32.0b2",
    "0.32.0rc1",
    "0.32.0rc6.post1",
    "0.32.0rc10",
    "0.32.0",
    "0.32.0.post1.dev2",
    "0.32.0.post1",
    "0.32.1",
    "0.33",
    "1.0",
    "1.10.2",
]


def test_versions_lie_in_their_order() -> None:
    for lower, higher in itertools.combinations(ORDERED, 2):
        assert VersionRange.parse(f">{lower}").covers(higher), (lower, higher)
        assert VersionRange.parse(f"<={higher}").covers(lower), (lower, higher)
        assert not VersionRange.parse(f">={higher}").covers(lower), (lower, higher)


def test_versions_are_ordered_as_packaging_orders_them() -> None:
    version = pytest.importorskip("packaging.version", reason="packaging comes with pytest").Version
    assert sorted(ORDERED, key=version) == ORDERED


@pytest.mark.parametrize(
    "version", ["0.32", "0.32.0", "0.32.0+cpu", "0.32.7", "0.32.1rc1", "v0.32.0", "0.32.0.post1", "0.32.0+g1a2b.d2026"]
)
def test_a_range_covers_what_lies_in_it(version: str) -> None:
    assert VersionRange.parse(">=0.32,<0.33").covers(version)


@pytest.mark.parametrize(
    "version",
    ["0.31.9", "0.33", "0.33.0rc1", "0.33.0.dev2", "0.32.0rc2", "0.1.dev1+g1a2b3c", "1.32.0", "main", "", "0.32.x"],
)
def test_a_range_does_not_cover_what_lies_outside_or_is_no_version(version: str) -> None:
    assert not VersionRange.parse(">=0.32,<0.33").covers(version)


def test_single_versions_can_be_named_and_left_out() -> None:
    assert VersionRange.parse("==1.2.0rc6").covers("1.2.0rc6+cu13")
    assert not VersionRange.parse("==1.2.0rc6").covers("1.2.0")
    assert VersionRange.parse(" >=1 , !=1.1 ").covers("1.1.1")
    assert not VersionRange.parse(">=1,!=1.1").covers("1.1.0")
    assert VersionRange.parse("<1.0rc2").covers("1.0rc1")


def test_the_empty_range_covers_everything() -> None:
    assert VersionRange.parse("").covers("whatever this is")


@pytest.mark.parametrize("text", ["0.32", "~=0.32", ">=", ">=0.32 <0.33", "newest", ">=zero"])
def test_what_is_no_range_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        VersionRange.parse(text)
    assert str(refused.value) == f"{text!r} is no range of versions; write clauses like >=0.32,<0.33"
