"""Engines and requests that must not share, on a real vLLM: each pair misses, and each answer is its own cold one.

All engines live one after the other in one process, against one server, and ask for one prompt. Tests run in their
order: each engine is started by the test that needs it.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lora_files import make_lora
from vllm_stand import DRIVER, EngineProcess, ServerProcess, Stand, prompt, same_answer

pytestmark = [pytest.mark.vllm]

CHUNK = 256
IDS = prompt(500, 700)
HIT = 512
"""Of the prompt's 700 tokens: two chunks, whose last block may end before the second one does."""


class Engines:
    """One server, and a process in which engines are started and stopped."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        stand = Stand(folder, model, clients=2)
        self.server: ServerProcess = stand.server
        self.server.start("--chunk-size", str(CHUNK))
        options = {
            "model": str(model),
            "kv_transfer_config": stand.transfer(),
            "max_model_len": 1024,
            # the prompt is prefilled in three steps
            "max_num_batched_tokens": 300,
            "num_gpu_blocks_override": 32,
        }
        driver = DRIVER.with_name("identity_driver.py")
        self.process = EngineProcess(options, folder / "engines.log", driver=driver)

    def start(self, **options: Any) -> None:
        """Start an engine in place of the one that runs."""
        self.process.call("stop")
        self.server.await_clients(0)
        seconds = self.process.call("start", **options)
        self.server.await_clients(2)
        print(f"started {options} in {seconds:.1f} s")

    def serve(self, lora: tuple[str, int, Path] | None = None, **more: Any) -> dict[str, Any]:
        """Answer the prompt with what the cache has; returns when what came of it is stored."""
        answer = self.process.call("serve", ids=IDS, lora=written(lora), **more)
        self.server.quiet()
        return answer

    def cold(self, lora: tuple[str, int, Path] | None = None) -> dict[str, Any]:
        """Answer it with nothing."""
        return self.process.call("cold", ids=IDS, lora=written(lora))

    def nodes(self) -> int:
        return self.server.settle()["gauges"]["nodes"]

    def weights(self) -> set[str]:
        """What engines have said of their weights."""
        return {namespace["facts"]["model.weights"] for namespace in self.server.settle()["namespaces"]}

    def close(self) -> None:
        self.process.close()
        self.server.kill()


def written(lora: tuple[str, int, Path] | None) -> list[Any] | None:
    return [*lora[:2], str(lora[2])] if lora else None


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Not below pytest's own folder, which is as busy as there are sessions: folders in it may be out of place."""
    with tempfile.TemporaryDirectory(prefix="lmcache-identity-") as folder:
        for name, seed in (("one", 1), ("two", 2), ("three", 3)):
            make_lora(Path(folder) / name, seed)
        yield Path(folder)


@pytest.fixture(scope="module")
def engines(folder: Path, models: Path) -> Iterator[Engines]:
    model = shutil.copytree(models / "llama", folder / "model")
    engines = Engines(folder, model)
    yield engines
    engines.close()


@pytest.fixture(scope="module")
def first(engines: Engines) -> Engines:
    """An engine in float32 that serves LoRAs and embeddings."""
    engines.start(enable_lora=True, max_loras=2, max_lora_rank=8, enable_prompt_embeds=True)
    return engines


def misses_then_hits(engines: Engines, lora: tuple[str, int, Path] | None = None) -> dict[str, Any]:
    """The engine finds nothing, stores, finds its own, and answers as without a cache each time."""
    cold = engines.cold(lora)
    miss, hit = engines.serve(lora), engines.serve(lora)
    assert (cold["cached"], miss["cached"], hit["cached"]) == (0, 0, HIT)
    assert same_answer(cold, miss)
    assert same_answer(cold, hit)
    return cold


def test_requests_with_two_loras_and_with_none_find_their_own_only(first: Engines, folder: Path) -> None:
    answers = [misses_then_hits(first, lora) for lora in (None, ("x", 1, folder / "one"), ("y", 2, folder / "two"))]
    # in the other order, too, with all that is stored
    again = [first.serve(lora) for lora in (("y", 2, folder / "two"), ("x", 1, folder / "one"), None)]
    assert [answer["cached"] for answer in again] == [HIT] * 3
    assert all(same_answer(a, b) for a, b in zip(answers, reversed(again), strict=True))
    assert len({tuple(answer["tokens"]) for answer in answers}) == 3, "a wrong hit would not show"


def test_prompts_that_are_given_as_embeddings_are_never_cached(first: Engines) -> None:
    before = first.nodes()
    answers = first.process.call("embedded", seed=1, length=700)
    other = first.process.call("embedded", seed=2, length=700)
    assert [answer["cached"] for answer in answers.values()] == [0, 0, 0]
    assert same_answer(answers["cold"], answers["first"])
    assert same_answer(answers["cold"], answers["second"])
    assert not same_answer(answers["cold"], other["cold"])
    assert first.nodes() == before


