"""Trace files: public ones, one request a line, and recordings of our server (`core/recording.py` has their format).

Whatever is wrong with a file is a TraceError that names the file, the line and the fault.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from lmcache.core.hints import NO_HINTS, Hints, Priority
from lmcache.core.keys import HASH_BYTES, ChainHash, NamespaceDigest
from lmcache.core.recording import FORMAT
from lmcache.errors import ConfigError, GeometryError
from lmcache.geometry.chunking import check_chunk_size
from lmcache.geometry.groups import Geometry
from lmcache.simulator.trace import Event, Recorded, Trace, TraceNamespace, plain_geometry

T = TypeVar("T")

Size = Annotated[int, msgspec.Meta(ge=1)]
Length = Annotated[int, msgspec.Meta(ge=0)]

CHUNK_TOKENS = 512
"""Tokens that one id of a public trace stands for, unless the user says otherwise."""


class TraceError(ConfigError):
    """A file that cannot be replayed."""


class _Kind(msgspec.Struct):
    event: str = ""


class _Request(msgspec.Struct):
    """A line of a public trace."""

    input_length: Length
    hash_ids: list[int]


class _Recording(msgspec.Struct):
    format: int
    recording: str
    part: int
    policy: str
    cells: Size
    cell_bytes: Size


class _Namespace(msgspec.Struct):
    namespace: int
    digest: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2})*$")]
    chunk_size: Size
    geometry: Geometry


class _Said(msgspec.Struct, kw_only=True):
    """When something was asked, and what the request said of its chunks, in a recording."""

    timestamp: float = 0.0
    ttl_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    priority: Literal["low", "normal", "high"] | None = None
    session_end: bool = False

    @property
    def hints(self) -> Hints:
        if self.ttl_s is None and self.priority is None and not self.session_end:
            return NO_HINTS
        return Hints(self.ttl_s, Priority[self.priority.upper()] if self.priority else None, self.session_end)


class _Lookup(_Said, kw_only=True):
    namespace: int
    tenant: str
    input_length: int
    hit_length: int
    hash_ids: list[int]


class _Store(_Said, kw_only=True):
    namespace: int
    tenant: str
    parent: int | None
    groups: list[int]
    hash_ids: list[int]


def read_trace(path: Path, chunk_size: int = CHUNK_TOKENS, bytes_per_token: int = 0) -> Trace:
    """Read a trace; of a recording that goes on from FILE.1, that part, too, and first.

    `chunk_size` (tokens an id stands for) and `bytes_per_token` (0: unknown) are for public traces: a recording says
    both itself. Raises TraceError.
    """
    if path.is_dir():
        raise TraceError(f"{path} is a folder", remedy="name a trace in it, a file with a JSON object a line")
    reader = _Reader(path, chunk_size, bytes_per_token)
    for part in _parts(path):
        for number, line in enumerate(_lines(part), 1):
            if line.strip():
                reader.read(_Place(part, number), line)
    return reader.finished()


def _parts(path: Path) -> Iterator[Path]:
    """The files that make up the recording of which `path` is the last part; `path` alone if it is none."""
    before = path.with_name(f"{path.name}.1")
    head, earlier = _head(path), _head(before)
    if head and earlier and (head.recording, head.part) == (earlier.recording, earlier.part + 1):
        yield before
    yield path


def _head(path: Path) -> _Recording | None:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.readline(), type=_Recording)
    except (OSError, msgspec.MsgspecError):
        return None


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise TraceError(
            f"{path} cannot be read: {error.strerror}", remedy="name a trace, or a recording of lmcache server --record"
        ) from error


class _Place:
    """A line of a file, for messages."""

    __slots__ = ("_number", "_path")

    def __init__(self, path: Path, number: int) -> None:
        self._path, self._number = path, number

    def error(self, fault: str, remedy: str = "repair or delete the line") -> TraceError:
        return TraceError(f"{self._path}, line {self._number}: {fault}", remedy=remedy)

    def decoded(self, line: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(line, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            fault = str(error).replace("Object missing required field", "there is no field")
            raise self.error(fault) from error


class _Reader:
    """Takes in lines; what they mean depends on those before."""

    def __init__(self, path: Path, chunk_size: int, bytes_per_token: int) -> None:
        self._path = path
        self._chunk_size = chunk_size
        self._sized = bytes_per_token > 0
        self._cell_bytes = chunk_size * max(1, bytes_per_token)
        self._events: list[Event] = []
        self._hashes: dict[int, ChainHash] = {}
        self._namespaces: dict[NamespaceDigest, int] = {}
        self._known: list[tuple[NamespaceDigest, Geometry, int]] = []
        self._parents: list[dict[ChainHash, ChainHash | None]] = []
        self._numbers: dict[int, int] = {}
        """What the part that is being read calls the namespaces."""
        self._head: _Recording | None = None
        self._hit = self._asked = 0

    def read(self, place: _Place, line: bytes) -> None:
        match place.decoded(line, _Kind).event:
            case "":
                self._request(place, place.decoded(line, _Request))
            case "lookup":
                self._lookup(place, place.decoded(line, _Lookup))
            case "store":
                self._store(place, place.decoded(line, _Store))
            case "namespace":
                self._namespace(place, place.decoded(line, _Namespace))
            case "recording":
                self._begin(place, place.decoded(line, _Recording))
            case other:
                raise place.error(f"an event {other!r} is none that this lmcache knows")

    def finished(self) -> Trace:
        if not any(event.limit >= 0 for event in self._events):
            raise TraceError(
                f"{self._path} has no request in it",
                remedy="a server that records writes one down when an engine asks it; a public trace has a JSON object "
                "a line, each with input_length and hash_ids",
            )
        spaces = [TraceNamespace(*known, parents) for known, parents in zip(self._known, self._parents, strict=True)]
        recorded = None
        if self._head:
            size = self._head.cells * self._head.cell_bytes
            recorded = Recorded(self._head.policy, size, self._hit, self._asked)
        sized = self._sized or recorded is not None
        return Trace(str(self._path), self._events, spaces, self._cell_bytes, sized, recorded)

    # ------------------------------------------------------------------------------------------------- public traces

    def _request(self, place: _Place, line: _Request) -> None:
        if self._head:
            raise place.error("a request of another trace within a recording", "keep them in files of their own")
        whole, rest = divmod(line.input_length, self._chunk_size)
        if len(line.hash_ids) - whole not in {0, 1 if rest else 0}:
            raise place.error(
                f"{len(line.hash_ids)} hash_ids for {line.input_length} tokens, which are {whole + bool(rest)} chunks "
                f"of {self._chunk_size}",
                "say with --chunk-size how many tokens an id stands for",
            )
        space = self._space(NamespaceDigest(b""), plain_geometry(self._chunk_size, self._cell_bytes), self._chunk_size)
        hashes = self._chain(place, space, line.hash_ids, None)
        # the tail of a prompt has an id, too, in public traces: it counts as a chunk
        self._events.append(Event(space, "", hashes, len(hashes) * self._chunk_size, (0,)))

    # ---------------------------------------------------------------------------------------------------- recordings

    def _begin(self, place: _Place, line: _Recording) -> None:
        if line.format != FORMAT:
            raise place.error(
                f"a recording of format {line.format}; this lmcache reads {FORMAT}", "use the lmcache that wrote it"
            )
        if self._events and not self._head:
            raise place.error("a recording within another trace", "keep them in files of their own")
        self._head, self._cell_bytes = line, line.cell_bytes
        self._numbers.clear()

    def _namespace(self, place: _Place, line: _Namespace) -> None:
        try:
            check_chunk_size(line.geometry, line.chunk_size)
        except GeometryError as error:
            raise place.error(error.args[0]) from error
        digest = NamespaceDigest(bytes.fromhex(line.digest))
        self._numbers[line.namespace] = self._space(digest, line.geometry, line.chunk_size)

    def _lookup(self, place: _Place, line: _Lookup) -> None:
        space = self._numbered(place, line.namespace)
        hashes = self._chain(place, space, line.hash_ids, None)
        self._hit += line.hit_length
        self._asked += len(hashes) * self._known[space][2]
        limit = max(0, line.input_length - 1)
        self._events.append(Event(space, line.tenant, hashes, limit, hints=line.hints, at=line.timestamp / 1000))

    def _store(self, place: _Place, line: _Store) -> None:
        space = self._numbered(place, line.namespace)
        groups = self._known[space][1].groups
        if not line.groups or not all(0 <= group < len(groups) and groups[group].cached for group in line.groups):
            raise place.error(f"groups {line.groups} are not among the cached ones of namespace {line.namespace}")
        parent = None if line.parent is None else self._hash(place, line.parent)
        hashes = self._chain(place, space, line.hash_ids, parent)
        self._events.append(
            Event(
                *(space, line.tenant, hashes),
                groups=tuple(line.groups),
                parent=parent,
                hints=line.hints,
                at=line.timestamp / 1000,
            )
        )

    def _numbered(self, place: _Place, number: int) -> int:
        if self._head is None or number not in self._numbers:
            raise place.error(f"namespace {number} has not been described", "name the recording from its beginning")
        return self._numbers[number]

    # ------------------------------------------------------------------------------------------------------- of both

    def _space(self, digest: NamespaceDigest, geometry: Geometry, chunk_size: int) -> int:
        if digest not in self._namespaces:
            self._namespaces[digest] = len(self._known)
            self._known.append((digest, geometry, chunk_size))
            self._parents.append({})
        return self._namespaces[digest]

    def _chain(self, place: _Place, space: int, ids: Sequence[int], parent: ChainHash | None) -> list[ChainHash]:
        """Hashes of a run of chunks; TraceError if an id stands for different prompts in different lines.

        In a recording, where ids are hashes, that is chance: one chunk in a hundred thousand recordings.
        """
        parents = self._parents[space]
        hashes = []
        for number in ids:
            chunk = self._hash(place, number)
            if parents.setdefault(chunk, parent) != parent and not self._head:
                raise place.error(
                    f"id {number} follows another chunk here than before",
                    "give each prefix an id of its own: an id stands for a chunk and all chunks before it",
                )
            hashes.append(chunk)
            parent = chunk
        return hashes

    def _hash(self, place: _Place, number: int) -> ChainHash:
        known = self._hashes.get(number)
        if known is None:
            if number < 0:
                raise place.error(f"id {number} is negative")
            known = self._hashes[number] = ChainHash(number.to_bytes(HASH_BYTES, "little"))
        return known
