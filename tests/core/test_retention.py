"""Quotas, guarantees, TTLs, priorities, ends of sessions, pins: what each does to who stays, whatever the policy."""

import pytest

from lmcache.core.accounts import Limits
from lmcache.core.cache import Cache
from lmcache.core.cells import CellAllocator
from lmcache.core.hints import NO_HINTS, Hints, Priority, combined
from lmcache.core.index import Namespace
from lmcache.core.invariants import check_invariants
from lmcache.core.keys import ChainHash, NamespaceDigest
from lmcache.core.policy import EvictionPolicy
from lmcache.core.protocol import ErrorCode
from lmcache.errors import Refused
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.plugins.eviction.fifo import FIFO
from lmcache.plugins.eviction.lru import LRU

CHUNK, CELL = 16, 4096
OWNER = 1
HIGH, LOW = Hints(priority=Priority.HIGH), Hints(priority=Priority.LOW)


def prompt(name: str, chunks: int) -> list[ChainHash]:
    return [ChainHash(f"{name:>12}{chunk:04}".encode()) for chunk in range(chunks)]


class Shelf:
    """A cache of one-cell chunks, and what users do to it in few words."""

    def __init__(self, cells: int, limits: Limits | None = None, policy: EvictionPolicy | None = None) -> None:
        self.cache = Cache(CellAllocator(cells), policy or LRU(), limits=limits)
        self.cache.allocator.back(cells)
        digest = NamespaceDigest(b"n" * 16)
        geometry = Geometry((KVGroup(GroupKind.FULL, CHUNK, (CELL,)),))
        self.large = cells > 100
        self.space = Namespace(digest, {}, geometry, CHUNK, CELL)
        self.cache.namespaces[digest] = self.space

    def check(self) -> None:
        if not self.large:  # it takes time in the square of the chunks
            check_invariants(self.cache)

    def store(self, name: str, chunks: int, tenant: str = "", hints: Hints = NO_HINTS) -> int:
        """Chunks of the prompt that are there afterwards."""
        placed = self.cache.reserve(OWNER, self.space, tenant, b"", prompt(name, chunks), 0, 0, hints)
        if placed.reservation:
            self.cache.commit(OWNER, placed.reservation)
        self.check()
        return len(placed.placed)

    def hit(self, name: str, chunks: int = 99, hints: Hints = NO_HINTS) -> int:
        """Chunks that a lookup hits. The load ends at once."""
        ticket = self.cache.lookup(OWNER, self.space, prompt(name, chunks), chunks * CHUNK, hints=hints)
        if ticket is None:
            return 0
        assert self.cache.confirm(ticket.id, self.space, 0)
        self.check()
        return ticket.hit.tokens // CHUNK

    def there(self, name: str) -> int:
        """Leading chunks that are there, without using them."""
        return sum(each in self.space.nodes for each in prompt(name, 99))

    def advance(self, now: float) -> None:
        self.cache.advance(now)
        self.check()


# --------------------------------------------------------------------------------------------------------------- quotas


def test_a_tenant_over_its_quota_gives_up_its_own_chunks_and_nobody_elses() -> None:
    shelf = Shelf(20, Limits({"small": 4}))
    shelf.store("others", 10)
    shelf.store("first", 3, "small")

    assert shelf.store("second", 3, "small") == 3
    assert (shelf.there("first"), shelf.there("second"), shelf.there("others")) == (1, 3, 10)
    assert shelf.cache.allocator.free == 6  # room that it may not take


def test_a_prompt_larger_than_the_quota_is_stored_as_far_as_it_goes() -> None:
    shelf = Shelf(20, Limits({"small": 4}))

    assert shelf.store("long", 9, "small") == 4
    assert shelf.hit("long") == 4


