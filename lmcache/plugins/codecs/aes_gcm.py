"""`codec=aes-gcm&key_file=PATH`: payloads encrypted and authenticated. Needs the extra `encryption`.

AES in Galois/counter mode with a key of 256 bits and a new random nonce of 96 bits for each blob; what the blob is
about (its key in the tier) is authenticated, too, so that no blob can be passed off as another. With random nonces, a
key should not write more than 2^32 blobs (NIST SP 800-38D): take a new one before.

Headers are not encrypted: whoever reads the tier sees models' names, sizes and chain hashes, but no payload.
"""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from lmcache.core.codec import Codec
from lmcache.core.hookspecs import hookimpl
from lmcache.core.tier import Buffer
from lmcache.errors import CodecError, ConfigError, with_extra

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.modes import GCM

log = logging.getLogger("lmcache.tier")

_KEY = 32
_NONCE = 12
_TAG = 16


class AesGcm(Codec):
    """What is written is the nonce (12 bytes), the encrypted payload (as long as before) and the tag (16 bytes)."""

    name = "aes-gcm"
    options: ClassVar[Mapping[str, str]] = {
        "key_file": "file with the key: 64 hexadecimal digits (`openssl rand -hex 32`) or 32 bytes"
    }

    def __init__(self, options: Mapping[str, str]) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives import ciphers
        except ImportError as error:
            raise ConfigError(
                f"codec={self.name} needs the package cryptography: {error}",
                remedy=with_extra("encryption"),
            ) from error
        self._invalid_tag = InvalidTag
        self._ciphers = ciphers
        self._key = ciphers.algorithms.AES(_read_key(options.get("key_file", "")))

    def encode(self, parts: Sequence[Buffer], about: bytes) -> bytes:
        """With a nonce of its own."""
        nonce = os.urandom(_NONCE)
        encryptor = self._cipher(nonce).encryptor()
        encryptor.authenticate_additional_data(about)
        encrypted = [encryptor.update(part) for part in parts]
        end = encryptor.finalize()
        return b"".join([nonce, *encrypted, end, encryptor.tag])

    def decode(self, stored: Buffer, into: Sequence[memoryview], about: bytes) -> None:
        """Straight into the buffers. They hold what it decrypts to even if it turns out not to be authentic."""
        data = memoryview(stored)
        if len(data) != _NONCE + sum(map(len, into)) + _TAG:
            raise CodecError(f"{len(data)} bytes cannot be the encrypted payload")
        decryptor = self._cipher(bytes(data[:_NONCE]), bytes(data[-_TAG:])).decryptor()
        decryptor.authenticate_additional_data(about)
        at = _NONCE
        for view in into:
            decryptor.update_into(data[at : at + len(view)], view)
            at += len(view)
        try:
            decryptor.finalize()
        except self._invalid_tag:
            raise CodecError("a payload was encrypted with another key, or for another blob, or was changed") from None

    def _cipher(self, nonce: bytes, tag: bytes | None = None) -> "Cipher[GCM]":
        return self._ciphers.Cipher(self._key, self._ciphers.modes.GCM(nonce, tag))


def _read_key(path: str) -> bytes:
    if not path:
        raise ConfigError("codec=aes-gcm has no key_file", remedy="add key_file=PATH to the tier's URL")
    try:
        content = Path(path).read_bytes()
        open_to_others = Path(path).stat().st_mode & 0o077
    except OSError as error:
        raise ConfigError(
            f"codec=aes-gcm cannot read its key_file {path}: {error.strerror}",
            remedy="make one: openssl rand -hex 32 > PATH",
        ) from error
    if open_to_others:
        log.warning("%s, the key of codec=aes-gcm, can be used by other users: chmod 600 %s", path, path)
    if re.fullmatch(rb"\s*[0-9A-Fa-f]{64}\s*", content):
        return bytes.fromhex(content.decode())
    if len(content) == _KEY:
        return content
    raise ConfigError(
        f"codec=aes-gcm has a key_file, {path}, that holds no key",
        remedy="it must hold 64 hexadecimal digits (openssl rand -hex 32), or exactly 32 bytes",
    )


@hookimpl
def lmcache_register_codecs() -> list[type[Codec]]:
    """Offer the codec to `codec=aes-gcm` in the URL of a tier."""
    return [AesGcm]
