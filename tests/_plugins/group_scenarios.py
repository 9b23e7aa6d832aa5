"""What every model of several KV groups has to pass on a real vLLM: a module subclasses `GroupScenarios`.

Chunks of 256 tokens, and steps of at most 1,000, so that steps end inside chunks and inside blocks.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
from vllm_stand import EngineProcess, ServerProcess, Stand, prompt, same_answer

SERVER = ("--chunk-size", "256", "--l1-cell-kb", "128")
ENGINE = {"max_model_len": 2816, "max_num_batched_tokens": 1000}

WATCH_PREEMPTIONS = """
preempted, preempt = {}, scheduler._preempt_request
def watched(request, *arguments, **more):
    preempted.setdefault(prompts.index(request.prompt_token_ids), request.num_output_tokens)
    return preempt(request, *arguments, **more)
scheduler._preempt_request = watched
driver.names.update(preempted=preempted, prompts=prompts)
"""
PREEMPTED = "del scheduler._preempt_request; result = list(preempted.items())"
"""Each prompt that was preempted, by its number, and how many tokens it had sampled by then."""

HOLD_LOADS = """
import threading
gate, reached, copy_in = threading.Event(), threading.Event(), type(loader)._copy_in
def held(*arguments):
    reached.set()
    gate.wait(60)
    copy_in(loader, *arguments)
