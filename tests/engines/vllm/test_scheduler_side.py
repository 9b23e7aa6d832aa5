"""The scheduler's half against a link that answers when the test says so."""

import time
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from lmcache.core.hints import NO_HINTS, Hints, Priority
from lmcache.core.keys import ChainHasher, chain_root
from lmcache.core.protocol import Found
from lmcache.engines.vllm.offering import Offering
from lmcache.engines.vllm.orders import NULL_BLOCK, LoadOrder, StepOrders
from lmcache.engines.vllm.scheduler import PATIENCE_S, SchedulerSide
from lmcache.errors import DeadlineExceeded, LMCacheError, ServerUnavailable
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

CHUNK = 8
BLOCK = 4
GEOMETRY = Geometry((KVGroup(GroupKind.FULL, BLOCK, (64,)), KVGroup(GroupKind.SCRATCH, 0, ())))


@attrs.define
class Lookup:
    """A lookup that was sent; the test sets what comes of it."""

    tenant: str
    hashes: bytes
    limit: int
    outcome: Found | LMCacheError | None = None

    patience: list[float] = attrs.Factory(list)
    """Of every question for the answer."""
    promised: int = 0
    """As `PendingHit` says it of an answer that tiers are still asked for."""

    def poll(self, patience: float = 0.0) -> Found | None:
        self.patience.append(patience)
        time.sleep(patience if self.outcome is None else 0.0)
        if isinstance(self.outcome, LMCacheError):
            raise self.outcome
        return self.outcome

    def answer(self, tokens: int, ticket: int = 7) -> None:
        self.outcome = Found(1, ticket if tokens else 0, tokens)


class FakeLink:
    """Also the client: `away` makes it one without a server."""

    def __init__(self, epoch: str = "first", chunk_size: int = CHUNK) -> None:
        self.epoch = epoch
        self.chunk_size = chunk_size
        self.namespace = f"{epoch} {chunk_size}".encode()
        self.lookups: list[Lookup] = []
        self.hints: list[Hints] = []
        self.dropped: list[int] = []
        self.away = False
        self.closed = False

    def lookup(
        self, tenant: str, hashes: bytes, limit: int, hints: Hints = NO_HINTS, prefill_speed: float = 0.0
    ) -> Lookup:
        self.lookups.append(Lookup(tenant, hashes, limit))
        self.hints.append(hints)
        return self.lookups[-1]

    def drop(self, ticket: int) -> None:
        self.dropped.append(ticket)


class FakeClient:
    def __init__(self) -> None:
        self.current: FakeLink | None = FakeLink()
        self.closed = False

    def link(self) -> FakeLink:
        if self.current is None:
            raise ServerUnavailable("no server")
        return self.current

    def close(self) -> None:
        self.closed = True


class FakeRequest:
    def __init__(self, name: str = "r", tokens: int = 20, **different: Any) -> None:
        self.request_id = name
        self.all_token_ids = list(range(100, 100 + tokens))
        self.num_prompt_tokens = tokens
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.cache_salt: str | None = None
        self.lora_request = None
        self.prompt_embeds = None
        self.mm_features: list[Any] = []
        self.resumable = False
        self.skip_reading_prefix_cache = False
        self.kv_transfer_params = None
        for name_, value in different.items():
            setattr(self, name_, value)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def generate(self, tokens: int) -> None:
        self.all_token_ids += range(900, 900 + tokens)

    def hashes(self, chunks: int) -> bytes:
        return ChainHasher(chain_root({}), CHUNK).extend_to(self.all_token_ids)[: chunks * 16]


