"""Blobs on shared tiers, opened by URL as a server opens them: what others changed or wrote there is never loaded."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import remote_rounds
from redis_stand import needs_redis
from s3_stand import object_store_runtime, wayward_server  # noqa: F401 - a fixture

from lmcache.core.blob import BlobStore, Loaded
from lmcache.errors import TierError

pytest.importorskip("redis", reason="redis-py is not installed (extra lmcache[redis])")
pytest.importorskip("moto.server", reason="moto's server is not installed (extra lmcache[test])")
pytestmark = pytest.mark.usefixtures("object_store_runtime")

IDENTITY = remote_rounds.identity(1)
PAYLOAD = bytes(range(256)) * 40


@pytest.fixture(scope="module", params=[pytest.param("redis", marks=needs_redis), "s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with remote_rounds.tier_url(request.param, tmp_path_factory.mktemp(request.param)) as url:
        yield url


@pytest.fixture
def blobs(url: str) -> Iterator[BlobStore]:
    blobs = remote_rounds.opened(url)
    blobs.store(IDENTITY, [memoryview(PAYLOAD)], soon())
    yield blobs
    blobs.delete([IDENTITY], soon())
    blobs.tier.close()


def soon() -> float:
    return time.monotonic() + 20


def load(blobs: BlobStore) -> tuple[Loaded, bytes]:
    buffer = bytearray(len(PAYLOAD))
    return blobs.load(IDENTITY, [memoryview(buffer)[:4096], memoryview(buffer)[4096:]], soon()), bytes(buffer)


def raw(blobs: BlobStore) -> bytes:
    """What the tier holds under the blob's key."""
    buffer = bytearray(len(PAYLOAD) + 10_000)
    return bytes(buffer[: blobs.tier.load(blobs.key(IDENTITY), [memoryview(buffer)], soon())])


def test_a_blob_is_loaded_by_another_server_that_opens_the_same_url(url: str, blobs: BlobStore) -> None:
    other = remote_rounds.opened(url)

    assert load(other) == (Loaded.LOADED, PAYLOAD)
    other.tier.close()


@pytest.mark.parametrize("at", [0, 8, 100, 4096, 5000, -1])
def test_a_changed_byte_anywhere_is_noticed_and_such_a_blob_is_not_loaded_twice(blobs: BlobStore, at: int) -> None:
    stored = bytearray(raw(blobs))
    stored[at] ^= 0x40
    blobs.tier.store(blobs.key(IDENTITY), [stored], soon())

    assert load(blobs)[0] in (Loaded.DAMAGED, Loaded.FOREIGN)
    blobs.store(IDENTITY, [memoryview(PAYLOAD)], soon())
    assert load(blobs) == (Loaded.LOADED, PAYLOAD)


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b[:4096], lambda b: b[:5], lambda b: b + b"x"])
def test_a_blob_of_another_length_is_not_loaded(blobs: BlobStore, change: object) -> None:
    blobs.tier.store(blobs.key(IDENTITY), [change(raw(blobs))], soon())  # type: ignore[operator]

    assert load(blobs)[0] is Loaded.DAMAGED
    assert load(blobs)[0] is Loaded.ABSENT


@pytest.mark.parametrize("size", [1, 4096, 14_336, 1_000_000])
def test_what_somebody_else_wrote_is_not_loaded_and_left_alone(blobs: BlobStore, size: int) -> None:
    foreign = os.urandom(size)
    blobs.tier.store(blobs.key(IDENTITY), [foreign], soon())

    assert load(blobs)[0] is Loaded.FOREIGN
    assert load(blobs)[0] is Loaded.FOREIGN


def test_a_blob_under_another_ones_key_is_not_loaded(blobs: BlobStore) -> None:
    other = remote_rounds.identity(2)
    blobs.store(other, [memoryview(bytes(len(PAYLOAD)))], soon())
    buffer = bytearray(len(PAYLOAD) + 10_000)
    length = blobs.tier.load(blobs.key(other), [memoryview(buffer)], soon())
    blobs.tier.store(blobs.key(IDENTITY), [buffer[:length]], soon())

    assert load(blobs)[0] in (Loaded.DAMAGED, Loaded.FOREIGN)
    blobs.delete([other], soon())


def test_a_store_that_answers_with_other_bytes_serves_nothing(tmp_path: Path) -> None:
    for name in ("access_key", "secret_key"):
        (tmp_path / name).write_text("x")
    secrets = "&".join(f"{name}_file={tmp_path / name}" for name in ("access_key", "secret_key"))
    with wayward_server() as server:
        blobs = remote_rounds.opened(f"s3://test?endpoint={server.endpoint}&allow_http=on&retries=0&{secrets}")
        blobs.store(IDENTITY, [memoryview(PAYLOAD)], soon())
        server.mood = "other"
        assert load(blobs)[0] is Loaded.FOREIGN
        server.mood = "short"
        with pytest.raises(TierError):
            load(blobs)
        server.mood = "good"
        assert load(blobs) == (Loaded.LOADED, PAYLOAD)
        blobs.tier.close()
