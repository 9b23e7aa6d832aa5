"""Keys: nothing that changes the KV is left out, nothing collides, and they are the same in every process."""

import json
import os
import subprocess
import sys

import hypothesis.strategies as st
from hypothesis import given, settings

from lmcache.core.keys import (
    HASH_BYTES,
    ChainHasher,
    ContentItem,
    chain_root,
    namespace_digest,
    split_hashes,
    tenant_of,
)

FACTS = {"model": "org/model", "dtype": "bfloat16", "geometry.group.0": "full, 16 tokens per block"}
TOKENS = list(range(1000, 1040))

NASTY = st.text(alphabet="ab/@:=%|\0\u00e9\U0001f600 .-", max_size=6)


def hashes(tokens: list[int], *, chunk: int = 8, items: tuple[ContentItem, ...] = (), **content: str) -> list[bytes]:
    return [*split_hashes(ChainHasher(chain_root(content), chunk, items).extend_to(tokens))]


def test_only_whole_chunks_are_hashed_and_each_hash_is_sixteen_bytes() -> None:
    found = hashes(TOKENS[:23])

    assert len(found) == 2
    assert {len(chain_hash) for chain_hash in found} == {HASH_BYTES}


def test_growing_token_by_token_gives_the_same_hashes_as_all_at_once() -> None:
    hasher = ChainHasher(chain_root({}), 8)
    for end in range(len(TOKENS) + 1):
        joined = hasher.extend_to(TOKENS[:end])
        assert len(hasher) == end // 8
        assert joined == b"".join(hashes(TOKENS[:end]))


def test_a_hash_stands_for_every_token_before_it() -> None:
    other = [TOKENS[0] + 1, *TOKENS[1:]]

    assert not set(hashes(TOKENS)) & set(hashes(other))
    assert hashes(TOKENS)[:2] == hashes([*TOKENS[:16], *[7] * 24])[:2]


def test_equal_chunks_at_other_places_of_a_prompt_have_other_hashes() -> None:
    found = hashes([5] * 40)

    assert len(set(found)) == len(found) == 5


def test_salt_and_lora_change_every_hash() -> None:
    roots = [{}, {"salt": "a"}, {"salt": "b"}, {"lora": "a"}, {"salt": "a", "lora": "a"}, {"salt": ""}]
    found = [tuple(hashes(TOKENS, **content)) for content in roots]

    assert len({chain_hash for each in found for chain_hash in each}) == 5 * len(roots)


def test_a_tenant_has_one_name_that_does_not_show_its_salt() -> None:
    assert tenant_of("") == ""
    assert tenant_of("secret") == tenant_of("secret") != tenant_of("secret ")
    assert "secret" not in tenant_of("secret")
    assert len(tenant_of("\ud800" * 1000)) == 16


def test_an_image_changes_its_own_chunks_and_those_after_and_no_others() -> None:
    plain = hashes(TOKENS)
    image = hashes(TOKENS, items=(ContentItem(10, 20, b"x" * 32),))

    assert [a == b for a, b in zip(plain, image, strict=True)] == [True, False, False, False, False]


def test_two_images_that_share_all_but_one_bit_of_their_digest_differ() -> None:
    a, b = bytes(31) + b"\0", bytes(31) + b"\1"

    assert hashes(TOKENS, items=(ContentItem(8, 16, a),))[1] != hashes(TOKENS, items=(ContentItem(8, 16, b),))[1]


def test_one_image_at_another_offset_is_other_content_even_where_only_its_tail_is_in_the_chunk() -> None:
    digest = b"x" * 32
    places = [ContentItem(start, 30, digest) for start in (0, 4, 7, 8, 9, 15)]
    found = [hashes(TOKENS, items=(item,))[2] for item in places]

    assert len(set(found)) == len(places)


def test_two_images_in_one_chunk_are_not_one_image_with_their_digests_joined() -> None:
    joined = hashes(TOKENS, items=(ContentItem(0, 4, b"ab"),))
    apart = hashes(TOKENS, items=(ContentItem(0, 4, b"a"), ContentItem(0, 4, b"b")))

    assert joined[0] != apart[0]


def test_an_image_that_ends_where_a_chunk_begins_is_not_in_it() -> None:
    assert hashes(TOKENS, items=(ContentItem(40, 48, b"x"),)) == hashes(TOKENS)
    with_image = hashes(TOKENS, items=(ContentItem(0, 8, b"x"),))
    assert with_image[0] != hashes(TOKENS)[0]


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(NASTY, NASTY, max_size=3), st.dictionaries(NASTY, NASTY, max_size=3))
def test_two_sets_of_facts_have_one_name_only_if_they_are_equal(a: dict[str, str], b: dict[str, str]) -> None:
    assert (namespace_digest(a) == namespace_digest(b)) == (a == b)
    assert (chain_root(a) == chain_root(b)) == (a == b)


def test_moving_a_separator_between_name_and_value_changes_the_digest() -> None:
    names = [{"a": "bc"}, {"ab": "c"}, {"a": "b", "c": ""}, {"": "abc"}, {"abc": ""}]

    assert len({namespace_digest(facts) for facts in names}) == len(names)


def test_the_order_in_which_facts_are_given_does_not_matter() -> None:
    assert namespace_digest(FACTS) == namespace_digest(dict(reversed(FACTS.items())))


def test_a_namespace_and_a_chain_of_the_same_facts_have_different_names() -> None:
    assert namespace_digest(FACTS) != chain_root(FACTS)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=24), st.integers(0, 23), st.integers(0, 2**32 - 1))
def test_any_other_token_gives_another_hash(tokens: list[int], at: int, token: int) -> None:
    at %= len(tokens) // 8 * 8
    changed = [*tokens[:at], token, *tokens[at + 1 :]]

    assert (hashes(tokens) == hashes(changed)) == (tokens[at] == token)


SCRIPT = """
import json
from lmcache.core.keys import *
facts, tokens = json.loads(input())
items = (ContentItem(3, 12, bytes(range(32))),)
hasher = ChainHasher(chain_root({"salt": "s\\u00e9", "lora": "l"}), 8, items)
print(namespace_digest(facts).hex(), hasher.extend_to(tokens).hex())
"""


def test_other_processes_with_other_hash_seeds_give_the_same_keys() -> None:
    items = (ContentItem(3, 12, bytes(range(32))),)
    hasher = ChainHasher(chain_root({"lora": "l", "salt": "s\u00e9"}), 8, items)
    expected = f"{namespace_digest(FACTS).hex()} {hasher.extend_to(TOKENS).hex()}"
    for seed in ("0", "1", "random"):
        answer = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            input=json.dumps([FACTS, TOKENS]),
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert answer.stdout.strip() == expected


def test_keys_never_change_between_versions() -> None:
    """Stored objects outlive a release: a change here is a new protocol version, and a cold cache for everybody."""
    assert namespace_digest({"a": "b"}).hex() == "ceb890ab876515f6d76014017cbe5f10"
    assert hashes(list(range(8)), salt="s")[0].hex() == "e95d21c7def1bb38b1b933fe6cae543c"