def test_a_quota_finds_its_tenants_chunks_behind_any_number_of_others() -> None:
    shelf = Shelf(20_000, Limits({"small": 4}))
    shelf.store("others", 12_000)
    shelf.store("first", 4, "small")
    shelf.hit("first")
    shelf.store("more", 4000)

    assert shelf.store("second", 2, "small") == 2
    assert (shelf.there("first"), shelf.cache.counters.chunks_evicted) == (2, 2)


def test_each_tenant_that_is_not_named_has_the_quota_of_everybody_else() -> None:
    shelf = Shelf(20, Limits({"*": 3, "large": 9}))

    assert shelf.store("a", 5, "one") == 3
    assert shelf.store("b", 5, "two") == 3
    assert shelf.store("c", 8, "large") == 8
    assert {account.name: account.cells for account in shelf.cache.residents.accounts.all if account.name} == {
        "one": 3, "two": 3, "large": 8,
    }  # fmt: skip


def test_accounts_of_tenants_that_have_gone_are_forgotten_but_for_those_that_the_user_names() -> None:
    shelf = Shelf(6, Limits({"*": 2, "named": 3}))
    for number in range(50):
        shelf.store(f"p{number}", 2, f"tenant {number}")

    names = {account.name for account in shelf.cache.residents.accounts.all}
    assert names == {"", "named", "tenant 47", "tenant 48", "tenant 49"}