class Stage:
    """A scheduler's half and what it talks to."""

    def __init__(self, decode: bool = True, **options: bool) -> None:
        self.client = FakeClient()
        self.side = SchedulerSide(self.client, GEOMETRY, Offering(GEOMETRY, decode=decode), **options)

    @property
    def link(self) -> FakeLink:
        assert self.client.current is not None
        return self.client.current

    def hit(self, request: FakeRequest, tokens: int, ticket: int = 7) -> None:
        self.side.arrived(request)
        self.link.lookups[-1].answer(tokens, ticket)

    def step(self, request: FakeRequest, tokens: int) -> StepOrders:
        """One step of vLLM for one request, whose blocks are numbered from 50 on."""
        orders = self.side.step({request.request_id: tokens}, lambda _: (list(range(50, 90)), [1]))
        request.num_computed_tokens += tokens
        return orders

    def load(self, request: FakeRequest, external: int) -> tuple[LoadOrder, ...]:
        self.side.allocated(request, lambda: (list(range(50, 90)), [1]), external)
        return self.side.step({}, lambda _: None).loads


@pytest.fixture
def stage() -> Stage:
    return Stage()


# ----------------------------------------------------------------------------------------------------------- looking up


def test_a_prompt_is_looked_up_when_it_arrives_and_polled_when_its_turn_comes(stage: Stage) -> None:
    request = FakeRequest()
    stage.side.arrived(request)
    [lookup] = stage.link.lookups
    assert (lookup.hashes, lookup.limit, lookup.tenant) == (request.hashes(2), 19, "")
    assert stage.side.matched(request, 0) == (None, False)
    lookup.answer(16)
    assert stage.side.matched(request, 4) == (12, True)
    assert stage.side.matched(request, 0) == (16, True)
    assert len(stage.link.lookups) == 1


def test_a_step_waits_a_moment_for_answers_and_for_each_lookup_once(stage: Stage) -> None:
    first, second, late = (FakeRequest(name) for name in ("first", "second", "late"))
    for request in (first, second):
        stage.side.arrived(request)
    assert [stage.side.matched(request, 0) for request in (first, second, first)] == [(None, False)] * 3
    asked_first, asked_second = stage.link.lookups
    # the first one has used up what the step had for both
    assert (asked_first.patience, asked_second.patience) == ([PATIENCE_S, 0.0], [0.0])

    stage.side.step({}, lambda _: None)
    stage.side.arrived(late)
    stage.link.lookups[-1].answer(16)
    asked_second.answer(8)
    assert [stage.side.matched(request, 0) for request in (second, late)] == [(8, True), (16, True)]
    assert asked_second.patience == [0.0, 0.0]
    assert stage.link.lookups[-1].patience == [PATIENCE_S]


def test_a_prompt_shorter_than_a_chunk_is_not_looked_up(stage: Stage) -> None:
    request = FakeRequest(tokens=7)
    stage.side.arrived(request)
    assert stage.side.matched(request, 0) == (0, False)
    assert stage.link.lookups == []


def test_a_hit_that_the_engine_has_itself_is_not_loaded_and_its_ticket_is_dropped(stage: Stage) -> None:
    request = FakeRequest()
    stage.hit(request, 8)
    assert stage.side.matched(request, 8) == (0, False)
    assert stage.load(request, 0) == ()
    assert stage.link.dropped == [7]


def test_without_a_server_nothing_waits_and_a_server_that_comes_by_its_turn_is_asked(stage: Stage) -> None:
    request, link = FakeRequest(), stage.link
    stage.client.current = None
    stage.side.arrived(request)
    assert stage.side.matched(request, 0) == (0, False)
    stage.client.current = link
    assert stage.side.matched(request, 0) == (None, False)
    link.lookups[0].answer(16)
    assert stage.side.matched(request, 0) == (16, True)


def test_an_answer_that_does_not_come_in_time_is_a_miss_for_good(stage: Stage) -> None:
    request = FakeRequest()
    stage.side.arrived(request)
    stage.link.lookups[0].outcome = DeadlineExceeded("late")
    assert stage.side.matched(request, 0) == (0, False)
    assert stage.side.matched(request, 0) == (0, False)
    assert len(stage.link.lookups) == 1