loader._copy_in = held
driver.names.update(gate=gate, reached=reached)
"""
"""Holds every load before its first byte, until `gate` is set."""

LOAD_HALF = """
copy_in = type(loader)._copy_in
def half(link, copies):
    copy_in(loader, link, copies[: len(copies) // 2])
    raise RuntimeError('half of it is there')
loader._copy_in = half
"""

SKIP_GROUP = """
copies = type(loader)._copies
loader._copies = lambda link, order, opened, group: (
    [] if group == skipped else copies(loader, link, order, opened, group)
)
"""

COUNT_BYTES = """
stored, loaded = {}, {}
copy_out, copies = type(storer)._copy_out, type(loader)._copies
def count(into, group, blocks):
    into[group] = into.get(group, 0) + blocks * storer._geometry.groups[group].block_bytes
def counted_out(link, request, group, chunks, cells):
    copy_out(storer, link, request, group, chunks, cells)
    count(stored, group, sum(len(storer._blocks(link, request, group, chunk)) for chunk in chunks))
def counted_in(link, order, opened, group):
    for copy in copies(loader, link, order, opened, group):
        count(loaded, group, len(copy[2]))
        yield copy
storer._copy_out, loader._copies = counted_out, counted_in
driver.names.update(stored=stored, loaded=loaded)
"""
BYTES = "del storer._copy_out, loader._copies; result = [sum(stored.values()), sum(loaded.values())]"


@attrs.frozen
class Figures:
    """What a prompt costs, cold and when it comes again."""

    stored: int
    """Bytes."""
    loaded: int
    """Bytes."""
    hit: int
    """Tokens."""
    cells: int
    """Cells that the server gave for it."""


def start(folder: Path, model: Path, **options: Any) -> Iterator[Stand]:
    """An engine, which finds a server as soon as there is one; the body of a module's fixture `stand`."""
    stand = Stand(folder, model, clients=2, **ENGINE | options)
    try:
        stand.start_engine()
        stand.engine.await_start()
        yield stand
    finally:
        stand.close()


def forget(engine: EngineProcess) -> None:
    """Leave the engine nothing of its own: no prefix cache, and no page that would be right without a load."""
    assert engine.call("wipe")


def right(engine: EngineProcess, *prompts: list[int], max_tokens: int = 8) -> list[dict]:
    """What the engine answers without any cache, one after the other; leaves none of its own behind."""
    answers = []
    forget(engine)
    for ids in prompts:
        answers += engine.call("without_cache", prompts=[ids], max_tokens=max_tokens)
        forget(engine)
    assert cached(answers) == [0] * len(prompts)
    return answers


def store(stand: Stand, *prompts: list[int], max_tokens: int = 8, **more: Any) -> list[dict]:
    """Have prompts computed and stored, and forgotten by the engine; returns their answers."""
    answers = stand.engine.generate(*prompts, max_tokens=max_tokens, **more)
    stand.server.settle()
    forget(stand.engine)
    return answers


def figures(stand: Stand, ids: list[int]) -> Figures:
    """Count the bytes that the connector copies, of a prompt and again of the same one."""
    before = stand.server.settle()["gauges"]["cells_used"]
    stand.engine.run(COUNT_BYTES)
    store(stand, ids)
    [warm] = store(stand, ids)
    stored, loaded = stand.engine.run(BYTES)
    return Figures(stored, loaded, warm["cached"], stand.server.settle()["gauges"]["cells_used"] - before)


def all_same(expected: list[dict], answers: list[dict]) -> bool:
    return all(same_answer(a, b) for a, b in zip(expected, answers, strict=True))


def first_tokens(answer: dict, number: int) -> dict:
    return {name: answer[name][:number] for name in ("tokens", "logprobs")}


def cached(answers: list[dict]) -> list[int]:
    return [answer["cached"] for answer in answers]


class Served:
    """Tests that share a server. Each of them leaves no ticket, no reservation and no pinned chunk."""

    FLAGS: ClassVar = SERVER

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def served(cls, stand: Stand) -> Iterator[None]:
        stand.serve(*cls.FLAGS)
        yield
        stand.server.kill()

    @pytest.fixture(autouse=True)
    def clean(self, stand: Stand, served: None) -> Iterator[None]:
        forget(stand.engine)
        yield
        assert stand.engine.run("result = len(scheduler.requests)") == 0
        assert stand.server.quiet()["gauges"]["pinned_nodes"] == 0

    @pytest.fixture
    def engine(self, stand: Stand) -> EngineProcess:
        return stand.engine

    @pytest.fixture
    def server(self, stand: Stand) -> ServerProcess:
        return stand.server


class GroupScenarios(Served):
    """The module defines the fixture `stand`."""

    BLOCK: ClassVar = 128
    """Tokens of a block, in every group."""
    GROUPS: ClassVar[range]
    """Numbers of the model's KV groups."""
    PREFIXES: ClassVar = ((1100, 1024), (1000, 768), (700, 512), (300, 256))
    """Lengths to which a prompt is cut, one after the other, and their hits."""
    RESUMED: ClassVar = 768
    """Hit of a request that is preempted at 775 tokens, 25 of which it has sampled."""
    ROUNDS_ALIKE: ClassVar = True
    """Whether this engine, without any cache, samples on alike when it computes as a prompt what it had sampled."""
    STARVING: ClassVar[tuple[int, int]]
    """Length of prompts of which five start, and cannot all go on, in the blocks that there are; and their hit."""

    def test_the_log_shows_the_groups(self, stand: Stand) -> None:
        shown = f"group_tokens_per_block={[self.BLOCK for _ in self.GROUPS]}, scheduler_block_size={self.BLOCK}"
        assert shown in stand.engine.log.read_text()

    # -------------------------------------------------------------------------------------------------- what is found

    def test_another_salt_misses_and_the_same_one_hits(self, stand: Stand) -> None:
        ids = prompt(200, 600)
        [cold] = store(stand, ids)
        [other] = store(stand, ids, salt="b")
        [same] = stand.engine.generate(ids, salt="b")
        assert cached([cold, other, same]) == [0, 0, 512]
        assert all_same([cold, cold], [other, same])

    def test_another_first_token_misses_and_is_seen_in_the_answer(self, stand: Stand) -> None:
        ids = prompt(201, 900)
        [cold] = store(stand, ids)
        [other] = stand.engine.generate([ids[0] + 1, *ids[1:]])
        assert cached([cold, other]) == [0, 0]
        assert not same_answer(cold, other), "the model ignores its first token, so a wrong hit would not show"

    def test_a_group_that_is_not_loaded_is_seen_in_the_answer(self, stand: Stand) -> None:
        ids = prompt(202, 600)
        [cold] = store(stand, ids)
        for group in self.GROUPS:
            stand.engine.run(SKIP_GROUP, skipped=group)
            [wrong] = stand.engine.generate(ids)
            stand.engine.run("del loader._copies")
            forget(stand.engine)
            assert wrong["cached"] == 512
            assert not same_answer(cold, wrong), f"the answer does not depend on KV group {group}"

    def test_two_requests_that_share_a_prefix_run_at_once(self, stand: Stand) -> None:
        shared = prompt(203, 800)
        prompts = [[*shared, *prompt(204 + i, 150)] for i in range(2)]
        expected = right(stand.engine, *prompts)
        assert all_same(expected, store(stand, *prompts))
        warm = store(stand, *prompts)
        assert cached(warm) == [768, 768]
        assert all_same(expected, warm)

    def test_sessions_that_take_turns_find_what_they_left(self, stand: Stand) -> None:
        # each turn is the last one, its answer of 8 tokens and 122 more: 260, 390, 520 and 650 tokens
        sessions = [[prompt(210 + i, 260)] for i in range(5)]
        answers: list[list[dict]] = [[] for _ in sessions]
        for turn, hit in enumerate((0, 256, 256, 512)):
            for number, prompts in enumerate(sessions):
                [answer] = store(stand, prompts[turn])
                assert answer["cached"] == hit, (turn, number)
                answers[number].append(answer)
                prompts.append([*prompts[turn], *answer["tokens"], *prompt(220 + 10 * turn + number, 122)])
        for prompts, given in zip(sessions, answers, strict=True):
            assert all_same(self.right_turns(stand.engine, prompts[:4]), given)

    def right_turns(self, engine: EngineProcess, prompts: list[list[int]]) -> list[dict]:
        """What a session's turns are answered without the cache."""
        return right(engine, *prompts)

    # ------------------------------------------------------------------------------------- what the engine goes through

    @pytest.mark.parametrize("budget", [130, 300])
    def test_steps_shorter_or_longer_than_a_chunk_store_every_chunk(
        self, stand: Stand, server: ServerProcess, budget: int
    ) -> None:
        ids = prompt(1000 + budget, 1100)
        before = server.settle()["gauges"]["nodes"]
        normal = stand.engine.call("budget", tokens=budget)
        try:
            [cold] = store(stand, ids)
            assert server.settle()["gauges"]["nodes"] - before == 4
            # cut short, so that the hit is not the one at the end
            for length, hit in self.PREFIXES:
                [warm] = stand.engine.generate(ids[:length])
                forget(stand.engine)
                assert warm["cached"] == hit
                if length == 1100:
                    assert same_answer(cold, warm)
        finally:
            stand.engine.call("budget", tokens=normal)

    def test_requests_that_run_out_of_blocks_answer_as_without_the_cache(self, stand: Stand) -> None:
        length, hit = self.STARVING
        prompts = [prompt(230 + i, length) for i in range(5)]
        expected = right(stand.engine, *prompts, max_tokens=20)
        for hits in ([0] * 5, [hit] * 5):
            stand.engine.run(WATCH_PREEMPTIONS, prompts=prompts)
            answers = store(stand, *prompts, max_tokens=20)
            preempted = dict(stand.engine.run(PREEMPTED))
            assert preempted
            assert cached(answers) == hits
            for number, (one, other) in enumerate(zip(expected, answers, strict=True)):
                comparable = 20 if self.ROUNDS_ALIKE else preempted.get(number, 20)
                assert same_answer(first_tokens(one, comparable), first_tokens(other, comparable)), number

    def test_a_preempted_request_resumes_with_its_prompt_and_what_it_had_generated(
        self, stand: Stand, server: ServerProcess
    ) -> None:
        engine, ids = stand.engine, prompt(240, 750)
        before = server.settle()["counters"]["tokens_hit"]
        engine.call("add", name="resumed", ids=ids, max_tokens=40)
        engine.run("while next(iter(scheduler.requests.values())).num_tokens < 775: driver.step()")
        assert engine.run("result = scheduler.reset_prefix_cache(reset_running_requests=True)")
        answer = engine.call("finish")["resumed"]
        # the third chunk was made whole by sampled tokens
        assert server.settle()["counters"]["tokens_hit"] - before == self.RESUMED
        [expected] = right(engine, ids, max_tokens=25)
        assert same_answer(expected, first_tokens(answer, 25))
        ids += answer["tokens"][:25]
        [expected] = self.right_turns(engine, [ids[: self.RESUMED + 1], ids])[1:]
        assert same_answer(first_tokens(expected, 8), {name: answer[name][25:33] for name in ("tokens", "logprobs")})

    def test_a_load_that_fails_half_way_is_recomputed(self, stand: Stand) -> None:
        engine, ids = stand.engine, prompt(241, 700)
        [cold] = store(stand, ids)
        engine.run(LOAD_HALF)
        [answer] = engine.generate(ids)
        engine.run("del loader._copy_in")
        forget(engine)
        [warm] = engine.generate(ids)
        assert (answer["cached"], answer["finish"], warm["cached"]) == (0, "length", 512)
        assert all_same([cold, cold], [answer, warm])

    def test_aborted_while_it_loads_prefills_or_decodes(self, stand: Stand) -> None:
        engine, ids = stand.engine, prompt(242, 1100)
        [cold] = store(stand, ids)
        engine.run(HOLD_LOADS)
        engine.call("add", name="loading", ids=ids, max_tokens=8)
        engine.run("while not reached.is_set(): driver.step()")
        engine.call("abort", name="loading")
        engine.call("step", times=3)
        assert engine.run("result = len(scheduler.requests)") == 1, "its blocks must stay while ranks copy"
        engine.run("gate.set(); del loader._copy_in\nwhile scheduler.requests: driver.step()")
        for name, length, tokens in (("prefilling", 1500, 0), ("decoding", 500, 510)):
            engine.call("add", name=name, ids=prompt(243, length), max_tokens=50)
            engine.run(
                "driver.step()\nwhile next(iter(scheduler.requests.values())).num_tokens < tokens: driver.step()",
                tokens=tokens,
            )
            engine.call("abort", name=name)
            engine.call("step", times=2)
        forget(engine)
        [warm] = engine.generate(ids)
        assert warm["cached"] == 1024
        assert same_answer(cold, warm)

    def test_aborted_in_crowds_at_random_moments(self, stand: Stand) -> None:
        engine, ids = stand.engine, prompt(244, 1100)
        [cold] = store(stand, ids)
        engine.run(
            "import random\n"
            "dice = random.Random(7)\n"
            "for round in range(12):\n"
            "    names = [f'{round}-{i}' for i in range(3)]\n"
            "    for i, name in enumerate(names): driver.add(name, ids[: 500 + 300 * i], 4)\n"
            "    driver.step(dice.randrange(1, 5))\n"
            "    for name in names: driver.abort(name)\n"
            "    if dice.random() < 0.5: driver.reset()\n"
            "while scheduler.requests or looking.busy(): driver.step()",
            ids=ids,
        )
        forget(engine)
        [warm] = engine.generate(ids)
        assert warm["cached"] == 1024
        assert same_answer(cold, warm)


class SameAnswerScenarios:
    """Of engines that answer to the bit what they would compute."""

    HITS: ClassVar[dict[int, int]]
    """Of prompts that come again, by their length."""

    def test_a_prompt_that_comes_again_is_served_with_the_same_answer(self, stand: Stand, length: int) -> None:
        ids = prompt(length, length)
        [cold] = store(stand, ids)
        [warm] = stand.engine.generate(ids)
        assert cached([cold, warm]) == [0, self.HITS[length]]
        assert same_answer(cold, warm)
        assert len(set(cold["tokens"])) > 4, "the model repeats itself, so its answers prove little"

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if metafunc.function.__name__ == "test_a_prompt_that_comes_again_is_served_with_the_same_answer":
            metafunc.parametrize("length", self.HITS)


class FullCacheScenarios(Served):
    """With a server so small that it evicts all the time."""

    FLAGS = (*SERVER, "--l1-size-gb", "0.02")
    BRANCHES: ClassVar = 8
    """Of two chunks each: more than fit."""
    ENDS_AT_SNAPSHOTS: ClassVar = False
    """Whether a hit can end only where the engine ended a step."""

    def test_a_system_prompt_is_found_at_its_end_after_longer_branches_have_filled_the_cache(
        self, stand: Stand
    ) -> None:
        engine, system = stand.engine, prompt(205, 700)
        first, *others, last = [[*system, *prompt(260 + i, 400)] for i in range(self.BRANCHES + 2)]
        [answer] = store(stand, first)
        if self.ENDS_AT_SNAPSHOTS:
            # the engine sees that the next one shares what it holds itself, and ends a step there
            engine.generate(first)
            store(stand, others.pop())
        hits = cached([store(stand, branch)[0] for branch in others])
        [expected] = right(engine, last)
        [answer] = engine.generate(last)
        counters = stand.server.quiet()["counters"]
        assert counters["chunks_evicted"] > 0, "the branches fit, so nothing had to survive"
        assert hits == [512] * len(hits)
        assert answer["cached"] == 512
        assert same_answer(expected, answer)


class OwnCacheScenarios:
    """Of engines whose own prefix cache is on."""

    OWN_HIT: ClassVar[int]
    """Of 1,000 tokens: what ends at the last block that leaves one to compute."""

    @pytest.mark.parametrize("length", [700, 1200])
    def test_an_own_hit_shorter_than_ours_is_loaded_on_from(self, stand: Stand, length: int) -> None:
        # with 1,200 tokens, most of the window that ours ends with is the engine's own
        ids = prompt(280 + length, 1400)
        [cold] = store(stand, ids)
        stand.engine.generate(ids[:length])
        [warm] = stand.engine.generate(ids)
        assert warm["cached"] == 1280
        assert same_answer(cold, warm)

    def test_an_own_hit_longer_than_ours_is_kept_and_nothing_is_loaded(
        self, stand: Stand, server: ServerProcess
    ) -> None:
        engine, ids = stand.engine, prompt(251, 1000)
        store(stand, ids[:600])
        [cold] = engine.call("without_cache", prompts=[ids], max_tokens=8)
        before = server.settle()["counters"]["loads_confirmed"]
        [warm] = engine.generate(ids)
        assert (cold["cached"], warm["cached"]) == (0, self.OWN_HIT)
        assert same_answer(cold, warm)
        assert server.settle()["counters"]["loads_confirmed"] == before
