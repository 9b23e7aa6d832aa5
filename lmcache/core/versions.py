"""Versions of engines, as their packages give them, and ranges of versions: the part of PEP 440 that adapters need.

Written out here, for a server must not need one more package only to print a table.
"""

import re
from typing import TypeAlias

import attrs

from lmcache.errors import ConfigError

_VERSION = re.compile(
    r"v?(?:\d+!)?(?P<release>\d+(?:\.\d+)*)"
    r"(?:[-_.]?(?P<stage>a|b|c|rc|alpha|beta|pre|preview)[-_.]?(?P<pre>\d*))?"
    r"(?:[-_.]?(?:post|rev|r)[-_.]?(?P<post>\d*)|-(?P<build>\d+))?"
    r"(?P<dev>[-_.]?dev[-_.]?(?P<nightly>\d*))?"
    r"(?:\+[a-z0-9._-]*)?",
    re.IGNORECASE,
)
_STAGES = {"a": 0, "alpha": 0, "b": 1, "beta": 1, "c": 2, "rc": 2, "pre": 2, "preview": 2}
_RELEASED = 3
_NIGHTLY = -1
_NO_NIGHTLY = 1 << 62

_CLAUSE = re.compile(r"(>=|<=|==|!=|>|<)\s*(\S+)")
_Key: TypeAlias = tuple[tuple[int, ...], int, int, int, int]


def _key(version: str) -> _Key | None:
    """What versions are ordered by: the release, then how finished it is. None for what is no version."""
    match = _VERSION.fullmatch(version.strip())
    if match is None:
        return None
    release = tuple(map(int, match["release"].split(".")))
    while release and not release[-1]:  # 1.0 is 1
        release = release[:-1]
    post = match["post"] if match["post"] is not None else match["build"]
    if match["stage"]:
        stage = _STAGES[match["stage"].lower()]
    else:
        # a nightly of 1.0 comes before its first alpha; one of 1.0.post1 does not
        stage = _NIGHTLY if match["dev"] and post is None else _RELEASED
    nightly = int(match["nightly"] or 0) if match["dev"] else _NO_NIGHTLY
    return release, stage, int(match["pre"] or 0), -1 if post is None else int(post or 0), nightly


@attrs.frozen
class VersionRange:
    """A range such as `>=0.32,<0.33`: every clause must hold. The empty range covers whatever there is."""

    text: str
    """As it was written."""
    _clauses: tuple[tuple[str, _Key], ...] = attrs.field(repr=False)

    @classmethod
    def parse(cls, text: str) -> "VersionRange":
        """Read clauses of `>=`, `<=`, `>`, `<`, `==` or `!=` and a version, with commas between. Raises ConfigError."""
        clauses = []
        for clause in filter(None, map(str.strip, text.split(","))):
            match = _CLAUSE.fullmatch(clause)
            key = _key(match[2]) if match else None
            if match is None or key is None:
                raise ConfigError(f"{text!r} is no range of versions", remedy="write clauses like >=0.32,<0.33")
            clauses.append((match[1], key))
        return cls(text, tuple(clauses))

    def covers(self, version: str) -> bool:
        """Whether `version` lies in the range. What is no version lies in no range but the empty one."""
        if not self._clauses:
            return True
        key = _key(version)
        return key is not None and all(_holds(key, operator, bound) for operator, bound in self._clauses)


def _holds(key: _Key, operator: str, bound: _Key) -> bool:
    if operator == "<" and bound[1] == _RELEASED and key[0] == bound[0]:
        return False  # 1.0rc1 comes before 1.0, and yet is not what anybody means by <1.0
    compared = (key > bound) - (key < bound)
    return compared in {">=": (0, 1), "<=": (-1, 0), "==": (0,), "!=": (-1, 1), ">": (1,), "<": (-1,)}[operator]
