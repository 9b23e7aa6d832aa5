"""A server that is killed in the middle of storing leaves whole blobs or none on redis, in a bucket and in a folder."""

from pathlib import Path

import pytest
import remote_rounds
from redis_stand import needs_redis
from s3_stand import object_store_runtime  # noqa: F401 - a fixture

pytest.importorskip("redis", reason="redis-py is not installed (extra lmcache[redis])")
pytest.importorskip("moto.server", reason="moto's server is not installed (extra lmcache[test])")
pytestmark = pytest.mark.usefixtures("object_store_runtime")

SEED = 5


@pytest.mark.parametrize("kind", [pytest.param("redis", marks=needs_redis), "s3", "file"])
def test_blobs_are_whole_or_absent_whenever_their_writer_is_killed(kind: str, tmp_path: Path) -> None:
    told: list[str] = []
    remote_rounds.run(kind, 10, SEED, tmp_path, told.append)

    assert told[0].startswith(f"{kind}: 10 kills, nothing damaged, mixed or lost")
    assert "'LOADED'" in told[0]
