"""Engines of several kinds on one server: nobody gets a foreign page, and when one dies, the others never notice.

The reference engine twice (two models, other blocks, one on two ranks), a real vLLM, and a real SGLang on two ranks
where there is one: an environment named `sglang` inside the one that runs the tests, as `make test` makes it.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import pytest
from reference_stand import ReferenceUnderTest, prompt
from sglang_stand import ENVIRONMENT, SglangProcess, SglangUnderTest, linker
from sglang_stand import HERE as SGLANG
from vllm_stand import LOGPROB_TOLERANCE, EngineProcess, VllmUnderTest

from lmcache.core.control import ServerAddress
from lmcache.engines.reference.shapes import GEOMETRIES, GroupShape, Mixer, ModelShape
from lmcache.geometry.groups import GroupKind
from lmcache.plugins.testing import Answer, EngineUnderTest
from lmcache.plugins.testing.served import ServerUnderControl

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.may_leave("engines that are shared by the module connect when they like"),
]

ODD = ModelShape("odd-56", (GroupShape(GroupKind.FULL, 56, Mixer.LATENT),), (0, 0))
LENGTHS = (1121, 560, 843)
"""Of prompts. Whole chunks of all sizes lie between them, and what is generated completes none."""
TOKENS = 4
"""Generated."""


@attrs.define
class Member:
    """One engine of the crowd."""

    engine: EngineUnderTest
    model: tuple[str, str]
    """Its name, and how its model's name ends, in the facts of its namespace."""
    chunk: int
    """Tokens: what it gets of a server without `--chunk-size`."""
    step: int
    """Tokens that a hit's end is a multiple of."""
    tolerance: float = 0.0

    def hit(self, length: int) -> int:
        return min(length // self.chunk * self.chunk, (length - 1) // self.step * self.step)


Crowd = dict[str, Member]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderControl]:
    running = ServerUnderControl(tmp_path_factory.mktemp("server"))
    running.start("--l1-size-gb", "0.5", "--l1-cell-kb", "64")
    yield running
    running.kill()


