"""What tells the weights in a folder from any others: a digest of their headers and of samples of every tensor.

For any engine; needs no framework. The digest says nothing of paths and times, so copies of weights have the same one.
"""

import fcntl
import fnmatch
import hashlib
import json
import logging
import os
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from lmcache.engines.unchanged import Beginning, Sight, changed_since, look

log = logging.getLogger(__name__)

FORMAT = b"lmcache weights 2"

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
BESIDE_MODEL = ("*.index.json", "*.py")
"""What decides, besides its configuration, how a model's weights are read. Hashed as a whole."""
BESIDE_LORA = ("*.json",)
"""The configuration of a LoRA holds its rank and scale. Hashed as a whole."""

SAMPLE_BYTES = 256
"""Read from the beginning, the middle and the end of a tensor: any training step changes nearly all of its bytes."""
SPACING = 1 << 20
"""Most bytes from sample to sample in a file of another format than safetensors; there are 64 samples at least."""
WHOLE_BYTES = 1 << 16
"""Weights files up to this size are hashed as a whole."""
HEADER_LIMIT = 100_000_000
"""Bytes of the longest header that the safetensors format allows."""
PIECE_BYTES = 1 << 20

KEPT_DIGESTS = 100
"""Folders whose digests are remembered."""
YOUNG_NS = 10_000_000_000
"""A file that changed less than this before it was read may change again and keep its times: not remembered."""

_SIZE = struct.Struct("<Q")


@attrs.frozen
class Weights:
    """Weights that are certainly those that a process has read, or will read while `sight` holds."""

    digest: str
    sight: Sight


@attrs.frozen
class Uncertain:
    """Nobody can tell which weights a process has read, and why."""

    reason: str


def certain_weights(
    folder: str,
    beside: Sequence[str],
    beginning: Beginning,
    *,
    places: bool = True,
    remembered: "Digests | None" = None,
) -> Weights | Uncertain:
    """Digest the weights in `folder`, if they have been the same since `beginning`. Raises nothing.

    `beside` are patterns of files that are hashed as a whole; `places` is `changed_since`'s; `remembered` is where
    digests are looked up and kept.
    """
    try:
        sight = look(folder, (*WEIGHTS, *beside))
        reason = changed_since(sight, beginning, places=places)
        if not reason and not any(_is_weights(name) for name, _ in sight.files):
            reason = f"there are no weights in {folder}"
        if not reason:
            digest = digest_of(sight, remembered or Digests())
            # read between two looks that saw the same, and the first saw that nothing is as young as this process:
            # so a change while it was read has another ctime, and the digest is of what was there all the time
            if sight.holds():
                return Weights(digest, sight)
            reason = "it changed while it was read"
    except (OSError, ValueError) as error:  # no path at all, as one with a zero byte, is a ValueError
        reason = str(error)
    return Uncertain(reason)


def folder_identity(folder: str, beside: Sequence[str], beginning: Beginning) -> tuple[str, str]:
    """What namespaces know the weights in `folder` by; where nothing is certain, empty, and why.

    As `certain_weights`, for an engine that has read them since its process began: had they changed since then, the
    files would say nothing of it.
    """
    found = certain_weights(folder, beside, beginning, places=False)
    if isinstance(found, Weights):
        return f"files {found.digest}", ""
    return "", f"they may not be what the files hold by now: {found.reason}"


def digest_of(sight: Sight, remembered: "Digests") -> str:
    """Digest of all files that were seen. Raises OSError."""
    known = remembered.get(sight)
    if known:
        return known
    began_ns = time.time_ns()
    state = hashlib.sha256(FORMAT)
    for name, entry in sight.files:
        _add(state, os.fsencode(name))
        _add(state, _SIZE.pack(entry.size))
        with Path(entry.path).open("rb", buffering=0) as stream:
            for part in _parts(stream.fileno(), name, entry.size):
                _add(state, part)
    digest = state.hexdigest()[:32]
    if all(entry.ctime_ns < began_ns - YOUNG_NS for _, entry in sight.files):
        remembered.put(sight, digest)
    return digest


def _add(state: Any, part: bytes) -> None:
    state.update(_SIZE.pack(len(part)))
    state.update(part)


# ------------------------------------------------------------------------------------------------------- what is read


def _is_weights(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in WEIGHTS)