def test_a_request_that_was_queued_while_others_stored_is_looked_up_again_once(stage: Stage) -> None:
    first, queued = FakeRequest("first"), FakeRequest("queued")
    for request in (first, queued):
        stage.hit(request, 0)
    stage.side.matched(first, 0)
    assert stage.step(first, 20).stores
    assert stage.side.matched(queued, 0) == (None, False)
    stage.link.lookups[-1].answer(16)
    assert stage.side.matched(queued, 0) == (16, True)
    stage.step(first, 0)
    assert stage.side.matched(queued, 0) == (16, True)
    assert len(stage.link.lookups) == 3


def test_a_full_hit_is_not_looked_up_again(stage: Stage) -> None:
    first, queued = FakeRequest("first"), FakeRequest("queued")
    stage.hit(first, 0)
    stage.hit(queued, 16)
    stage.side.matched(first, 0)
    stage.step(first, 20)
    assert stage.side.matched(queued, 0) == (16, True)
    assert stage.link.dropped == []


@pytest.mark.parametrize("options", [{"loads": False}, {}])
def test_what_must_not_be_read_is_not_looked_up(options: dict[str, bool]) -> None:
    stage = Stage(**options)
    request = FakeRequest(skip_reading_prefix_cache=not options)
    stage.side.arrived(request)
    assert stage.side.matched(request, 0) == (0, False)
    assert stage.link.lookups == []
    assert stage.step(request, 20).stores


# -------------------------------------------------------------------------------------------------------------- loading


def test_a_load_names_its_ticket_its_epoch_and_the_blocks(stage: Stage) -> None:
    request = FakeRequest()
    stage.hit(request, 16)
    stage.side.matched(request, 4)
    # vLLM may take less than it was offered
    [order] = stage.load(request, 8)
    assert order == LoadOrder("r", "first", 7, 4, 12, (list(range(50, 90)), [1]))
    assert stage.side.step({}, lambda _: None).loads == ()


def test_after_a_load_the_second_allocation_drops_nothing(stage: Stage) -> None:
    request = FakeRequest()
    stage.hit(request, 16)
    stage.side.matched(request, 0)
    stage.load(request, 16)
    stage.side.loaded(["r"], [])
    stage.load(request, 0)
    assert stage.link.dropped == []


def test_a_failed_load_drops_the_ticket_and_is_never_tried_again(stage: Stage) -> None:
    request = FakeRequest()
    stage.hit(request, 16)
    stage.side.matched(request, 0)
    stage.load(request, 16)
    stage.side.loaded(["r"], ["r"])
    assert stage.link.dropped == [7]
    assert stage.side.matched(request, 0) == (0, False)
    request.num_preemptions = 1
    assert stage.side.matched(request, 0) == (0, False)
    assert len(stage.link.lookups) == 1


def test_a_load_that_nobody_promised_is_ordered_without_a_ticket_so_that_it_fails(stage: Stage) -> None:
    # vLLM waits for an outcome of every load, and without one for ever
    [order] = stage.load(FakeRequest(), 8)
    assert (order.request, order.epoch, order.ticket) == ("r", "", 0)


def test_a_preempted_request_is_looked_up_with_what_it_has_generated(stage: Stage) -> None:
    request = FakeRequest()
    stage.hit(request, 0)
    stage.side.matched(request, 0)
    request.generate(5)
    request.num_preemptions = 1
    assert stage.side.matched(request, 0) == (None, False)
    assert (stage.link.lookups[-1].hashes, stage.link.lookups[-1].limit) == (request.hashes(3), 24)


# -------------------------------------------------------------------------------------------------------------- storing


def test_chunks_are_offered_in_the_step_that_completes_them(stage: Stage) -> None:
    request = FakeRequest()
    stage.hit(request, 0)
    offered = [stage.step(request, tokens).stores for tokens in (7, 0, 4, 9)]
    assert [len(orders) for orders in offered] == [0, 0, 1, 1]
    [first], [second] = offered[2], offered[3]
    assert (first.first, first.hashes, first.blocks) == (0, request.hashes(1), ([50, 51], []))
    assert (second.first, second.hashes, second.blocks) == (1, request.hashes(2)[16:], ([52, 53], []))


