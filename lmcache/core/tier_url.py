"""The URL after `--l2`: where a tier is, how it is used, and what no URL may hold.

    SCHEME://[HOST[:PORT]][/PATH][?OPTION=VALUE&…]

Names of options are the tier's own, its codec's, or one of `COMMON`. A secret is never written in the URL: `NAME_env`
names a variable of the environment that holds it, `NAME_file` a file. Messages name options, never values of secrets.
"""

import enum
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import unquote

import attrs

from lmcache.core.tier import DEFAULT_THREADS, TierLocation
from lmcache.errors import ConfigError

COMMON: Mapping[str, str] = {
    "codec": "how blobs are written: the name of a codec, or several joined by +",
    "store": "when blobs are stored: write-through (as soon as they are in L1), on-evict (when they leave it) or never",
    "threads": "calls that may be in progress at once; 4, of a disk 8, unless said otherwise",
    "timeout_s": "seconds that one call may take; 5 unless said otherwise",
}
"""Options that every tier has: name → a sentence."""

MOST_THREADS = 64

_AUTHORITY = re.compile(r"(?P<host>\[[^][]*\]|[^:\[\]]*)(?::(?P<port>\d+))?")

SECRETS_STAY_OUT = (
    "leave both out: secrets come from the environment or from a file, options NAME_env and NAME_file of the tier"
)
"""What to do about a user or a password in an address."""


class StorePolicy(enum.StrEnum):
    """When a blob goes to a tier."""

    WRITE_THROUGH = "write-through"
    """As soon as it is in L1."""
    ON_EVICT = "on-evict"
    """When it leaves L1."""
    NEVER = "never"
    """It is only read."""


@attrs.frozen
class TierSettings:
    """How a server uses a tier, whatever kind of tier it is."""

    location: TierLocation
    store_policy: StorePolicy = StorePolicy.WRITE_THROUGH
    threads: int = DEFAULT_THREADS
    """Calls that may be in progress at once."""
    timeout_s: float = 5.0
    """Seconds that one call may take."""
    codec: str = ""
    """As the user wrote it; empty for blobs that are stored as they are."""


