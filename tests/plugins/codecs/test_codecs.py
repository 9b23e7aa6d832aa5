"""Our codecs keep every promise of a codec, alone and one after the other."""

import array
import os
import random

import pytest

from lmcache.errors import CodecError, ConfigError
from lmcache.plugins.codecs.aes_gcm import AesGcm
from lmcache.plugins.codecs.chain import Chain
from lmcache.plugins.codecs.zstd import Zstd
from lmcache.plugins.codecs.zstd_bf16 import ZstdBf16
from lmcache.plugins.testing import CodecSuite

pytest.importorskip("zstandard", reason="zstandard is part of the extra zstd")
pytest.importorskip("cryptography", reason="cryptography is part of the extra encryption")

ABOUT = b"about"


@pytest.fixture(scope="module")
def key_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_text(os.urandom(32).hex() + "\n")
    path.chmod(0o600)
    return str(path)


class TestZstd(CodecSuite):
    def make_codec(self):
        return Zstd({})


class TestZstdBf16(CodecSuite):
    def make_codec(self):
        return ZstdBf16({})


class TestAesGcm(CodecSuite):
    authenticates = True

    @pytest.fixture(autouse=True)
    def key(self, key_file):
        self.key_file = key_file

    def make_codec(self):
        return AesGcm({"key_file": self.key_file})


class TestZstdThenAesGcm(TestAesGcm):
    def make_codec(self):
        return Chain([Zstd({}), AesGcm({"key_file": self.key_file})])


def bfloat16(count):
    """Numbers as a KV cache has them: of one scale, cut to 16 bits."""
    source = random.Random(3)
    numbers = array.array("f", (source.gauss(0, 1) for _ in range(count))).tobytes()
    return b"".join(numbers[at + 2 : at + 4] for at in range(0, len(numbers), 4))


def test_separating_bytes_is_what_makes_bfloat16_smaller():
    payload = bfloat16(400_000)
    plain, separated = (len(codec.encode([payload], ABOUT)) for codec in (Zstd({}), ZstdBf16({})))
    assert separated < 0.8 * len(payload)
    assert separated < 0.95 * plain


def test_bytes_are_separated_in_blocks_of_262144():
    """The format must not change: what other versions wrote must be read."""
    import zstandard

    payload = bytes(random.Random(1).choices(range(4), k=(1 << 18) + 5))
    planes = payload[0 : 1 << 18 : 2] + payload[1 : 1 << 18 : 2] + payload[1 << 18 :: 2] + payload[(1 << 18) + 1 :: 2]
    assert zstandard.ZstdDecompressor().decompress(ZstdBf16({}).encode([payload], ABOUT)) == planes
    into = bytearray(len(payload))
    ZstdBf16({}).decode(zstandard.ZstdCompressor().compress(planes), [memoryview(into)], ABOUT)
    assert into == payload


def test_a_frame_that_does_not_say_how_long_it_is_or_lies_is_refused():
    import zstandard

    into = [memoryview(bytearray(1000))]
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
    with pytest.raises(CodecError):
        Zstd({}).decode(silent, into, ABOUT)
    wide = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=27, write_content_size=1)
    ).compressobj(size=1000)
    with pytest.raises(CodecError):
        Zstd({}).decode(wide.compress(bytes(999)), into, ABOUT)


def test_a_payload_encrypted_with_another_key_is_refused(key_file, tmp_path):
    other = tmp_path / "key"
    other.write_bytes(os.urandom(32))
    stored = AesGcm({"key_file": key_file}).encode([b"payload"], ABOUT)
    with pytest.raises(CodecError, match="another key"):
        AesGcm({"key_file": str(other)}).decode(stored, [memoryview(bytearray(7))], ABOUT)


def test_the_same_payload_is_encrypted_differently_each_time_and_not_in_clear(key_file):
    codec = AesGcm({"key_file": key_file})
    stored = {codec.encode([b"payload" * 100], ABOUT) for _ in range(20)}
    assert len({each[:12] for each in stored}) == 20
    assert not any(b"payload" in each for each in stored)


def test_a_key_may_be_32_bytes_or_64_digits(tmp_path, caplog):
    key = os.urandom(32)
    digits, raw = tmp_path / "digits", tmp_path / "raw"
    digits.write_text(f"{key.hex()}\n")
    raw.write_bytes(key)
    raw.chmod(0o600)
    digits.chmod(0o644)
    into = bytearray(7)
    AesGcm({"key_file": str(raw)}).decode(
        AesGcm({"key_file": str(digits)}).encode([b"payload"], ABOUT), [memoryview(into)], ABOUT
    )
    assert into == b"payload"
    assert caplog.messages == [f"{digits}, the key of codec=aes-gcm, can be used by other users: chmod 600 {digits}"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no key; it must hold 64 hexadecimal digits (openssl rand -hex 32), or exactly 32 bytes"),
        (b"short", "holds no key; it must hold 64 hexadecimal digits (openssl rand -hex 32), or exactly 32 bytes"),
        (None, "No such file or directory; make one: openssl rand -hex 32 > PATH"),
    ],
)
def test_a_key_file_without_a_key_is_refused(tmp_path, content, says):
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o600)
    with pytest.raises(ConfigError) as refused:
        AesGcm({"key_file": str(path)})
    assert str(refused.value).endswith(says)


def test_settings_that_cannot_be_honoured_are_refused():
    for codec, options, says in [
        (AesGcm, {}, "codec=aes-gcm has no key_file; add key_file=PATH to the tier's URL"),
        (Zstd, {"level": "fast"}, "codec=zstd has level=fast; use a number from 1 to 9"),
        (ZstdBf16, {"level": "22"}, "codec=zstd-bf16 has level=22; use a number from 1 to 9"),
    ]:
        with pytest.raises(ConfigError) as refused:
            codec(options)
        assert str(refused.value) == says


def test_a_chain_that_claims_more_than_can_be_is_refused_before_memory_is_taken(key_file):
    aes = AesGcm({"key_file": key_file})
    chain = Chain([Zstd({}), aes])
    inner = Zstd({}).encode([b"payload"], ABOUT)
    for length in (1 << 40, len(inner) + 1):
        with pytest.raises(CodecError):
            chain.decode(length.to_bytes(8, "little") + aes.encode([inner], ABOUT), [memoryview(bytearray(7))], ABOUT)