def test_tokens_that_are_drafted_or_not_sampled_yet_are_not_stored(stage: Stage) -> None:
    request = FakeRequest(tokens=14)
    stage.hit(request, 0)
    stage.step(request, 14)
    # a step that verifies three drafts: positions beyond the known tokens may be refused
    request.generate(1)
    assert stage.step(request, 4).stores == ()
    request.num_computed_tokens -= 3
    request.generate(1)
    assert [order.first for order in stage.step(request, 1).stores] == [1]


def test_chunks_that_sampled_tokens_complete_are_stored_unless_that_is_switched_off() -> None:
    for decode, chunks in ((True, 2), (False, 1)):
        stage = Stage(decode=decode)
        request = FakeRequest(tokens=14)
        stage.side.arrived(request)
        orders = [*stage.step(request, 14).stores]
        for _ in range(4):
            request.generate(1)
            orders += stage.step(request, 1).stores
        assert sum(len(order.hashes) // 16 for order in orders) == chunks


def test_a_resumed_request_is_offered_from_the_start_because_its_blocks_are_others(stage: Stage) -> None:
    request = FakeRequest()
    stage.hit(request, 0)
    assert [order.first for order in stage.step(request, 17).stores] == [0]
    request.num_computed_tokens, request.num_preemptions = 0, 1
    [order] = stage.step(request, 20).stores
    assert (order.first, order.hashes) == (0, request.hashes(2))


def test_a_new_server_is_offered_everything_that_the_request_holds(stage: Stage) -> None:
    request = FakeRequest()
    stage.hit(request, 0)
    stage.step(request, 9)
    stage.client.current = None
    assert stage.step(request, 2) == StepOrders()
    stage.client.current = FakeLink("second", chunk_size=4)
    orders = stage.step(request, 1)
    assert orders.namespace == b"second 4"
    [order] = orders.stores
    assert (order.first, len(order.hashes) // 16, order.blocks) == (0, 3, ([50, 51, 52], []))


WINDOW, ALIGNED, EVERY = 6, 8, 4
MIXED = Geometry(
    (
        KVGroup(GroupKind.FULL, BLOCK, (64,)),
        KVGroup(GroupKind.SLIDING_WINDOW, 2, (64,), window=WINDOW),
        KVGroup(GroupKind.RECURRENT, ALIGNED, (64,)),
        KVGroup(GroupKind.RECURRENT, EVERY, (64,)),
    )
)


class MixedStage(Stage):
    """Full, window, snapshots that are handed over (group 2), and snapshots in their places (group 3)."""

    def __init__(self) -> None:
        self.client = FakeClient()
        self.side = SchedulerSide(self.client, MIXED, Offering(MIXED, [2]))

    def blocks(self, request: FakeRequest, tokens: int, table: tuple[list[int], ...], *snapshots: Any) -> Any:
        """The blocks that a step of so many tokens orders to store."""
        handed = {request.request_id: list(snapshots)}
        [order] = self.side.step({request.request_id: tokens}, lambda _: table, handed).stores
        request.num_computed_tokens += tokens
        return order.blocks


def test_of_windows_and_snapshots_only_what_a_chunk_keeps_is_ordered() -> None:
    stage, request = MixedStage(), FakeRequest()
    stage.hit(request, 0)
    table = ([10, 11, 12, 13, 14], list(range(20, 30)), [30, 31, 32], [40, 41, 42, 43, 44])
    assert stage.blocks(request, 20, table, (2, 31, 16)) == (
        [10, 11, 12, 13],
        # three blocks of two tokens make the window of six
        [21, 22, 23, 25, 26, 27],
        # the first chunk's state was never kept
        [NULL_BLOCK, 31],
        [41, 43],
    )


def test_blocks_that_vllm_no_longer_holds_are_ordered_as_the_null_block() -> None:
    stage, request = MixedStage(), FakeRequest()
    stage.hit(request, 0)
    table = ([10, 11, 12, 13], [0, 0, 0, 0, 0, 25, 26, 27], [0, 31], [0, 0, 42, 43])
    assert stage.blocks(request, 16, table, (2, 31, 16)) == (
        [10, 11, 12, 13],
        [NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 25, 26, 27],
        [NULL_BLOCK, 31],
        [NULL_BLOCK, 43],
    )


def test_a_snapshot_is_taken_from_the_hand_over_and_never_from_its_place() -> None:
    stage, request = MixedStage(), FakeRequest()
    stage.hit(request, 0)
    table = ([10, 11], [20, 21, 22, 23], [30], [40, 41])
    # 12 tokens are no chunk's end, and group 3 is none of those that are handed over
    assert stage.blocks(request, 8, table, (2, 99, 12), (3, 98, 8))[2:] == ([NULL_BLOCK], [41])


def test_a_table_that_ends_early_is_filled_up_with_the_null_block() -> None:
    stage, request = MixedStage(), FakeRequest()
    stage.hit(request, 0)
    assert stage.blocks(request, 8, ([10], [20, 21], [30], []))[0] == [10, NULL_BLOCK]


def test_a_hit_that_vllm_could_only_get_at_a_chunk_end_is_not_looked_up_again_for_a_longer_one() -> None:
    stage, first, queued = MixedStage(), FakeRequest("first"), FakeRequest("queued", tokens=16)
    stage.hit(first, 0)
    # of 16 tokens one has to be computed, and windows serve chunk ends only
    stage.hit(queued, 8)
    stage.side.matched(first, 0)
    stage.blocks(first, 20, ([9] * 5, [9] * 10, [9] * 3, [9] * 5))
    assert stage.side.matched(queued, 0) == (8, True)
    assert stage.link.dropped == []


def test_a_consumer_stores_nothing() -> None:
    stage = Stage(stores=False)
    request = FakeRequest()
    stage.side.arrived(request)
    assert stage.step(request, 20).stores == ()


# --------------------------------------------------------------------------------------------------------------- ending


def test_a_request_that_ends_before_its_answer_has_its_ticket_dropped_when_it_comes(stage: Stage) -> None:
    request = FakeRequest()
    stage.side.arrived(request)
    stage.side.ended(request)
    assert stage.side.busy()
    stage.link.lookups[0].answer(16, ticket=9)
    assert not stage.side.busy()
    assert stage.link.dropped == [9]


def test_a_request_that_ends_while_tiers_are_looked_at_lets_go_at_once(stage: Stage) -> None:
    request = FakeRequest()
    stage.side.arrived(request)
    stage.link.lookups[0].promised = 11
    stage.side.ended(request)
    assert not stage.side.busy(), "vLLM would step at full speed until the tiers have answered"
    assert stage.link.dropped == [11]


def test_a_request_that_ends_with_a_hit_in_hand_drops_it(stage: Stage) -> None:
    request = FakeRequest()
    stage.hit(request, 16)
    stage.side.matched(request, 0)
    stage.side.ended(request)
    assert stage.link.dropped == [7]
    assert not stage.side.busy()


@pytest.mark.parametrize("failed", [True, False])
def test_a_request_that_ends_while_it_loads_leaves_its_ticket_to_the_ranks(stage: Stage, *, failed: bool) -> None:
    request = FakeRequest()
    stage.hit(request, 16)
    stage.side.matched(request, 0)
    stage.load(request, 16)
    stage.side.ended(request)
    assert stage.link.dropped == [], "ranks may be copying from the pinned cells"
    stage.side.loaded(["r"], ["r"] if failed else [])
    assert stage.link.dropped == ([7] if failed else [])


def test_a_reset_gives_new_keys_and_leaves_running_requests_alone(stage: Stage) -> None:
    running, later = FakeRequest("running"), FakeRequest("later")
    stage.hit(running, 16)
    stage.side.matched(running, 0)
    stage.side.reset()
    assert stage.link.dropped == [7]
    assert stage.side.matched(running, 0) == (0, False)
    assert stage.step(running, 20).stores == ()
    stage.side.arrived(later)
    assert stage.link.lookups[-1].hashes != stage.link.lookups[0].hashes


def test_an_update_of_the_weights_that_workers_tell_of_is_a_reset_once(stage: Stage) -> None:
    first, second, third = FakeRequest("first"), FakeRequest("second"), FakeRequest("third")
    stage.hit(first, 16)
    assert stage.step(first, 20).updates == 0
    for updates in (2, 2):
        stage.side.updated(updates)
    stage.side.arrived(second)
    assert stage.step(second, 20).updates == 2
    stage.side.updated(2)
    stage.side.arrived(third)
    stale, *fresh = [lookup.hashes for lookup in stage.link.lookups]
    assert stale not in fresh
    assert fresh[0] == fresh[1]


def test_closing_closes_the_client(stage: Stage) -> None:
    stage.side.close()
    assert stage.client.closed


# -------------------------------------------------------------------------------------------------------------- content


def test_what_a_request_says_of_its_chunks_goes_with_lookup_and_store_and_changes_no_key(stage: Stage) -> None:
    said = {
        "lmcache.tenant": "team a",
        "lmcache.ttl_s": 60,
        "lmcache.priority": "high",
        "lmcache.session_end": True,
        "other": "theirs",
    }
    silent, request = FakeRequest("s"), FakeRequest(kv_transfer_params=said)
    stage.side.arrived(silent)
    stage.side.arrived(request)
    hints = Hints(60.0, Priority.HIGH, ends_session=True)

    assert stage.link.hints == [NO_HINTS, hints]
    assert [lookup.tenant for lookup in stage.link.lookups] == ["", "team a"]
    assert stage.link.lookups[0].hashes == stage.link.lookups[1].hashes
    [order] = stage.step(request, 20).stores
    assert (order.tenant, order.hints) == ("team a", hints)


def test_a_salt_changes_keys_and_names_a_tenant_without_telling_the_salt(stage: Stage) -> None:
    for name, salt in (("none", None), ("empty", ""), ("a", "a"), ("b", "b")):
        stage.side.arrived(FakeRequest(name, cache_salt=salt))
    none, empty, a, b = stage.link.lookups
    assert none == empty
    assert len({none.hashes, a.hashes, b.hashes}) == 3
    assert len({none.tenant, a.tenant, b.tenant}) == 3
    assert (none.tenant, len(a.tenant)) == ("", 16)


@pytest.mark.parametrize(
    "different",
    [
        {"lora_request": SimpleNamespace(lora_int_id=1, lora_path="org/lora-of-a-hub", load_inplace=False)},
        {"prompt_embeds": object()},
        {"resumable": True},
        {"mm_features": [SimpleNamespace(identifier="0-image-0", modality="image")]},
    ],
    ids=["lora", "embeddings", "streamed", "named image"],
)
def test_what_tokens_do_not_describe_is_never_cached(
    stage: Stage, caplog: pytest.LogCaptureFixture, different: dict[str, Any]
) -> None:
    for name in ("one", "two"):
        request = FakeRequest(name, **different)
        stage.side.arrived(request)
        assert stage.side.matched(request, 0) == (0, False)
        assert stage.step(request, 20).stores == ()
        stage.side.ended(request)
    assert stage.link.lookups == []
    assert len(caplog.records) == 1


def image(digest: str, offset: int, modality: str = "image") -> SimpleNamespace:
    return SimpleNamespace(identifier=digest, modality=modality, mm_position=SimpleNamespace(offset=offset, length=4))


def test_images_change_the_keys_of_the_chunks_they_stand_in_and_all_after(stage: Stage) -> None:
    features = [[image(digit * 60 + "beef", 9)] for digit in "ab"]
    features += [[image("a" * 60 + "beef", 10)], [image("a" * 60 + "beef", 9, "video")], []]
    for number, of_request in enumerate(features):
        stage.side.arrived(FakeRequest(str(number), tokens=24, mm_features=of_request))
    chains = [[lookup.hashes[i : i + 16] for i in (0, 16, 32)] for lookup in stage.link.lookups]
    assert len({chain[0] for chain in chains}) == 1
    assert len({chain[1] for chain in chains}) == len({chain[2] for chain in chains}) == len(features)