def test_a_chunk_counts_for_the_tenant_that_stored_it_first() -> None:
    shelf = Shelf(20, Limits({"small": 2, "other": 2}))
    shelf.store("shared", 2, "small")

    assert shelf.store("shared", 3, "other") == 3
    assert {account.name: account.cells for account in shelf.cache.residents.accounts.all} == {
        "": 0, "small": 2, "other": 1,
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- guarantees


@pytest.mark.parametrize("policy", [LRU, FIFO])
def test_others_cannot_take_what_a_tenant_is_guaranteed(policy: type[EvictionPolicy]) -> None:
    shelf = Shelf(10, Limits(guarantees={"paid": 4}), policy())
    shelf.store("precious", 6, "paid")

    assert shelf.store("flood", 10) == 6
    assert (shelf.there("precious"), shelf.there("flood")) == (4, 6)
    assert shelf.store("another", 9) == 6
    assert (shelf.there("precious"), shelf.there("another")) == (4, 6)


def test_a_guarantee_reserves_no_room_that_is_not_used() -> None:
    shelf = Shelf(10, Limits(guarantees={"paid": 4}))
    assert shelf.store("flood", 10) == 10

    assert shelf.store("precious", 4, "paid") == 4
    assert shelf.there("flood") == 6


def test_a_tenant_may_replace_its_own_chunks_within_its_guarantee() -> None:
    shelf = Shelf(6, Limits(guarantees={"paid": 4}))
    shelf.store("others", 2)
    shelf.store("first", 4, "paid")
    shelf.hit("others")

    assert shelf.store("second", 4, "paid") == 4
    assert (shelf.there("first"), shelf.there("second"), shelf.there("others")) == (0, 4, 2)


def test_the_search_gets_past_any_number_of_guaranteed_chunks() -> None:
    shelf = Shelf(10_000, Limits(guarantees={"paid": 9000}))
    shelf.store("precious", 9000, "paid")
    shelf.store("others", 1000)

    assert shelf.store("new", 500) == 500
    assert (shelf.there("precious"), shelf.cache.counters.chunks_evicted) == (99, 500)
    assert shelf.cache.residents.accounts.of("paid").cells == 9000


# ------------------------------------------------------------------------------------------------------------------ TTL


def test_a_chunk_is_served_until_its_ttl_is_over_and_its_cells_come_back_then() -> None:
    shelf = Shelf(10)
    shelf.advance(100.0)
    shelf.store("secret", 3, hints=Hints(ttl_s=60))
    assert (shelf.cache.next_event, shelf.hit("secret", hints=Hints(ttl_s=60))) == (160.0, 3)

    shelf.advance(159.9)
    assert shelf.there("secret") == 3
    shelf.advance(160.0)
    assert (shelf.there("secret"), shelf.cache.allocator.free, shelf.cache.counters.chunks_expired) == (0, 10, 3)
    assert shelf.cache.next_event == float("inf")


def test_what_has_expired_and_is_still_being_read_is_served_to_nobody_else() -> None:
    shelf = Shelf(10)
    shelf.store("secret", 3, hints=Hints(ttl_s=60))
    ticket = shelf.cache.lookup(OWNER, shelf.space, prompt("secret", 3), 99, hints=Hints(ttl_s=60))
    assert ticket

    shelf.advance(61.0)
    assert (shelf.there("secret"), shelf.hit("secret")) == (3, 0)
    assert shelf.cache.confirm(ticket.id, shelf.space, 0)
    shelf.advance(62.0)
    assert shelf.there("secret") == 0


def test_of_several_requests_the_one_that_wants_a_chunk_longest_has_it_so() -> None:
    shelf = Shelf(20)
    shelf.store("shared", 2, hints=Hints(ttl_s=10))
    shelf.hit("shared", hints=Hints(ttl_s=50))
    shelf.store("for good", 2, hints=Hints(ttl_s=10))
    shelf.hit("for good")  # says nothing: as long as there is room
    shelf.store("brief", 2, hints=Hints(ttl_s=10))
    shelf.hit("brief", hints=Hints(ttl_s=5))

    shelf.advance(11.0)
    assert (shelf.there("shared"), shelf.there("for good"), shelf.there("brief")) == (2, 2, 0)
    shelf.advance(51.0)
    assert (shelf.there("shared"), shelf.there("for good")) == (0, 2)


def test_a_trunk_never_expires_before_its_branches() -> None:
    shelf = Shelf(20)
    shelf.store("p", 2, hints=Hints(ttl_s=10))
    assert shelf.store("p", 5, hints=Hints(ttl_s=90)) == 5

    shelf.advance(50.0)
    assert shelf.hit("p", hints=Hints(ttl_s=1)) == 5
    shelf.advance(90.0)
    assert shelf.there("p") == 0


def test_chunks_that_go_before_they_expire_leave_no_trace() -> None:
    shelf = Shelf(8)
    for number in range(4000):
        shelf.store(f"p{number}", 2, hints=Hints(ttl_s=10_000))

    assert len(shelf.cache.residents._deadlines._entries) <= 1100


# ------------------------------------------------------------------------------------------------ priority and sessions


@pytest.mark.parametrize("policy", [LRU, FIFO])
def test_low_goes_before_normal_and_normal_before_high(policy: type[EvictionPolicy]) -> None:
    shelf = Shelf(9, policy=policy())
    shelf.store("high", 3, hints=HIGH)
    shelf.store("normal", 3)
    shelf.store("low", 3, hints=LOW)

    shelf.store("a", 3)
    assert (shelf.there("high"), shelf.there("normal"), shelf.there("low")) == (3, 3, 0)
    shelf.store("b", 3)
    assert (shelf.there("high"), shelf.there("normal"), shelf.there("a")) == (3, 0, 3)
    shelf.store("c", 9)  # it is served in full: high is an order, and never a refusal
    assert (shelf.there("high"), shelf.there("c")) == (0, 9)


def test_high_chunks_take_their_turn_with_all_others_once_they_fill_more_than_half() -> None:
    shelf = Shelf(8)
    shelf.store("high", 5, hints=HIGH)
    shelf.store("normal", 3)

    shelf.store("new", 1)
    assert (shelf.there("high"), shelf.there("normal")) == (4, 3)
    shelf.store("newer", 1)
    assert (shelf.there("high"), shelf.there("normal")) == (4, 2)


def test_a_silent_request_takes_a_low_chunk_for_normal_and_leaves_a_high_one_high() -> None:
    shelf = Shelf(20)
    shelf.store("low", 2, hints=LOW)
    shelf.store("high", 2, hints=HIGH)
    shelf.hit("low")
    shelf.hit("high")

    priorities = [shelf.space.nodes[prompt(name, 1)[0]].priority for name in ("low", "high")]
    assert priorities == [Priority.NORMAL, Priority.HIGH]


def test_the_end_of_a_session_frees_what_only_it_used_and_keeps_what_others_go_through() -> None:
    shelf = Shelf(9)
    shelf.store("p", 3)  # a system prompt ...
    chain = [*prompt("p", 3), *prompt("other", 2)]
    placed = shelf.cache.reserve(OWNER, shelf.space, "", b"", chain, 0, 0)  # ... that somebody else goes on from, too
    shelf.cache.commit(OWNER, placed.reservation)
    shelf.store("p", 5, hints=Hints(ends_session=True))

    shelf.store("new", 4)  # room for two: the session's own two chunks go, though they were used last
    assert (shelf.there("p"), shelf.there("other"), shelf.there("new")) == (3, 2, 4)


def test_several_voices_on_one_request_are_heard_as_the_strictest() -> None:
    assert combined([]) == NO_HINTS
    assert combined([Hints(ttl_s=5), NO_HINTS, Hints(ttl_s=3, priority=Priority.HIGH), LOW]) == Hints(3, Priority.LOW)
    assert combined([Hints(ends_session=True), HIGH]) == Hints(None, Priority.HIGH, ends_session=True)


@pytest.mark.parametrize("ttl", [-1.0, float("nan"), float("inf")])
def test_a_ttl_that_is_no_time_is_refused(ttl: float) -> None:
    with pytest.raises(ValueError, match="a TTL of"):
        Hints(ttl_s=ttl)


# ----------------------------------------------------------------------------------------------------------------- pins


def test_a_pinned_prefix_stays_until_its_time_is_over_or_it_is_unpinned() -> None:
    shelf = Shelf(12)
    shelf.store("system", 3)
    pin = shelf.cache.pin(shelf.space, prompt("system", 5), 60.0)
    assert pin is not None
    assert (pin.tokens, shelf.cache.prefix_pins.cells, shelf.cache.next_event) == (3 * CHUNK, 3, 60.0)

    assert shelf.store("flood", 12) == 9
    assert (shelf.there("system"), shelf.there("flood")) == (3, 9)
    shelf.advance(60.0)
    assert not shelf.cache.prefix_pins.all
    assert shelf.store("second flood", 12) == 12

    pin = shelf.cache.pin(shelf.space, prompt("second flood", 2), 60.0)
    assert pin is not None
    shelf.cache.unpin(pin.id)
    assert shelf.store("third flood", 12) == 12


def test_a_pin_outlives_the_ttl_of_what_it_pins() -> None:
    shelf = Shelf(12)
    shelf.store("system", 3, hints=Hints(ttl_s=10))
    shelf.cache.pin(shelf.space, prompt("system", 3), 60.0)

    shelf.advance(59.0)
    assert shelf.hit("system", hints=Hints(ttl_s=0)) == 3
    shelf.advance(60.0)
    assert shelf.there("system") == 0


def test_pins_hold_a_quarter_of_l1_at_most_and_what_two_of_them_hold_counts_once() -> None:
    shelf = Shelf(16)
    shelf.store("system", 5)
    shelf.cache.pin(shelf.space, prompt("system", 3), 60.0)
    shelf.cache.pin(shelf.space, prompt("system", 4), 60.0)

    with pytest.raises(Refused, match="pins would hold 5 cells; 4 are allowed") as refused:
        shelf.cache.pin(shelf.space, prompt("system", 5), 60.0)
    assert refused.value.code == ErrorCode.FULL
    assert shelf.cache.prefix_pins.cells == 4


def test_nothing_is_pinned_of_a_prompt_that_is_not_stored() -> None:
    shelf = Shelf(16)

    assert shelf.cache.pin(shelf.space, prompt("unknown", 3), 60.0) is None
    with pytest.raises(Refused, match="there is no pin 7, or it has ended"):
        shelf.cache.unpin(7)
