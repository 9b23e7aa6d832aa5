"""The conformance suite of engine adapters: one class to derive from, which has all promises in one place."""

import abc
import contextlib
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import pytest

from lmcache.core.adapter import EngineAdapter, Validation
from lmcache.core.versions import VersionRange
from lmcache.plugins.testing.engine import Answer, EngineUnderTest, Weights
from lmcache.plugins.testing.served import LoadFault, ServerUnderControl

_HEAVY = ("torch", "numpy", "jax")
"""What a module that merely announces an adapter must not import, besides its engine."""


class EngineStand:
    """The engines of one suite, and the server beside them."""

    def __init__(self, server: ServerUnderControl, start: Callable[[Weights], EngineUnderTest | None]) -> None:
        """Start the first engine, while there is no server."""
        self.server = server
        self._start = start
        self._engines: dict[str, EngineUnderTest] = {}
        engine = self._started("first", Weights.USUAL)
        assert engine is not None
        self.engine = engine

    def second(self) -> EngineUnderTest:
        """Another engine like the first, started when it is asked for the first time."""
        engine = self._started("second", Weights.USUAL)
        assert engine is not None
        return engine

    def other(self) -> EngineUnderTest | None:
        """One with other weights; None where the author gives none."""
        return self._started("other", Weights.OTHER)

    def _started(self, name: str, weights: Weights) -> EngineUnderTest | None:
        if name not in self._engines:
            engine = self._start(weights)
            if engine is None:
                return None
            self._engines[name] = engine
        return self._engines[name]

    def end(self, *names: str) -> None:
        """Close engines: those of these names, or all."""
        for name in names or tuple(self._engines):
            if name in self._engines:
                self._engines.pop(name).close()

    def start_again(self) -> None:
        """The first engine has ended: start it anew."""
        self.end("first")
        engine = self._started("first", Weights.USUAL)
        assert engine is not None
        self.engine = engine

    def kill_second(self) -> None:
        """End the second engine without letting it say good-bye."""
        engine = self._engines.pop("second")
        engine.kill()
        engine.close()

    def ready(self, *flags: str) -> None:
        """Have a server with `flags`, every engine registered, and nothing in any engine's own cache."""
        if not self.server.running or self.server.flags != flags:
            self.server.kill()
            self.server.start(*flags)
        self.await_engines()
        for engine in self._engines.values():
            engine.drop_own_cache()

    def check(self) -> None:
        """What must be so after every test: nothing is held at the server."""
        self.server.fail_loads(LoadFault.NONE)
        if self.server.running:
            self.server.await_nothing_held()

    def await_engines(self) -> None:
        """Return when every engine that runs is registered and knows it."""
        engines = self._engines.values()
        self.server.await_clients(sum(engine.clients for engine in engines))
        self.server.wait_until(lambda: all(engine.linked() for engine in engines), "every engine has its links")