def test_one_name_with_other_weights_finds_its_own_only(first: Engines, folder: Path) -> None:
    before = first.serve(("x", 1, folder / "one"))
    # as when "x" is unloaded, and other weights are loaded as "x": vLLM gives them another number
    after = misses_then_hits(first, ("x", 3, folder / "three"))
    assert before["cached"] == HIT
    assert before["tokens"] != after["tokens"]


def test_what_is_computed_after_a_lora_was_exchanged_in_place_is_not_stored(first: Engines, folder: Path) -> None:
    before = first.nodes()
    lora = written(("z", 5, folder / "one"))
    # when one chunk is whole, number 5 becomes other weights, which the scheduler cannot know
    first.process.call("exchanged", ids=IDS, salt="s", lora=lora, path=str(folder / "two"))
    assert first.nodes() == before + 1
    # a number that nobody exchanged finds what was stored before
    same = first.serve(("x", 1, folder / "one"), salt="s")
    assert same["cached"] == CHUNK
    assert same_answer(same, first.cold(("x", 1, folder / "one")))


def test_a_lora_that_was_installed_after_the_engine_started_is_never_cached(first: Engines, folder: Path) -> None:
    path = make_lora(folder / "later", 4)
    before = first.nodes()
    cold = first.cold(("w", 6, path))
    answers = [first.serve(("w", 6, path)) for _ in range(2)]
    assert [answer["cached"] for answer in answers] == [0, 0]
    assert all(same_answer(cold, answer) for answer in answers)
    assert first.nodes() == before
    log = first.process.log.read_text()
    assert log.count(f"the weights of the LoRA at {path} are not certain: {path} has changed; restart the engine") == 1


@pytest.mark.parametrize(
    "different",
    [{"dtype": "bfloat16"}, {"block_size": 64}],
    ids=["other type", "other block size"],
)
def test_an_engine_of_another_kind_finds_its_own_only(first: Engines, different: dict[str, Any]) -> None:
    first.start(**different)
    cold, miss, hit = first.cold(), first.serve(), first.serve()
    assert (cold["cached"], miss["cached"], hit["cached"]) == (0, 0, HIT)
    assert same_answer(cold, miss)
    # in bfloat16 a prefix that is read back gives other digits, whoever kept it
    assert hit["tokens"][0] == cold["tokens"][0] if "dtype" in different else same_answer(cold, hit)


def test_other_weights_under_one_path_find_their_own_only(first: Engines, folder: Path) -> None:
    weights = folder / "model" / "model.safetensors"
    before = weights.read_bytes()
    other = Path(first.process.call("second_seed", folder=str(folder / "second")))
    weights.write_bytes((other / "model.safetensors").read_bytes())
    first.start()
    answer = misses_then_hits(first)
    identities = first.weights()
    assert len(identities) == 2
    assert all(identity.startswith("files ") for identity in identities)

    # and the first weights once more: all that was stored of them is found, by an engine that serves no LoRAs
    weights.write_bytes(before)
    make_lora(folder / "one", 5)
    first.start(enable_lora=True, max_lora_rank=8)
    found = first.serve()
    assert found["cached"] == HIT
    assert same_answer(found, first.cold())
    assert found["tokens"] != answer["tokens"]
    assert first.weights() == identities

    # but nothing of the LoRA whose files have changed, though name, number and path are what they were
    lora = ("x", 1, folder / "one")
    misses_then_hits(first, lora)


def test_weights_that_were_updated_in_place_find_nothing_that_was_stored_before(first: Engines, folder: Path) -> None:
    before = first.serve()
    assert before["cached"] == HIT
    kept, original = first.nodes(), str(folder / "model")
    # told by a reset as well, and not: the next request is computed, and what its worker would store of it is left out
    for step, (path, reset) in enumerate([(str(folder / "second" / "llama"), True), (original, False)]):
        first.process.call("update", path=path, reset=reset)
        nodes = first.nodes()
        unknown = first.serve()
        assert (unknown["cached"], first.nodes()) == (0, nodes), step
        after = misses_then_hits(first)
        assert same_answer(unknown, after)
        assert first.nodes() == nodes + HIT // CHUNK
        assert (before["tokens"] == after["tokens"]) == (path == original)
    # nobody else was given anything of these weights: what the engine stored at first is there, and of its weights
    assert first.nodes() == kept + 2 * HIT // CHUNK
    first.start(enable_lora=True, max_loras=2, max_lora_rank=8, enable_prompt_embeds=True)
    again = first.serve()
    assert again["cached"] == HIT
    assert same_answer(again, before)
