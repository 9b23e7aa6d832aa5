"""The engine's block pool and its own prefix cache."""

import pytest

from lmcache.core.keys import ChainHash
from lmcache.engines.reference.blocks import NULL_BLOCK, BlockKey, BlockPool, OutOfBlocks


def key(number: int) -> BlockKey:
    return 0, ChainHash(number.to_bytes(16, "little"))


def test_the_null_block_is_never_handed_out_and_releasing_it_does_nothing() -> None:
    pool = BlockPool(4)
    assert sorted(pool.allocate() for _ in range(3)) == [1, 2, 3]
    pool.release([NULL_BLOCK, NULL_BLOCK])
    with pytest.raises(OutOfBlocks):
        pool.allocate()


def test_a_released_block_is_found_until_it_is_needed_and_the_longest_unused_goes_first() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(), pool.allocate()
    pool.remember(key(1), first)
    pool.remember(key(2), second)
    pool.release([second])
    pool.release([first])
    assert (pool.find(key(1)), pool.find(key(2))) == (first, second)
    assert pool.allocate() == second
    assert (pool.find(key(1)), pool.find(key(2))) == (first, NULL_BLOCK)


def test_a_shared_block_is_unused_when_its_last_user_has_released_it() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.remember(key(1), block)
    pool.share(block)
    pool.release([block])
    assert pool.unused == 0
    pool.release([block])
    assert pool.unused == 1
    pool.share(block)
    assert pool.unused == 0


def test_the_block_that_is_known_first_stays_the_one_that_is_found() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(), pool.allocate()
    pool.remember(key(1), first)
    pool.remember(key(1), second)
    pool.remember(key(2), first)
    assert (pool.find(key(1)), pool.find(key(2))) == (first, NULL_BLOCK)


def test_dropping_the_cache_forgets_content_and_not_users() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.remember(key(1), block)
    pool.drop_cache()
    assert pool.find(key(1)) == NULL_BLOCK
    assert pool.unused == 1
    pool.release([block])
    assert {pool.allocate(), pool.allocate()} == {1, 2}
