"""Chain hashes travel joined: cutting them apart again."""

import os
import struct

import pytest

from lmcache.core.keys import split_hashes


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 512, 1000])
def test_joined_hashes_come_apart_in_order_however_many_they_are(count: int) -> None:
    hashes = [os.urandom(16) for _ in range(count)]

    assert split_hashes(b"".join(hashes)) == hashes


@pytest.mark.parametrize("surplus", [1, 15])
def test_half_a_hash_is_no_hash(surplus: int) -> None:
    with pytest.raises(struct.error):
        split_hashes(bytes(64 * 16 + surplus))
