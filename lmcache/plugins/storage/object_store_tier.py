"""What tiers on object stores have in common: a blob is an object, every call ends at its deadline."""

import abc
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from lmcache.core.tier import KEY_DIGITS, Buffer, StorageTier, TierLocation
from lmcache.core.tier_url import choice
from lmcache.errors import ConfigError, TierError

COPY_BYTES = 1 << 20
"""So much is copied at a time, so that no copy holds the interpreter's lock for long."""
LIST_COUNT = 1000
MOST_CONNECTIONS = 1000

_ON_OFF = ("on", "off")
OPTIONS = {"connections": "requests that may be in progress at once; 32 unless said otherwise"}

MESSAGE_CHARACTERS = 400
"""More of what a server says would not help."""


class ObjectStoreTier(StorageTier):
    """What the tiers on object stores have in common. Derived classes make the store."""

    options: ClassVar[Mapping[str, str]] = OPTIONS

    def __init__(self, location: TierLocation) -> None:
        """Read the settings; connects to nothing."""
        self.location = location
        connections = self.whole_number("connections", 32, least=1)
        self._folder = self.path_in_store()
        self._store = self.make_store()
        # here, for it brings asyncio, a twentieth of the start of a server that has no such tier
        from lmcache.plugins.storage.object_store_calls import Calls

        self._calls = Calls(str(location), connections)

    def store(self, key: str, parts: Sequence[Buffer], deadline: float) -> None:
        """One request, with a copy of the buffers: it may outlast the deadline, the buffers must not have to."""
        import obstore

        blob = b"".join(parts)
        try:
            self._calls.run(
                lambda: obstore.put_async(self._store, self._name(key), blob, use_multipart=False), deadline
            )
        except Exception as error:
            raise self._trouble(error) from error

    def load(self, key: str, into: Sequence[memoryview], deadline: float) -> int:
        """One request, and a copy from what it received; a second request if the blob is longer than the buffers."""
        room = sum(view.nbytes for view in into)
        try:
            size, received = self._calls.run(partial(self._fetch, self._name(key), room), deadline)
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise self._trouble(error) from error
            return 0
        except Exception as error:
            raise self._trouble(error) from error
        if len(received) < min(size, room):
            raise TierError(f"{self.location} sent {len(received)} bytes of a blob of {size}")
        _pour(received, into)
        return size

    def contains(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """A request for each key, many at once; False where no answer came, unless none came at all."""
        answers = self._calls.run_all([partial(self._size, self._name(key)) for key in keys], deadline)
        failures = [each for each in answers if isinstance(each, BaseException)]
        if failures and len(failures) == len(answers):
            raise self._trouble(failures[0]) from failures[0]
        return [isinstance(answer, int) and answer > 0 for answer in answers]

    def delete(self, keys: Sequence[str], deadline: float) -> None:
        """A request for each key, many at once."""
        for answer in self._calls.run_all([partial(self._remove, self._name(key)) for key in keys], deadline):
            if isinstance(answer, BaseException):
                raise self._trouble(answer) from answer

    def keys(self) -> Iterator[tuple[str, int]]:
        """List everything under the URL's path, a request for every thousand objects."""
        import obstore

        pages = obstore.list(self._store, self._folder or None, chunk_size=LIST_COUNT)
        while True:
            try:
                page = next(pages, None)
            except Exception as error:
                raise self._trouble(error) from error
            if page is None:
                return
            for entry in page:
                key = entry["path"].rpartition("/")[2]
                if re.fullmatch(rf"[0-9a-f]{{{KEY_DIGITS}}}", key) and entry["path"] == self._name(key):
                    yield key, entry["size"]

    def close(self) -> None:
        """Give up requests that are still in progress, and the connections."""
        self._calls.close()
        self._store = None  # which holds the connections

    @abc.abstractmethod
    def make_store(self) -> Any:
        """The store of obstore; ConfigError for settings that cannot be honoured. Connects to nothing."""

    def path_in_store(self) -> str:
        return self.location.path.strip("/")

    def _name(self, key: str) -> str:
        """Where a blob is: in one of 256 folders, which file systems are glad of."""
        return f"{self._folder}/{key[:2]}/{key}".lstrip("/")

    async def _fetch(self, name: str, room: int) -> tuple[int, memoryview]:
        """An object's length, and as much of it as there is room for."""
        import obstore

        result = await obstore.get_async(self._store, name)
        size: int = result.meta["size"]
        if size <= room:
            return size, memoryview(await result.bytes_async())
        if not room:
            return size, memoryview(b"")
        return size, memoryview(await obstore.get_range_async(self._store, name, start=0, end=room))

    async def _size(self, name: str) -> int:
        import obstore

        try:
            head = await obstore.head_async(self._store, name)
        except FileNotFoundError:
            return 0
        return int(head["size"])

    async def _remove(self, name: str) -> None:
        import obstore

        try:
            await obstore.delete_async(self._store, name)
        except FileNotFoundError:
            return

    def _trouble(self, error: BaseException) -> TierError:
        from obstore import exceptions

        if isinstance(error, TierError):
            return error
        told = f"{self.location}: {in_short(error)}"
        if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
            return TierError(told, remedy=f"check the credentials and what they permit: {self._where_credentials()}")
        if isinstance(error, FileNotFoundError):
            return TierError(told, remedy="create the bucket first, or correct its name")
        return TierError(told)

    def _where_credentials(self) -> str:
        return " or ".join(f"{name}_env, {name}_file" for name in self.secrets) or "the owner of the folder"

    def is_on(self, name: str) -> bool:
        return choice(self.location.scheme, name, self.location.options.get(name, "off"), _ON_OFF) == "on"

    def whole_number(self, name: str, default: int, least: int) -> int:
        text = self.location.options.get(name, str(default))
        if re.fullmatch(r"\d{1,4}", text) and least <= int(text) <= MOST_CONNECTIONS:
            return int(text)
        raise ConfigError(
            f"--l2 {self.location.scheme}:// has {name}={text}",
            remedy=f"use a number from {least} to {MOST_CONNECTIONS}",
        )


def _pour(blob: memoryview, into: Sequence[memoryview]) -> None:
    """Copy into the buffers, in pieces: a copy holds the interpreter's lock."""
    at = 0
    for part in into:
        view = part.cast("B")
        for start in range(0, min(len(view), len(blob) - at), COPY_BYTES):
            piece = blob[at : at + min(COPY_BYTES, len(view) - start)]
            view[start : start + len(piece)] = piece
            at += len(piece)


def _code_and_message(body: re.Match[str]) -> str:
    found = re.search(r"<Code>([^<]*)</Code>", body[0]), re.search(r"<Message>([^<]*)</Message>", body[0])
    return ": ".join(part[1] for part in found if part)


def in_short(error: BaseException) -> str:
    """An error of obstore on one line, without what only its developers need, and without what may be a secret."""
    text = str(error).partition("\n\nDebug source")[0]
    # of a server's own words the two that say what is wrong: others repeat tokens and keys of the request
    text = re.sub(r"(<\?xml[^>]*>\s*)?<Error>.*", _code_and_message, text, flags=re.DOTALL)
    text = re.sub(r"(?<=://)[^\s/?]*@", "", text)
    text = re.sub(r"\?[^\s\"'<>)]*", "", text)  # signatures of Azure travel in the query
    text = " ".join(text.split()) or type(error).__name__
    return text if len(text) <= MESSAGE_CHARACTERS else text[:MESSAGE_CHARACTERS] + "…"
