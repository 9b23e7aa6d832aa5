"""From a URL to an open tier with its codec, and what is said where that cannot be."""

import subprocess
import sys
import time

import pytest

from lmcache.core.blob import BlobIdentity, Loaded
from lmcache.core.tier_url import StorePolicy
from lmcache.errors import ConfigError, PluginError
from lmcache.plugins.manager import PluginManager
from lmcache.plugins.storage.disk import DiskTier

IDENTITY = BlobIdentity(b"n" * 16, {"model": "m"}, b"c" * 16, 0, 0, "", 256)


@pytest.fixture
def opened(tmp_path):
    """Opens tiers in a folder of the test, and closes them."""
    tiers = []
    (tmp_path / "tier").mkdir()

    def open_tier(query, *plugins):
        opened = PluginManager(plugins).open_tier(f"disk://{tmp_path}/tier?size_gb=0.01{query}")
        tiers.append(opened.blobs.tier)
        return opened

    yield open_tier
    for tier in tiers:
        tier.close()


def round_trip(opened, payload=b"payload" * 1000):
    opened.blobs.store(IDENTITY, [memoryview(payload)], time.monotonic() + 60)
    into = memoryview(bytearray(len(payload)))
    return opened.blobs.load(IDENTITY, [into], time.monotonic() + 60) is Loaded.LOADED and into == payload


def test_the_scheme_selects_the_tier_and_the_query_how_it_is_used(opened):
    found = opened("&store=on-evict&threads=2&timeout_s=9")
    assert isinstance(found.blobs.tier, DiskTier)
    assert found.blobs.codec is None
    assert (found.settings.store_policy, found.settings.threads) == (StorePolicy.ON_EVICT, 2)
    assert round_trip(found)


@pytest.mark.parametrize("codec", ["zstd", "ZSTD-BF16", "aes-gcm", "zstd+aes-gcm"])
def test_a_codec_is_selected_by_name_and_several_go_one_after_the_other(opened, tmp_path, codec):
    pytest.importorskip("zstandard", reason="zstandard is part of the extra zstd")
    pytest.importorskip("cryptography", reason="cryptography is part of the extra encryption")
    (tmp_path / "key").write_text("ab" * 32)
    (tmp_path / "key").chmod(0o600)
    found = opened(f"&codec={codec}" + (f"&key_file={tmp_path}/key" if "aes" in codec else ""))
    assert found.blobs.codec.name == codec.lower()
    assert round_trip(found)
    ((_, length),) = found.blobs.tier.keys()
    assert (length < 5000) == ("zstd" in codec.lower())


def test_blobs_of_another_codec_are_not_mistaken_for_its_own(opened):
    pytest.importorskip("zstandard", reason="zstandard is part of the extra zstd")
    plain = opened("")
    assert round_trip(plain)
    plain.blobs.tier.close()
    packed = opened("&codec=zstd")
    assert packed.blobs.contains([IDENTITY], time.monotonic() + 60) == [False]
    assert round_trip(packed)


def test_another_key_reads_nothing_and_deletes_nothing(opened, tmp_path):
    pytest.importorskip("cryptography", reason="cryptography is part of the extra encryption")
    for name, digits in (("one", "ab"), ("other", "cd")):
        (tmp_path / name).write_text(digits * 32)
        (tmp_path / name).chmod(0o600)
    one = opened(f"&codec=aes-gcm&key_file={tmp_path}/one")
    assert round_trip(one)
    one.blobs.tier.close()
    other = opened(f"&codec=aes-gcm&key_file={tmp_path}/other")
    assert other.blobs.load(IDENTITY, [memoryview(bytearray(7000))], time.monotonic() + 60) is Loaded.FOREIGN
    assert other.blobs.contains([IDENTITY], time.monotonic() + 60) == [False]
    other.blobs.tier.close()
    one = opened(f"&codec=aes-gcm&key_file={tmp_path}/one")
    assert one.blobs.load(IDENTITY, [memoryview(bytearray(7000))], time.monotonic() + 60) is Loaded.LOADED


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("dsik:///x", "no plugin offers the storage tier 'dsik'; known: "),
        ("dsik:///x", "did you mean 'disk'? "),
        ("disk:///x?size_gb=1&codec=zst", "no plugin offers the codec 'zst'; known: aes-gcm, zstd, zstd-bf16; did you"),
        (
            "disk:///x?size=1",
            "--l2 disk:// has no option 'size'; the options are codec, direct, mode, policy, size_gb, ",
        ),
        ("disk:///x?level=3", "--l2 disk:// has no option 'level'; the options are codec, "),
    ],
)
def test_names_that_nobody_knows_are_refused_with_those_that_are_known(url, says):
    with pytest.raises(ConfigError) as refused:
        PluginManager().open_tier(url)
    assert says in str(refused.value)


