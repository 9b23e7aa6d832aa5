"""`lmcache tier`: what is listed, what is verified, what is deleted, and when it refuses."""

import json
import os
import time
from pathlib import Path

import pytest

from lmcache.core.blob import BlobIdentity, BlobStore
from lmcache.core.keys import namespace_digest
from lmcache.core.tier import TierLocation
from lmcache.plugins.storage.disk import DiskTier

FACTS = ({"model": "org/one"}, {"model": "org/two", "note": "x" * 5000})
PAYLOAD = bytes(range(256)) * 16


def identity(number: int, namespace: int = 0) -> BlobIdentity:
    return BlobIdentity(bytes([namespace]) * 16, FACTS[namespace], number.to_bytes(16, "big"), 0, 0, "tenant", 256)


def open_disk(folder: Path) -> DiskTier:
    return DiskTier(TierLocation("disk", path=str(folder), options={"size_gb": "1"}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a tier with three blobs of one model and two of another, whose headers are longer."""
    tier = open_disk(tmp_path)
    for namespace, numbers in ((0, range(3)), (1, range(2))):
        for number in numbers:
            BlobStore(tier).store(identity(number, namespace), [memoryview(PAYLOAD)], time.monotonic() + 60)
    tier.close()
    return tmp_path


def path_of(folder: Path, number: int, namespace: int = 0) -> Path:
    key = identity(number, namespace).key
    return folder / key[:2] / key


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_ls_counts_blobs_and_bytes_of_each_namespace(lmcache, folder: Path) -> None:
    spoken = lmcache("tier", "ls", f"disk://{folder}")
    listed = json.loads(lmcache("tier", "ls", "--json", f"disk://{folder}").stdout)

    assert spoken.stdout.splitlines()[0] == f"disk://{folder}: 5 blobs, 48.0 KiB"
    assert [line.split() for line in spoken.stdout.splitlines()[1:]] == [
        ["namespace", "model", "chunk", "size", "cells", "codec", "blobs", "size"],
        ["00" * 16, "org/one", "256", "none", "3", "24.0", "KiB"],
        ["01" * 16, "org/two", "256", "none", "2", "24.0", "KiB"],
    ]
    common = {"chunk_size": 256, "cell_bytes": 0, "codec": ""}
    assert listed == {
        "tier": f"disk://{folder}",
        "namespaces": [
            {"namespace": "00" * 16, **common, "blobs": 3, "bytes": 3 * 8192, "facts": FACTS[0]},
            {"namespace": "01" * 16, **common, "blobs": 2, "bytes": 2 * 12288, "facts": FACTS[1]},
        ],
        "damaged": 0,
        "foreign": 0,
        "unreadable": 0,
    }


def test_ls_names_a_namespace_as_the_status_of_a_server_does(lmcache, tmp_path: Path) -> None:
    facts = {"model": "org/one", "chunk_size": "256"}
    with_cells = {**facts, "cell_bytes": "1048576"}
    tier = open_disk(tmp_path)
    blob = BlobIdentity(namespace_digest(with_cells), with_cells, bytes(16), 0, 0, "tenant", 256)
    BlobStore(tier).store(blob, [memoryview(PAYLOAD)], time.monotonic() + 60)
    tier.close()

    (found,) = json.loads(lmcache("tier", "ls", "--json", f"disk://{tmp_path}").stdout)["namespaces"]
    assert (found["namespace"], found["cell_bytes"]) == (namespace_digest(facts).hex(), 1 << 20)
    assert f"{namespace_digest(facts).hex()}  org/one  256         1.0 MiB  none" in (
        lmcache("tier", "ls", f"disk://{tmp_path}").stdout
    )


def test_ls_of_an_empty_tier_is_one_line(lmcache, tmp_path: Path) -> None:
    assert lmcache("tier", "ls", f"disk://{tmp_path}").stdout == f"disk://{tmp_path}: 0 blobs, 0 B\n"
    assert list(tmp_path.iterdir()) == []


def test_verify_finds_what_ls_cannot_see_and_changes_nothing(lmcache, folder: Path) -> None:
    good = lmcache("tier", "verify", f"disk://{folder}")
    damage(path_of(folder, 1))
    listed = lmcache("tier", "ls", f"disk://{folder}")
    bad = lmcache("tier", "verify", f"disk://{folder}")
    as_json = json.loads(lmcache("tier", "verify", "--json", f"disk://{folder}").stdout)

    assert good.returncode == 0
    assert good.stdout.startswith(f"disk://{folder}: 5 blobs whole; 48.0 KiB read, ")
    assert listed.stdout.splitlines()[0] == f"disk://{folder}: 5 blobs, 48.0 KiB"
    assert bad.returncode == 1
    key = identity(1).key
    assert bad.stdout.startswith(f"{key} damaged\ndisk://{folder}: 4 blobs whole, 1 damaged; 48.0 KiB read, ")
    assert (as_json["whole"], as_json["damaged"], as_json["foreign"], as_json["unreadable"]) == (4, [key], [], [])
    assert path_of(folder, 1).exists()


@pytest.mark.parametrize("how", ["flipped", "cut", "renamed", "somebody else's"])
def test_repair_deletes_what_is_damaged_and_nothing_else(lmcache, folder: Path, how: str) -> None:
    path = path_of(folder, 1)
    match how:
        case "flipped":
            damage(path)
        case "cut":
            os.truncate(path, 100)
        case "renamed":
            path_of(folder, 0, 1).rename(path)
        case _:
            path.write_bytes(b"hello")
    done = lmcache("tier", "repair", f"disk://{folder}")
    again = lmcache("tier", "verify", f"disk://{folder}")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{identity(1).key} damaged deleted\n")
    assert not path.exists()
    assert again.returncode == 0
    assert f": {3 if how == 'renamed' else 4} blobs whole; " in again.stdout


def test_a_folder_that_a_server_holds_can_be_listed_and_verified_and_is_not_repaired(lmcache, folder: Path) -> None:
    tier = open_disk(folder)
    try:
        for command in ("ls", "verify"):
            assert lmcache("tier", command, f"disk://{folder}?size_gb=1").returncode == 0
        refused = lmcache("tier", "repair", f"disk://{folder}")
    finally:
        tier.close()

    assert refused.returncode == 2
    assert refused.stderr == (
        f"lmcache: --l2 disk://{folder}: the server with process id {os.getpid()} has this folder; give each server a "
        "folder of its own, or end the other first\n"
    )


def test_payloads_of_a_codec_are_verified_without_its_key(lmcache, tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="cryptography is part of the extra encryption")
    from lmcache.plugins.manager import PluginManager

    (tmp_path / "key").write_text("ab" * 32)
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "tier").mkdir()
    url = f"disk://{tmp_path}/tier?size_gb=1&codec=aes-gcm&key_file={tmp_path}/key"
    opened = PluginManager().open_tier(url)
    opened.blobs.store(identity(1), [memoryview(PAYLOAD)], time.monotonic() + 60)
    opened.blobs.tier.close()

    assert lmcache("tier", "verify", f"disk://{tmp_path}/tier").returncode == 0
    assert "aes-gcm" in lmcache("tier", "ls", f"disk://{tmp_path}/tier").stdout


def test_what_is_no_tier_is_said_in_one_line(lmcache, tmp_path: Path) -> None:
    for url, says in [
        (f"{tmp_path}", f"--l2 {tmp_path} is no URL of a tier; write it like disk:///path?size_gb=100"),
        ("dsik:///x", "no plugin offers the storage tier 'dsik'; known: "),
        (f"disk://{tmp_path}?size=1", "--l2 disk:// has no option 'size'; the options are "),
    ]:
        done = lmcache("tier", "ls", url)
        assert done.returncode == 2
        assert done.stderr.startswith(f"lmcache: {says}")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("command", [("tier", "ls"), ("server", "--port", "0", "--l2")])
def test_secrets_in_an_endpoint_are_refused_and_not_repeated(lmcache, command: tuple[str, ...], scheme: str) -> None:
    done = lmcache(*command, f"s3://bucket/p?endpoint={scheme}://user:hunter2@127.0.0.1:1&allow_http=on")
    assert (done.returncode, done.stdout) == (2, "")
    assert "has a user or a password in its endpoint; leave both out" in done.stderr
    assert "hunter2" not in done.stderr