def _parts(file: int, name: str, size: int) -> Iterator[bytes]:
    """What of a file goes into the digest: all of a small one, samples of one that holds weights."""
    if not _is_weights(name) or size <= WHOLE_BYTES:
        yield from (os.pread(file, PIECE_BYTES, start) for start in range(0, size, PIECE_BYTES))
        return
    header, tensors = _read_header(file, size) if name.endswith(".safetensors") else (b"", [])
    yield header
    # without a header that makes sense it is sampled as any other format
    number = 3 if tensors else max(size // SPACING + 2, 64)
    for start, stop in tensors or [(0, size)]:
        yield from (os.pread(file, SAMPLE_BYTES, at) for at in _places(start, stop, number))


def _read_header(file: int, size: int) -> tuple[bytes, list[tuple[int, int]]]:
    """The header of a safetensors file and where its tensors lie, in order; both empty when it is malformed."""
    (length,) = _SIZE.unpack(os.pread(file, _SIZE.size, 0))
    first = _SIZE.size + length
    if length > min(HEADER_LIMIT, size - _SIZE.size):
        return b"", []
    header = os.pread(file, length, _SIZE.size)
    try:
        tensors = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
        spans = sorted((first + int(start), first + int(stop)) for start, stop in tensors)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return b"", []
    inside = all(first <= start <= stop <= size for start, stop in spans)
    return (header, spans) if inside else (b"", [])


def _places(start: int, stop: int, number: int) -> Iterable[int]:
    """`number` places where a sample fits: the first, the last, and evenly between them."""
    last = max(stop - start - SAMPLE_BYTES, 0)
    return sorted({start + step * last // (number - 1) for step in range(number)})


# --------------------------------------------------------------------------------------------------- what is remembered


class Digests:
    """Digests that were computed before, on disk, by what the files were then: reading them all takes a while.

    A help and nothing more: what cannot be read or is damaged is computed, what cannot be written is not kept.
    """

    def __init__(self, file: Path | None = None) -> None:
        """Kept in `file`, else below `$XDG_CACHE_HOME`, else below `~/.cache`."""
        self._file = file or _default_file()

    def get(self, sight: Sight) -> str:
        """The digest of files that are still what they were when it was computed; empty if there is none."""
        files = _identity(sight)
        return next((known.digest for known in self._read() if known.files == files), "")

    def put(self, sight: Sight, digest: str) -> None:
        """Remember it, if that is possible. Any number of processes may do so at once."""
        files = _identity(sight)
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._file.with_suffix(".lock").open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # under the lock, so that no two write the new file at once. Its name is fixed, so that what a killed
                # process left of it is overwritten by the next
                known = [known for known in self._read() if known.files != files][1 - KEPT_DIGESTS :]
                new = self._file.with_suffix(".new")
                new.write_text(json.dumps([attrs.asdict(each) for each in (*known, _known(files, digest))], indent=1))
                new.replace(self._file)
        except OSError as error:
            log.debug("lmcache: the digest of the weights in %s is not kept: %s", sight.given, error)

    def _read(self) -> "list[_Known]":
        try:
            found = [_Known(**each) for each in json.loads(self._file.read_bytes())]
        except (OSError, ValueError, TypeError, RecursionError):
            return []
        return [known for known in found if known == _known(known.files, known.digest)]


@attrs.frozen
class _Known:
    files: str
    digest: str
    check: str
    """Of the other two: a damaged line is no line."""


def _known(files: str, digest: str) -> _Known:
    return _Known(files, digest, hashlib.sha256(f"{files} {digest}".encode("utf-8", "replace")).hexdigest()[:32])


def _identity(sight: Sight) -> str:
    """What files these are, and of which moment."""
    state = hashlib.sha256(FORMAT)
    for name, entry in sight.files:
        _add(state, os.fsencode(name))
        _add(state, os.fsencode(entry.path))
        for number in (entry.device, entry.inode, entry.size, entry.mtime_ns, entry.ctime_ns):
            _add(state, str(number).encode())
    return state.hexdigest()


def _default_file() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME", "")
    try:
        home = Path(folder) if folder.startswith("/") else Path.home() / ".cache"
    except RuntimeError:
        home = Path(os.devnull)  # nobody's process: nothing can be kept below this
    return home / "lmcache" / "weights.json"