@attrs.frozen
class TierURL:
    """A URL in its parts, before it is known whose options it has."""

    scheme: str
    """In lower case."""
    host: str
    """As written. With its ports where it lists several hosts."""
    port: int | None
    path: str
    query: Mapping[str, str] = attrs.field(repr=False)

    @classmethod
    def parse(cls, text: str) -> "TierURL":
        """Take `text` apart; ConfigError for what is no such URL, or has a user or a password in it."""
        scheme, found, rest = text.partition("://")
        if not found or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
            shown = text.partition("@")[0].partition("?")[0] if "@" not in text else "an address with an @"
            raise ConfigError(f"--l2 {shown} is no URL of a tier", remedy="write it like disk:///path?size_gb=100")
        scheme = scheme.lower()
        where, _, query = rest.partition("?")
        authority, slash, path = where.partition("/")
        if "@" in authority:
            raise ConfigError(
                f"--l2 {scheme}:// has a user or a password before its host",
                remedy=SECRETS_STAY_OUT,
            )
        if "#" in rest:
            raise ConfigError(f"--l2 {scheme}:// has a '#' in it", remedy="write %23 where you mean one")
        host, port = _host_and_port(scheme, authority)
        return cls(scheme, host, port, unquote(slash + path), _query(scheme, query))

    def settle(
        self,
        options: Mapping[str, str],
        secrets: Mapping[str, str],
        codec_options: Mapping[str, str],
        threads: int = DEFAULT_THREADS,
    ) -> tuple[TierSettings, dict[str, str]]:
        """What the URL says for a tier with these options, secrets and threads, and what is for its codec.

        Raises ConfigError for an option that nobody knows, a value that cannot be honoured, and secrets in the URL.
        """
        known = {*COMMON, *options, *codec_options, *(f"{name}_{how}" for name in secrets for how in ("env", "file"))}
        for name in self.query:
            if name in secrets:
                raise ConfigError(
                    f"--l2 {self.scheme}:// has the secret {name!r} in it, where others can read it",
                    remedy=f"write {name}_env=VARIABLE or {name}_file=PATH",
                )
            if name not in known:
                raise ConfigError(
                    f"--l2 {self.scheme}:// has no option {name!r}",
                    remedy=f"the options are {', '.join(sorted(known))}",
                )
        location = TierLocation(
            self.scheme,
            self.host,
            self.port,
            self.path,
            _picked(self.query, options),
            {name: value for name in secrets if (value := self._secret(name)) is not None},
        )
        settings = TierSettings(
            location,
            self._store_policy(),
            self._threads(threads),
            self._timeout(),
            self.query.get("codec", ""),
        )
        return settings, _picked(self.query, codec_options)

    def _store_policy(self) -> StorePolicy:
        text = self.query.get("store", StorePolicy.WRITE_THROUGH.value)
        try:
            return StorePolicy(text.lower())
        except ValueError:
            raise ConfigError(
                f"--l2 {self.scheme}:// has store={text}", remedy=f"use {', '.join(StorePolicy)}"
            ) from None

    def _threads(self, usual: int) -> int:
        text = self.query.get("threads", str(usual))
        if not re.fullmatch(r"\d{1,4}", text) or not 1 <= int(text) <= MOST_THREADS:
            raise ConfigError(
                f"--l2 {self.scheme}:// has threads={text}", remedy=f"use a number from 1 to {MOST_THREADS}"
            )
        return int(text)

    def _timeout(self) -> float:
        return positive_number(self.scheme, "timeout_s", self.query.get("timeout_s", "5"))

    def _secret(self, name: str) -> str | None:
        variable, file = self.query.get(f"{name}_env"), self.query.get(f"{name}_file")
        if variable is not None and file is not None:
            raise ConfigError(
                f"--l2 {self.scheme}:// has both {name}_env and {name}_file", remedy="drop one of the two"
            )
        if variable is not None:
            if variable not in os.environ:
                raise ConfigError(
                    f"--l2 {self.scheme}:// takes {name} from the variable {variable}, which is not set",
                    remedy="set it in the environment of the server",
                )
            return os.environ[variable]
        if file is None:
            return None
        try:
            return Path(file).read_text().rstrip("\r\n")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--l2 {self.scheme}:// takes {name} from {file}, which cannot be read: {error}",
                remedy="name a text file that the server may read",
            ) from error


def positive_number(scheme: str, name: str, text: str) -> float:
    """The value of a tier's option that must be a positive number; ConfigError if it is none."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise ConfigError(f"--l2 {scheme}:// has {name}={text}", remedy="use a positive number")
    return number


def choice(scheme: str, name: str, text: str, allowed: Iterable[str]) -> str:
    """The value of a tier's option that must be one of `allowed`, case ignored; ConfigError if it is none."""
    if text.lower() not in allowed:
        raise ConfigError(f"--l2 {scheme}:// has {name}={text}", remedy=f"use {' or '.join(allowed)}")
    return text.lower()


def _picked(query: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    return {name: query[name] for name in names if name in query}


def _host_and_port(scheme: str, authority: str) -> tuple[str, int | None]:
    if "," in authority:  # several hosts, for a tier that knows what to do with them
        return unquote(authority), None
    match = _AUTHORITY.fullmatch(authority)
    if not match or (match["port"] and not 1 <= int(match["port"]) <= 65535):
        raise ConfigError(
            f"--l2 {scheme}://{authority} has no such host and port",
            remedy="write HOST or HOST:PORT, with brackets around an IPv6 address",
        )
    return unquote(match["host"].strip("[]")), int(match["port"]) if match["port"] else None


def _query(scheme: str, text: str) -> dict[str, str]:
    """Options by name. A plus sign is a plus sign: names of codecs and paths may have one."""
    query: dict[str, str] = {}
    for part in filter(None, text.split("&")):
        name, equals, value = part.partition("=")
        name = unquote(name)
        if not equals:
            raise ConfigError(f"--l2 {scheme}:// has the option {name!r} without a value", remedy=f"write {name}=VALUE")
        if name in query:
            raise ConfigError(f"--l2 {scheme}:// has the option {name!r} twice", remedy="drop one of the two")
        query[name] = unquote(value)
    return query