@pytest.fixture(scope="module")
def crowd(server: ServerUnderControl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    folder, address = tmp_path_factory.mktemp("crowd"), str(server.address)
    made = [sys.executable, "-m", "lmcache.engines.vllm.tiny_models", str(folder), "llama"]
    subprocess.run(made, check=True, capture_output=True)
    members = {
        "llama on two ranks": Member(
            ReferenceUnderTest(GEOMETRIES["llama"], address, 1, ranks=2), ("reference", "/llama"), 256, 16
        ),
        "odd blocks": Member(ReferenceUnderTest(ODD, address, 1), ("reference", "/odd-56"), 280, 56),
    }
    sglang = _start_sglang(folder, address)
    members["vllm"] = Member(
        VllmUnderTest(folder / "llama", address, folder / "vllm.log"), ("vllm", "/llama"), 256, 128, LOGPROB_TOLERANCE
    )
    if sglang is not None:
        sglang.process.await_start()
        members["sglang"] = Member(sglang, ("sglang", "llama"), 16, 16, LOGPROB_TOLERANCE)
    await_engines(server, members)
    yield members
    for member in members.values():
        member.engine.close()


def await_engines(server: ServerUnderControl, members: dict[str, Member]) -> None:
    """Until all are registered and know it."""
    server.await_clients(sum(member.engine.clients for member in members.values()))
    server.wait_until(lambda: all(member.engine.linked() for member in members.values()), "all have their links")


def _start_sglang(folder: Path, address: str) -> SglangUnderTest | None:
    python = Path(sys.prefix) / "sglang" / "bin" / "python"
    if not python.exists():
        return None
    models = folder / "sglang"
    subprocess.run([python, SGLANG / "tiny_models.py", models], check=True, capture_output=True)
    options = {"model_path": str(models / "llama"), "served_model_name": "llama", "tp_size": 2}
    return SglangUnderTest(
        _ElsewhereSglang(options | linker(ServerAddress.parse(address).port), folder / "sglang.log", str(python)), 2
    )


class _ElsewhereSglang(SglangProcess):
    """In another environment than the tests."""

    def __init__(self, options: dict[str, object], log: Path, python: str) -> None:
        environment = ENVIRONMENT | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
        EngineProcess.__init__(self, options, log, environment, SGLANG / "engine_driver.py", python=python)


def answer_each(engine: EngineUnderTest, prompts: Sequence[list[int]]) -> list[Answer]:
    return [answer for each in prompts for answer in engine.generate([each], TOKENS)]


def at_once(
    crowd: Crowd, prompts: Mapping[str, Sequence[list[int]]], meanwhile: Callable[[], None] = lambda: None
) -> dict[str, list[Answer]]:
    """Every engine answers its prompts one after the other, all engines at the same time; then each forgets."""
    with ThreadPoolExecutor(len(crowd)) as pool:
        asked = {name: pool.submit(answer_each, crowd[name].engine, each) for name, each in prompts.items()}
        meanwhile()
        answers = {name: future.result() for name, future in asked.items()}
    for name in prompts:
        crowd[name].engine.settle()
        crowd[name].engine.drop_own_cache()
    return answers


def assert_same(member: Member, ones: Sequence[Answer], others: Sequence[Answer]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert one.same(other, member.tolerance), f"{member.model}: {one} and {other}"


def test_the_same_tokens_in_every_engine_find_each_its_own_and_nobody_elses(
    crowd: Crowd, server: ServerUnderControl
) -> None:
    """Rounds in which the engines take turns at random, each with the prompts in another order."""
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    turned = {name: [prompts[(turn + n) % 3] for n in range(3)] for turn, name in enumerate(crowd)}
    cold = at_once(crowd, turned)
    server.await_stores()
    assert {name: [answer.cached for answer in answers] for name, answers in cold.items()} == {
        name: [0, 0, 0] for name in crowd
    }
    for _ in range(3):
        served = at_once(crowd, turned)
        for name, member in crowd.items():
            assert [answer.cached for answer in served[name]] == [member.hit(len(each)) for each in turned[name]], name
            assert_same(member, cold[name], served[name])
    server.await_nothing_held()

    # the same numbers from the server's side: every namespace holds its own engine's chunks, and no more
    held = {each["digest"]: each for each in server.status()["namespaces"]}
    found = {
        name: [
            (each["chunk_size"], each["chunks"])
            for each in held.values()
            if each["facts"]["engine"] == member.model[0] and each["facts"]["model"].endswith(member.model[1])
        ]
        for name, member in crowd.items()
    }
    assert found == {
        name: [(member.chunk, sum(length // member.chunk for length in LENGTHS))] for name, member in crowd.items()
    }
    assert len(held) == len(crowd)


@pytest.mark.parametrize("victim", ["sglang", "vllm"])
def test_one_dies_in_the_middle_of_requests_and_the_others_never_notice(
    crowd: Crowd, server: ServerUnderControl, victim: str
) -> None:
    if victim not in crowd:
        pytest.skip("no SGLang is installed beside this environment; `make test` puts one into .venv/sglang")
    others = {name: member for name, member in crowd.items() if name != victim}
    seed = 10_000 + len(crowd) * 1000
    stored = {name: [prompt(length, seed + length) for length in LENGTHS] for name in crowd}
    cold = at_once(crowd, stored)
    server.await_stores()
    before = server.counters()["lookups"]
    with ThreadPoolExecutor(1) as pool:
        fresh = [prompt(1500, seed + number) for number in range(2)]
        dying = pool.submit(crowd[victim].engine.generate, [*stored[victim], *fresh], 100)
        server.wait_until(lambda: dying.done() or server.counters()["lookups"] > before, "the victim looks up")
        served = at_once(others, {name: stored[name] for name in others}, crowd[victim].engine.kill)
        with pytest.raises((RuntimeError, pytest.fail.Exception)):
            dying.result()
    crowd.pop(victim).engine.close()
    for name, member in others.items():
        assert [answer.cached for answer in served[name]] == [member.hit(length) for length in LENGTHS], name
        assert_same(member, cold[name], served[name])

    await_engines(server, others)
    server.await_nothing_held()
    again = at_once(others, {name: stored[name] for name in others})
    for name, member in others.items():
        assert [answer.cached for answer in again[name]] == [member.hit(length) for length in LENGTHS], name
        assert_same(member, cold[name], again[name])