class EngineAdapterTests(abc.ABC):
    """What every engine adapter must pass. Derive a class named `Test…` and say how to start the engine.

    One engine serves all tests of the class; it starts while there is no server, which it has to bear. Some tests start
    another. `start_engine` is a class method, and may use what a class method fixture of yours has put on the class.
    """

    adapter: ClassVar[type[EngineAdapter]]
    """The adapter under test."""
    chunk_size: ClassVar[int]
    """Tokens of a chunk on the suite's server: a multiple of all block sizes. Prompts are up to six chunks long."""
    hit_step: ClassVar[int]
    """Tokens that a hit's end is a multiple of: a block where all groups are full attention, else a chunk."""
    wrong_chunk_size: ClassVar[int] = 0
    """One that the engine's blocks do not divide; 0 where every one fits."""
    server_flags: ClassVar[tuple[str, ...]] = ("--l1-size-gb", "0.125", "--l1-cell-kb", "64")
    """Of the server, besides its chunk size; room for some hundred chunks."""
    token_ids: ClassVar[range] = range(3, 500)
    """What prompts are made of."""
    max_tokens: ClassVar[int] = 4
    """How many tokens are generated."""
    tolerance: ClassVar[float] = 0.0
    """How far apart the logprobs of one answer may lie, computed and served; 0 where the engine repeats itself to the
    last bit."""

    ends_when_a_load_fails: ClassVar[bool] = False
    """Whether the engine, by its own rules, ends with an error when a load fails, instead of computing. Its users start
    it again; the suite does, too."""

    @classmethod
    @abc.abstractmethod
    def start_engine(cls, server: str, weights: Weights) -> EngineUnderTest | None:
        """Start an engine for the server at `server` (`host:port`), which may not be there.

        None: there is none with these weights.
        """

    # --------------------------------------------------------------------------------------------------------- fixtures

    @pytest.fixture(scope="class")
    @classmethod
    def stand(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineStand]:
        """The first engine, and a server that does not run yet."""
        server = ServerUnderControl(tmp_path_factory.mktemp("adapter"))
        stand = EngineStand(server, lambda weights: cls.start_engine(str(server.address), weights))
        yield stand
        stand.end()
        server.kill()

    @pytest.fixture
    def engine(self, stand: EngineStand) -> Iterator[EngineUnderTest]:
        """The first engine, registered at a server; checks that nothing is held when the test has ended."""
        stand.ready(*self._flags())
        yield stand.engine
        stand.check()

    @pytest.fixture
    def server(self, stand: EngineStand, engine: EngineUnderTest) -> ServerUnderControl:
        """The server that `engine` is registered at."""
        return stand.server

    def _flags(self, chunk_size: int = 0) -> tuple[str, ...]:
        return (*self.server_flags, "--chunk-size", str(chunk_size or self.chunk_size))

    # ------------------------------------------------------------------------------------------------- what tests share

    def prompt(self, length: int, seed: object) -> list[int]:
        """Tokens; for one seed, a longer prompt begins with a shorter one."""
        source = random.Random(repr(seed))  # noqa: S311  # no secret
        return [source.choice(self.token_ids) for _ in range(length)]

    def expected_hit(self, length: int) -> int:
        """By the hit rule: of what whole chunks hold, as much as leaves one token to compute."""
        return min(length // self.chunk_size * self.chunk_size, (length - 1) // self.hit_step * self.hit_step)

    def ask(self, engine: EngineUnderTest, *prompts: Sequence[int], salt: str = "") -> list[Answer]:
        """Answers of an engine that holds nothing itself; everything is stored and forgotten by it afterwards."""
        answers = engine.generate(prompts, self.max_tokens, salt)
        engine.settle()
        engine.drop_own_cache()
        return answers

    def store(self, engine: EngineUnderTest, server: ServerUnderControl, *prompts: Sequence[int]) -> list[Answer]:
        """The answers to prompts that nobody has asked before, which are in the server from then on."""
        answers = self.ask(engine, *prompts)
        server.await_stores()
        assert [answer.cached for answer in answers] == [0] * len(prompts)
        return answers

    def assert_served(self, engine: EngineUnderTest, cold: Sequence[Answer], *prompts: Sequence[int]) -> None:
        """Prompts that have been stored hit what the rule says, and are answered as they were."""
        served = self.ask(engine, *prompts)
        assert [answer.cached for answer in served] == [self.expected_hit(len(prompt)) for prompt in prompts]
        self.assert_same(cold, served)

    def _same_or_ended(
        self, stand: EngineStand, expected: Sequence[Answer], answering: Callable[[], list[Answer]]
    ) -> EngineUnderTest:
        """The answers are as expected; or the engine has ended, if that is its rule. Returns the one to go on with."""
        try:
            answers = answering()
        except Exception:
            if not self.ends_when_a_load_fails:
                raise
            stand.start_again()
        else:
            self.assert_same(expected, answers)
        return stand.engine

    def assert_same(self, ones: Sequence[Answer], others: Sequence[Answer]) -> None:
        """The same answers."""
        for one, other in zip(ones, others, strict=True):
            assert one.same(other, self.tolerance), f"one answer is {one}, the other {other}"

    # ------------------------------------------------------------------------------------------- what it says of itself

    def test_it_says_what_it_is(self) -> None:
        assert issubclass(self.adapter, EngineAdapter)
        for text in (self.adapter.engine, self.adapter.module, self.adapter.status):
            assert text.strip() == text
            assert text
            assert "\n" not in text
        assert self.adapter.engine.split() == [self.adapter.engine]
        assert isinstance(self.adapter.validation, Validation)
        VersionRange.parse(self.adapter.supported)
        assert not self.adapter.distributions or self.adapter.supported, "which versions of the engine were tested?"

    def test_it_can_be_listed_without_its_engine(self) -> None:
        script = "import importlib, sys; importlib.import_module(sys.argv[1]); print(*sys.modules, sep='\\n')"
        command = [sys.executable, "-c", script, self.adapter.__module__]
        loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert self.adapter.module not in loaded
        own = self.adapter.__module__.partition(".")[0]
        heavy = {*_HEAVY, *(name.replace("-", "_") for name in self.adapter.distributions)} - {own}
        assert [name for name in heavy if name in loaded] == []

    # ------------------------------------------------------------------------------------------------- no server at all

    def test_it_starts_and_serves_without_a_server_and_uses_one_that_comes(self, stand: EngineStand) -> None:
        stand.server.kill()
        prompt = self.prompt(2 * self.chunk_size + 1, "no server")
        [alone] = self.ask(stand.engine, prompt)
        assert alone.cached == 0
        stand.ready(*self._flags())
        cold = self.store(stand.engine, stand.server, prompt)
        self.assert_same([alone], cold)
        self.assert_served(stand.engine, cold, prompt)
        stand.check()

    def test_refused_by_the_server_it_serves_without(self, stand: EngineStand) -> None:
        if not self.wrong_chunk_size:
            pytest.skip("the class says that every chunk size fits this engine")
        prompt = self.prompt(2 * self.chunk_size + 1, "refused")
        stand.ready(*self._flags())
        cold = self.store(stand.engine, stand.server, prompt)
        stand.server.kill()
        stand.server.start(*self._flags(self.wrong_chunk_size))
        stand.server.wait_until(
            lambda: stand.server.counters()["requests_refused"] > 0, "the server refuses the engine"
        )
        answers = self.ask(stand.engine, prompt)
        assert stand.server.gauges()["nodes"] == 0
        assert [answer.cached for answer in answers] == [0]
        self.assert_same(cold, answers)
        stand.check()

    # ----------------------------------------------------------------------------------------------------- the main job

    @pytest.mark.parametrize("around", [-1, 0, 1])
    @pytest.mark.parametrize("chunks", [1, 3, 6])
    def test_a_prompt_that_comes_again_is_served_by_the_hit_rule_and_answered_the_same(
        self, engine: EngineUnderTest, server: ServerUnderControl, chunks: int, around: int
    ) -> None:
        prompt = self.prompt(chunks * self.chunk_size + around, ("again", chunks, around))
        cold = self.store(engine, server, prompt)
        self.assert_served(engine, cold, prompt)
        self.assert_served(engine, cold, prompt)

    def test_many_prompts_at_once_are_answered_as_each_alone(
        self, engine: EngineUnderTest, server: ServerUnderControl
    ) -> None:
        lengths = [self.chunk_size * 2 + 1, self.chunk_size, self.chunk_size * 4 - 3, self.chunk_size // 2]
        prompts = [self.prompt(length, ("many", length)) for length in lengths]
        cold = self.store(engine, server, *prompts)
        self.assert_served(engine, cold, *prompts)
        for number, prompt in enumerate(prompts):
            self.assert_served(engine, cold[number : number + 1], prompt)

    def test_what_the_engine_holds_itself_is_neither_loaded_nor_lost(
        self, engine: EngineUnderTest, server: ServerUnderControl
    ) -> None:
        prompt = self.prompt(4 * self.chunk_size + 1, "own")
        cold = self.store(engine, server, prompt)
        engine.generate([prompt[: 2 * self.chunk_size + 1]], self.max_tokens)
        served = engine.generate([prompt], self.max_tokens)
        again = engine.generate([prompt], self.max_tokens)
        assert [answer.cached for answer in served] == [4 * self.chunk_size]
        self.assert_same(cold, served)
        self.assert_same(cold, again)

    def test_prompts_share_the_whole_chunks_before_they_first_differ(
        self, engine: EngineUnderTest, server: ServerUnderControl
    ) -> None:
        prompt = self.prompt(4 * self.chunk_size + 5, "shared")
        different = [*prompt[: 3 * self.chunk_size - 1], *self.prompt(self.chunk_size, "a tail")]
        expected = self.ask(engine, different, salt="apart")
        self.store(engine, server, prompt)
        answers = self.ask(engine, different)
        assert [answer.cached for answer in answers] == [2 * self.chunk_size]
        self.assert_same(expected, answers)

    # ----------------------------------------------------------------------------------------------- who shares nothing

    def test_another_first_token_shares_nothing_and_is_answered_differently(
        self, engine: EngineUnderTest, server: ServerUnderControl
    ) -> None:
        prompt = self.prompt(2 * self.chunk_size + 1, "first token")
        [cold] = self.store(engine, server, prompt)
        other = next(token for token in self.token_ids if token != prompt[0])
        [answer] = self.ask(engine, [other, *prompt[1:]])
        assert answer.cached == 0
        # were it not so, a wrong hit would not show in any of these tests
        assert not cold.same(answer, self.tolerance), "the model does not care for its first token: take another model"

    def test_the_same_tokens_after_others_are_other_chunks(
        self, engine: EngineUnderTest, server: ServerUnderControl
    ) -> None:
        tail = self.prompt(2 * self.chunk_size + 1, "tail")
        prompts = [[*self.prompt(self.chunk_size, ("head", number)), *tail] for number in range(2)]
        cold = self.store(engine, server, prompts[0]) + self.store(engine, server, prompts[1])
        self.assert_served(engine, cold, *prompts)

    def test_salts_share_nothing_and_each_finds_its_own(
        self, engine: EngineUnderTest, server: ServerUnderControl
    ) -> None:
        prompt = self.prompt(2 * self.chunk_size + 1, "salts")
        cold = self.store(engine, server, prompt)
        for salt in ("a", "b", "a/b@c", "é" * 20):
            first = self.ask(engine, prompt, salt=salt)
            server.await_stores()
            again = self.ask(engine, prompt, salt=salt)
            assert [answer.cached for answer in first + again] == [0, 2 * self.chunk_size], salt
            self.assert_same(cold, first)
            self.assert_same(cold, again)
        self.assert_served(engine, cold, prompt)

    def test_other_weights_share_nothing(self, stand: EngineStand, engine: EngineUnderTest) -> None:
        prompt = self.prompt(2 * self.chunk_size + 1, "other weights")
        cold = self.store(engine, stand.server, prompt)
        other = stand.other()
        if other is None:
            pytest.skip("start_engine has no engine with other weights")
        try:
            stand.await_engines()
            [answer] = self.store(other, stand.server, prompt)
            assert not cold[0].same(answer, self.tolerance), "the other weights answer the same: they prove nothing"
            self.assert_served(other, [answer], prompt)
            self.assert_served(engine, cold, prompt)
        finally:
            stand.end("other")
        stand.await_engines()

    # -------------------------------------------------------------------------------------------------- the server goes

    def test_a_server_killed_between_requests_costs_the_hits_and_the_next_one_is_used(
        self, stand: EngineStand, engine: EngineUnderTest, server: ServerUnderControl
    ) -> None:
        prompt = self.prompt(3 * self.chunk_size + 1, "killed between")
        cold = self.store(engine, server, prompt)
        server.kill()
        answers = self.ask(engine, prompt)
        assert [answer.cached for answer in answers] == [0]
        self.assert_same(cold, answers)
        server.start()
        stand.await_engines()
        self.assert_same(cold, self.store(engine, server, prompt))
        self.assert_served(engine, cold, prompt)

    @pytest.mark.parametrize("moment", ["tokens_hit", "chunks_reserved"])
    @pytest.mark.parametrize("comes_back", [False, True])
    def test_a_server_killed_while_requests_run_costs_the_hits_only(
        self, stand: EngineStand, engine: EngineUnderTest, server: ServerUnderControl, moment: str, comes_back: bool
    ) -> None:
        stored = [self.prompt(6 * self.chunk_size - 1, ("killed", moment, comes_back, n)) for n in range(2)]
        fresh = [self.prompt(6 * self.chunk_size - 1, ("fresh", moment, comes_back, n)) for n in range(2)]
        prompts = [prompt for pair in zip(stored, fresh, strict=True) for prompt in pair]
        expected = self.ask(engine, *prompts, salt="apart")
        self.store(engine, server, *stored)
        before = server.counters()[moment]
        with _meanwhile(engine.generate, prompts, self.max_tokens) as running:
            server.wait_until(lambda: running.done() or server.counters()[moment] > before, f"{moment} grows")
            server.kill()
            if comes_back:
                server.start()
        engine = self._same_or_ended(stand, expected, running.result)
        engine.drop_own_cache()
        if not comes_back:
            server.start()
        stand.await_engines()
        self.ask(engine, *prompts)
        server.await_stores()
        self.assert_served(engine, expected, *prompts)

    def test_a_server_that_stops_answering_costs_the_hits_only(
        self, stand: EngineStand, engine: EngineUnderTest, server: ServerUnderControl
    ) -> None:
        prompts = [self.prompt(4 * self.chunk_size + 1, ("stopped", number)) for number in range(2)]
        cold = self.store(engine, server, *prompts)
        server.stop()
        try:
            engine = self._same_or_ended(stand, cold, lambda: engine.generate(prompts, self.max_tokens))
        finally:
            server.go_on()
        engine.settle()
        engine.drop_own_cache()
        stand.await_engines()
        self.assert_served(engine, cold, *prompts)

    # ------------------------------------------------------------------------------------------------------- loads fail

    @pytest.mark.parametrize("fault", [LoadFault.OPEN, LoadFault.CONFIRM, LoadFault.LAST_RANK])
    def test_a_load_that_fails_is_computed_and_not_tried_for_ever(
        self, stand: EngineStand, engine: EngineUnderTest, server: ServerUnderControl, fault: LoadFault
    ) -> None:
        prompts = [self.prompt(3 * self.chunk_size + 1, ("failing", fault.value, number)) for number in range(2)]
        cold = self.store(engine, server, *prompts)
        before = server.counters()["lookups"]
        server.fail_loads(fault)
        if self.ends_when_a_load_fails:
            with pytest.raises(Exception):  # noqa: B017, PT011  # whatever the engine says of its end
                engine.generate(prompts, self.max_tokens)
            stand.start_again()
            stand.await_engines()
            engine = stand.engine
        else:
            answers = self.ask(engine, *prompts)
            assert [answer.cached for answer in answers] == [0, 0]
            self.assert_same(cold, answers)
        server.await_nothing_held()
        server.fail_loads(LoadFault.NONE)
        assert server.counters()["lookups"] - before <= 2 * len(prompts), "the same failing hit was looked up in a loop"
        self.assert_served(engine, cold, *prompts)

    # --------------------------------------------------------------------------------------------------- L1 has no room

    def test_a_full_server_costs_hits_and_no_answer(
        self, stand: EngineStand, engine: EngineUnderTest, server: ServerUnderControl
    ) -> None:
        prompts = [self.prompt(4 * self.chunk_size + 1, ("full", number)) for number in range(5)]
        before = server.gauges()["cells_used"]
        cold = self.store(engine, server, *prompts)
        gauges = server.gauges()
        cell_gb = self._cell_kb() / (1 << 20)
        room = (gauges["cells_used"] - before) * 11 // 20
        # Two of the five have room, and one may be pinned at a time: tickets hold half of L1 at most. Under LRU the one
        # stored last is there, whatever the default policy thinks of it.
        flags = (*self._flags(), "--l1-size-gb", f"{room * cell_gb:.9f}", "--eviction-policy", "LRU")
        stand.ready(*flags)
        for _ in range(2):
            self.assert_same(cold, [answer for prompt in prompts for answer in self.ask(engine, prompt)])
        self.assert_same(cold, self.ask(engine, *prompts))
        server.await_nothing_held()
        assert server.counters()["chunks_evicted"] > 0
        self.ask(engine, prompts[0])
        server.await_stores()
        self.assert_served(engine, cold[:1], prompts[0])

    def _cell_kb(self) -> int:
        flags = self.server_flags
        return int(flags[flags.index("--l1-cell-kb") + 1]) if "--l1-cell-kb" in flags else 1024

    # ------------------------------------------------------------------------------------------ requests that end early

    def test_aborted_requests_leave_nothing_behind(self, engine: EngineUnderTest, server: ServerUnderControl) -> None:
        if not engine.can_abort:
            pytest.skip("this engine under test has no abort_after")
        stored = self.prompt(5 * self.chunk_size + 1, "aborted")
        cold = self.store(engine, server, stored)
        for steps in range(8):
            engine.abort_after(stored, steps)
            engine.abort_after(self.prompt(5 * self.chunk_size + 1, ("never answered", steps)), steps)
            engine.settle()
            server.await_nothing_held()
            engine.drop_own_cache()
            self.assert_served(engine, cold, stored)

    # -------------------------------------------------------------------------------------------------- several engines

    def test_another_engine_is_served_what_the_first_has_stored(
        self, stand: EngineStand, engine: EngineUnderTest, server: ServerUnderControl
    ) -> None:
        prompts = [self.prompt(3 * self.chunk_size + 1, ("two engines", number)) for number in range(2)]
        cold = self.store(engine, server, *prompts)
        second = stand.second()
        stand.await_engines()
        self.assert_served(second, cold, *prompts)
        theirs = self.prompt(3 * self.chunk_size + 1, "from the second")
        cold = self.store(second, server, theirs)
        self.assert_served(engine, cold, theirs)

    def test_an_engine_that_ends_leaves_nothing_and_the_other_goes_on(
        self, stand: EngineStand, engine: EngineUnderTest, server: ServerUnderControl
    ) -> None:
        second = stand.second()
        stand.await_engines()
        prompts = [self.prompt(6 * self.chunk_size + 1, ("ends", number)) for number in range(3)]
        cold = self.store(engine, server, *prompts[:2])
        if second.can_be_killed:
            before = server.counters()["lookups"]
            with _meanwhile(second.generate, prompts, self.max_tokens) as running:
                server.wait_until(lambda: running.done() or server.counters()["lookups"] > before, "it looks up")
                stand.kill_second()
            with contextlib.suppress(Exception):  # whatever it says of its end
                running.result()
        else:
            self.ask(second, *prompts)
            stand.end("second")
        stand.await_engines()
        server.await_nothing_held()
        self.assert_served(engine, cold, *prompts[:2])


@contextlib.contextmanager
def _meanwhile(work: Callable[..., Any], *arguments: object) -> Iterator["Future[Any]"]:
    """Do `work` in a thread for the length of the block and beyond, until it has ended."""
    with ThreadPoolExecutor(1, "suite") as pool:
        yield pool.submit(work, *arguments)