BROKEN = """
from lmcache.core.codec import Codec
from lmcache.core.tier import StorageTier

class Broken(StorageTier):
    scheme = "broken"
    secrets = {"token": "what it asks for"}
    def __init__(self, location): raise RuntimeError("no such luck")
    def store(self, key, parts, deadline): ...
    def load(self, key, into, deadline): ...
    def contains(self, keys, deadline): ...
    def delete(self, keys, deadline): ...
    def keys(self): ...

class Long(Codec):
    name = "a-name-that-does-not-fit-in-a-header"
    def __init__(self, options): ...
    def encode(self, parts, about): ...
    def decode(self, stored, into, about): ...

@hookimpl
def lmcache_register_storage_tiers():
    return [Broken]

@hookimpl
def lmcache_register_codecs():
    return [Long]
"""


def test_a_tier_that_cannot_be_made_is_an_error_that_names_it_and_no_secret(shelf, monkeypatch):
    shelf.module("broken_tier", BROKEN)
    monkeypatch.setenv("TOKEN_OF_TEST", "hush")
    with pytest.raises(PluginError) as refused:
        PluginManager(["broken_tier"]).open_tier("broken://host:1/x?token_env=TOKEN_OF_TEST")
    assert str(refused.value) == (
        "the storage tier broken://host:1/x, broken_tier.Broken, cannot be opened: RuntimeError: no such luck"
    )


def test_a_codec_s_name_must_fit_in_a_header(shelf, opened):
    shelf.module("broken_tier", BROKEN)
    with pytest.raises(ConfigError) as refused:
        opened("&codec=a-name-that-does-not-fit-in-a-header", "broken_tier")
    assert str(refused.value) == (
        "codec=a-name-that-does-not-fit-in-a-header does not fit in the header of a blob; use at most 32 characters"
    )


def test_two_plugins_that_offer_one_scheme_or_codec_are_both_named(shelf):
    shelf.module("one_tier", BROKEN)
    shelf.module("other_tier", BROKEN)
    with pytest.raises(PluginError) as refused:
        PluginManager(["one_tier", "other_tier"])
    assert str(refused.value) == (
        "plugin 'one_tier' (--plugin) and plugin 'other_tier' (--plugin) both offer the storage tier 'broken'; drop "
        "the first from --plugin, or drop the second from --plugin"
    )


MISSING = """
import sys
sys.modules["zstandard"] = sys.modules["cryptography"] = None
from lmcache.errors import ConfigError
from lmcache.plugins.manager import PluginManager
for codec in ("zstd", "zstd-bf16", "aes-gcm"):
    try:
        PluginManager().open_tier(f"disk:///tmp?size_gb=1&codec={codec}")
    except ConfigError as error:
        print(error)
"""


def test_a_package_that_is_not_installed_is_said_with_the_extra_that_brings_it():
    done = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "codec=zstd needs the package zstandard",
        "codec=zstd-bf16 needs the package zstandard",
        "codec=aes-gcm needs the package cryptography",
    ]
    assert [line.rpartition("; ")[2] for line in lines] == [
        "install this lmcache with its extra `zstd`: in its checkout, pip install '.[zstd]'",
        "install this lmcache with its extra `zstd`: in its checkout, pip install '.[zstd]'",
        "install this lmcache with its extra `encryption`: in its checkout, pip install '.[encryption]'",
    ]
