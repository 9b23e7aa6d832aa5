"""SGLang's page keys as chain hashes, and what is remembered of their order."""

import hashlib

import pytest

from lmcache.engines.sglang.page_keys import Lineage, chain_hashes


def key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def test_a_page_s_chain_hash_is_the_beginning_of_its_key() -> None:
    keys = [key(number) for number in range(300)]

    assert chain_hashes(keys) == b"".join(bytes.fromhex(each)[:16] for each in keys)
    assert chain_hashes(keys) == b"".join(chain_hashes([each]) for each in keys)
    assert chain_hashes([]) == b""


@pytest.mark.parametrize("strange", ["", "abc", "no hex at all", key(1)[:-2], key(1) + "00", "é\udc80"])
def test_a_key_of_another_kind_has_a_hash_of_its_own(strange: str) -> None:
    hashes = chain_hashes([key(1), strange, key(2)])

    assert len(hashes) == 48
    assert len({hashes[:16], hashes[16:32], hashes[32:]}) == 3
    assert hashes == chain_hashes([key(1), strange, key(2)])


def test_keys_whose_lengths_only_add_up_are_not_cut_in_the_wrong_place() -> None:
    one, other = key(1)[:62], key(2) + key(1)[62:]
    assert chain_hashes([one, other]) != chain_hashes([key(1), key(2)])


def test_the_page_before_is_remembered_until_there_are_too_many() -> None:
    a, b, c, d = (chain_hashes([key(number)]) for number in range(4))
    lineage = Lineage(size=2)
    lineage.learn(a + b)
    assert [lineage.before(each) for each in (a, b, c)] == [b"", a, b""]

    lineage.learn(b + c + d)
    assert [lineage.before(each) for each in (b, c, d)] == [b"", b, c]
