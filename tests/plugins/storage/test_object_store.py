"""Blobs in a real S3-compatible server and in a folder: what is stored, and what a user who writes a URL is told."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_stand import S3Server, WaywardServer, object_store_runtime, wayward_server  # noqa: F401 - a fixture

from lmcache.core.tier import TierLocation
from lmcache.errors import ConfigError, TierError
from lmcache.plugins.manager import PluginManager
from lmcache.plugins.storage.object_store import AzureTier, FolderTier, GoogleTier, S3Tier
from lmcache.plugins.storage.object_store_tier import ObjectStoreTier, in_short

pytestmark = pytest.mark.usefixtures("object_store_runtime")

KEY = hashlib.sha1(b"a").hexdigest()
OTHER = hashlib.sha1(b"b").hexdigest()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    pytest.importorskip("moto.server", reason="moto's server is not installed (extra lmcache[test])")
    server = S3Server(tmp_path_factory.mktemp("moto"))
    yield server
    server.close()


@pytest.fixture(params=["s3", "file"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStoreTier]:
    tier: ObjectStoreTier
    if request.param == "s3":
        tier = S3Tier(request.getfixturevalue("server").location(f"/{tmp_path.name}"))
    else:
        tier = FolderTier(TierLocation("file", path=str(tmp_path)))
    yield tier
    tier.close()


@pytest.fixture
def folder_tier(tmp_path: Path) -> Iterator[FolderTier]:
    tier = FolderTier(TierLocation("file", path=str(tmp_path)))
    yield tier
    tier.close()


def soon() -> float:
    return time.monotonic() + 20


def loaded(tier: ObjectStoreTier, key: str, *sizes: int) -> tuple[int, bytes]:
    buffers = [bytearray(size) for size in sizes]
    length = tier.load(key, [memoryview(buffer) for buffer in buffers], soon())
    return length, b"".join(buffers)


def test_a_blob_is_one_object_under_the_prefix(server: S3Server) -> None:
    tier = S3Tier(server.location("/kv/cache/"))
    tier.store(KEY, [b"head", bytearray(b"body"), memoryview(b"tail")], soon())
    tier.close()

    assert server.request("GET", f"/test/kv/cache/{KEY[:2]}/{KEY}") == (200, b"headbodytail")


def test_without_a_prefix_it_is_at_the_buckets_root(server: S3Server) -> None:
    tier = S3Tier(server.location())
    tier.store(KEY, [b"blob"], soon())

    assert server.request("GET", f"/test/{KEY[:2]}/{KEY}") == (200, b"blob")
    assert (KEY, 4) in list(tier.keys())
    tier.delete([KEY], soon())
    tier.close()


@pytest.mark.parametrize("size", [1, 4096, 2**20 + 1, 7_000_001])
def test_a_blob_comes_back_into_any_buffers(tier: ObjectStoreTier, size: int) -> None:
    blob = hashlib.shake_128(b"x").digest(size)
    tier.store(KEY, [blob[: size // 3], blob[size // 3 :]], soon())

    assert loaded(tier, KEY, size) == (size, blob)
    assert loaded(tier, KEY, size // 3, size - size // 3, 5) == (size, blob + bytes(5))
    assert loaded(tier, KEY, size // 2) == (size, blob[: size // 2])


def test_what_somebody_else_deleted_is_absent_at_once(server: S3Server, tier: ObjectStoreTier, tmp_path: Path) -> None:
    tier.store(KEY, [b"blob"], soon())
    assert tier.contains([KEY, OTHER], soon()) == [True, False]
    if isinstance(tier, S3Tier):
        server.request("DELETE", f"/test/{tmp_path.name}/{KEY[:2]}/{KEY}")
    else:
        (tmp_path / KEY[:2] / KEY).unlink()

    assert tier.contains([KEY, OTHER], soon()) == [False, False]
    assert loaded(tier, KEY, 4) == (0, bytes(4))
    tier.delete([KEY], soon())


def test_keys_are_those_of_blobs_and_lengths_are_theirs(
    server: S3Server, tier: ObjectStoreTier, tmp_path: Path
) -> None:
    stored = {hashlib.sha1(b"%d" % number).hexdigest(): number + 1 for number in range(50)}
    for key, size in stored.items():
        tier.store(key, [bytes(size)], soon())
    for name in ("readme", f"{KEY[:2]}/{KEY[:-1]}", f"00/{KEY}", f"{KEY[:2]}/{KEY.upper()}"):
        if isinstance(tier, S3Tier):
            server.request("PUT", f"/test/{tmp_path.name}/{name}", b"x")
        else:
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"x")

    assert dict(tier.keys()) == stored
    tier.delete(list(stored), soon())
    assert list(tier.keys()) == []


def test_an_empty_object_is_nobodys_blob(server: S3Server, tier: ObjectStoreTier, tmp_path: Path) -> None:
    if isinstance(tier, S3Tier):
        server.request("PUT", f"/test/{tmp_path.name}/{KEY[:2]}/{KEY}")
    else:
        (tmp_path / KEY[:2]).mkdir()
        (tmp_path / KEY[:2] / KEY).touch()

    assert tier.contains([KEY], soon()) == [False]
    assert loaded(tier, KEY, 4) == (0, bytes(4))


def test_a_bucket_that_is_not_there_is_named_by_stores_and_loads(server: S3Server) -> None:
    tier = S3Tier(server.location(bucket="nowhere"))
    for call in (lambda: tier.store(KEY, [b"blob"], soon()), lambda: loaded(tier, KEY, 4)):
        with pytest.raises(TierError) as refused:
            call()
        assert "NoSuchBucket" in str(refused.value)
        assert "create the bucket first" in str(refused.value)
    tier.close()


def test_virtual_host_style_asks_the_endpoint_for_keys_alone() -> None:
    with wayward_server() as server:
        tier = S3Tier(server.location(virtual_host="on"))
        tier.store(KEY, [b"blob"], soon())
        assert loaded(tier, KEY, 4) == (4, b"blob")
        tier.close()
        assert server.requests == [("PUT", f"/{KEY[:2]}/{KEY}"), ("GET", f"/{KEY[:2]}/{KEY}")]


def azure(server: WaywardServer, **secrets: str) -> AzureTier:
    options = {"account": "acc", "endpoint": server.endpoint, "allow_http": "on"}
    return AzureTier(TierLocation("az", "test", options=options, secrets=secrets))


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_google_and_azure_are_asked_with_their_own_requests(scheme: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    with wayward_server() as server:
        options = f"endpoint={server.endpoint}&allow_http=on&retries=1&connections=4"
        if scheme == "gs":
            account = {"private_key": "", "private_key_id": "", "client_email": "", "disable_oauth": True}
            secret.write_text(json.dumps(account))
            url = f"gs://test/kv?{options}&service_account_file={secret}"
        else:
            secret.write_text("dDBwczNjcmV0")
            url = f"az://test?{options}&account=acc&access_key_file={secret}"
        tier = PluginManager().open_tier(url).blobs.tier
        blob = hashlib.shake_128(b"x").digest(2_500_000)
        tier.store(KEY, [blob[:5], blob[5:]], soon())
        assert loaded(tier, KEY, 5, len(blob) - 5) == (len(blob), blob)
        assert tier.contains([KEY, OTHER], soon()) == [True, False]
        tier.delete([KEY, OTHER], soon())
        assert loaded(tier, KEY, 5)[0] == 0
        tier.close()
        place = "/test/kv" if scheme == "gs" else "/test"
        assert server.requests[0] == ("PUT", f"{place}/{KEY[:2]}/{KEY}")


def test_signatures_that_travel_in_addresses_are_not_shown() -> None:
    with wayward_server() as server:
        tier = azure(server, sas_token="sv=2021-12-02&sig=t0ps3cret")
        server.mood = 403
        with pytest.raises(TierError) as refused:
            tier.store(KEY, [b"blob"], soon())
        tier.close()

    assert "t0ps3cret" not in str(refused.value)
    assert "403" in str(refused.value)
    assert "access_key_env, access_key_file or sas_token_env, sas_token_file" in str(refused.value)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        (TierLocation("s3"), "s3:// names no bucket; write s3://BUCKET"),
        (
            TierLocation("s3", "b", options={"endpoint": "http://h"}),
            "s3://b has the endpoint http://h, which does not encrypt; use https://, or add allow_http=on",
        ),
        (TierLocation("s3", "b", options={"virtual_host": "yes"}), "virtual_host=yes; use on or off"),
        (TierLocation("s3", "b", options={"retries": "-1"}), "retries=-1; use a number from 0 to 1000"),
        (TierLocation("s3", "b", options={"connections": "0"}), "connections=0; use a number from 1 to 1000"),
        (TierLocation("s3", "b", options={"ca_file": "/nowhere"}), "ca_file=/nowhere, which cannot be read"),
        (TierLocation("gs", "b", secrets={"service_account": "t0ps3cret"}), "gs://b cannot be opened"),
        (TierLocation("az", "b"), "az://b cannot be opened"),
        (TierLocation("file"), "file:// names no folder; write file:///PATH, with three slashes"),
        (TierLocation("file", "tmp", path="/x"), "file://tmp/x names no folder"),
        (TierLocation("file", path="/nowhere"), "there is no folder /nowhere; create it, or correct it"),
    ],
)
def test_a_url_that_cannot_work_is_refused_at_start(
    location: TierLocation, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    kind = {"s3": S3Tier, "gs": GoogleTier, "az": AzureTier, "file": FolderTier}[location.scheme]
    with pytest.raises(ConfigError) as refused:
        kind(location)

    assert message in str(refused.value)
    assert "t0ps3cret" not in str(refused.value)


def test_what_dead_writers_left_in_a_folder_is_removed_in_time(folder_tier: FolderTier, tmp_path: Path) -> None:
    place = tmp_path / KEY[:2]
    place.mkdir()
    names = {name: place / name for name in (f"{KEY}#1", f"{KEY}#2", "notes#1")}
    for name, path in names.items():
        path.write_bytes(b"half")
        if not name.endswith("#2"):
            os.utime(path, (1, 1))
    folder_tier.store(KEY, [b"blob"], soon())

    assert sorted(path.name for path in place.iterdir()) == sorted([KEY, f"{KEY}#2", "notes#1"])
    assert list(folder_tier.keys()) == [(KEY, 4)]


def test_a_folder_that_must_not_be_written_refuses_and_still_loads(folder_tier: FolderTier, tmp_path: Path) -> None:
    folder_tier.store(KEY, [b"blob"], soon())
    (tmp_path / OTHER[:2]).write_bytes(b"a file where a folder belongs")

    with pytest.raises(TierError) as refused:
        folder_tier.store(OTHER, [b"blob"], soon())

    assert str(tmp_path) in str(refused.value)
    assert loaded(folder_tier, KEY, 4) == (4, b"blob")


def test_a_folder_on_a_full_file_system_refuses(tmp_path: Path) -> None:
    if not os.access("/dev/full", os.W_OK) or os.getuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a file system is not permitted here")
    try:
        tier = FolderTier(TierLocation("file", path=str(tmp_path)))
        tier.store(KEY, [b"blob"], soon())
        with pytest.raises(TierError, match="No space left on device"):
            tier.store(OTHER, [bytes(2_000_000)], soon())
        assert list(tier.keys()) == [(KEY, 4)]
        assert loaded(tier, OTHER, 4)[0] == 0
        tier.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_without_obstore_the_tiers_are_known_and_name_their_extra(tmp_path: Path) -> None:
    script = """
import sys
sys.modules["obstore"] = None
from lmcache.core.tier import TierLocation
from lmcache.plugins.storage import object_store
folder = object_store.FolderTier, TierLocation("file", path="/")
for kind, location in ((object_store.S3Tier, TierLocation("s3", "b")), folder):
    try:
        kind(location)
    except Exception as error:
        print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == (
        "ConfigError --l2 s3://b needs obstore, which is not installed; install this lmcache with its extra `s3`: in "
        "its checkout, pip install '.[s3]'\n"
        "ConfigError --l2 file:/// needs obstore, which is not installed; install this lmcache with its extra `s3`: in "
        "its checkout, pip install '.[s3]'\n"
    )


def test_of_a_server_s_own_words_only_those_are_told_that_say_what_is_wrong() -> None:
    body = (
        '<?xml version="1.0"?><Error><Code>ExpiredToken</Code><Message>The token has expired.</Message>'
        "<Token-0>SESSION-SECRET</Token-0>\n<RequestId>7</RequestId></Error>"
    )
    text = in_short(RuntimeError(f"Client error with status 400: {body}\n\nDebug source:\nX"))
    assert text == "Client error with status 400: ExpiredToken: The token has expired."
