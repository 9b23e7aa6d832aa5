"""Several models on one server: each engine with blocks, and so chunks, of its own."""

from contextlib import ExitStack

from core_stand import PATIENCE_S
from reference_stand import RunningServer, StartServer, assert_same, engine_at, prompt

from lmcache.core.control import Control, ServerAddress
from lmcache.engines.reference.engine import Engine
from lmcache.engines.reference.requests import Output
from lmcache.engines.reference.shapes import GroupShape, Mixer, ModelShape
from lmcache.errors import Refused
from lmcache.geometry.groups import GroupKind

LLAMA = ModelShape("llama-16", (GroupShape(GroupKind.FULL, 16, Mixer.HEADS),), (0, 0))
ODD = ModelShape("odd-56", (GroupShape(GroupKind.FULL, 56, Mixer.LATENT),), (0, 0))
HYBRID = ModelShape(
    "hybrid-784",
    (GroupShape(GroupKind.RECURRENT, 784, Mixer.STATE), GroupShape(GroupKind.FULL, 784, Mixer.HEADS)),
    (0, 0, 0, 1),
)
"""As of Qwen3-Next or Granite: blocks long enough to weigh as much as a state."""

MODELS = (LLAMA, ODD, HYBRID)

CHUNKS = {"llama-16": 256, "odd-56": 280, "hybrid-784": 784}
"""Tokens: 256 rounded up to whole blocks; the smallest that fits where there is a state."""

TOKENS = 1700
HITS = {"llama-16": 6 * 256, "odd-56": 6 * 280, "hybrid-784": 2 * 784}
"""Of a prompt of 1,700 tokens: its whole chunks."""


def namespaces(server: RunningServer) -> dict[str, int]:
    """Chunk size of each model that the server knows."""
    with Control(ServerAddress.parse(server.address), PATIENCE_S) as control:
        return {each["facts"]["model"]: each["chunk_size"] for each in control.status()["namespaces"]}


def answers(engines: dict[str, Engine], tokens: list[int]) -> dict[str, Output]:
    """The same prompt to all of them at once: their steps take turns."""
    asked = {name: engine.add(tokens, max_tokens=4) for name, engine in engines.items()}
    while any(engine.busy for engine in engines.values()):
        for engine in engines.values():
            if engine.busy:
                engine.step()
    return {name: engine.take(asked[name]) for name, engine in engines.items()}


def test_models_of_any_block_size_share_a_server_without_a_flag(start_server: StartServer, seed: int) -> None:
    server = start_server()
    tokens = prompt(TOKENS, seed=seed)
    with ExitStack() as stack:
        engines = {m.name: stack.enter_context(engine_at(server, m, seed=seed)) for m in MODELS}
        alone = {m.name: stack.enter_context(Engine(m, seed=seed)) for m in MODELS}
        assert namespaces(server) == {f"reference/{name}": size for name, size in CHUNKS.items()}
        expected = answers(alone, tokens)
        cold = answers(engines, tokens)
        server.wait_idle()
        for engine in engines.values():
            engine.drop_prefix_cache()
        served = answers(engines, tokens)

    assert {name: answer.hit_tokens for name, answer in cold.items()} == dict.fromkeys(CHUNKS, 0)
    assert {name: answer.hit_tokens for name, answer in served.items()} == HITS
    for name in CHUNKS:
        assert_same(expected[name], cold[name])
        assert_same(expected[name], served[name])


def test_what_one_model_has_stored_survives_the_others(start_server: StartServer, seed: int) -> None:
    server = start_server()
    tokens = prompt(TOKENS, seed=seed)
    for model in MODELS:
        with engine_at(server, model, seed=seed) as engine:
            (cold,) = engine.generate([tokens])
            server.wait_idle()
        assert cold.hit_tokens == 0
    for model in MODELS:
        with engine_at(server, model, seed=seed) as engine:
            (served,) = engine.generate([tokens])
        assert served.hit_tokens == HITS[model.name]


def test_an_explicit_size_that_fits_one_model_refuses_the_other_with_sizes_that_fit(
    start_server: StartServer, seed: int
) -> None:
    server = start_server("--chunk-size", "256")
    tokens = prompt(TOKENS, seed=seed)
    with (
        engine_at(server, LLAMA, seed=seed) as fitting,
        engine_at(server, ODD, seed=seed) as odd,
        engine_at(server, HYBRID, seed=seed) as hybrid,
        Engine(ODD, seed=seed) as odd_alone,
        Engine(HYBRID, seed=seed) as hybrid_alone,
    ):
        assert namespaces(server) == {"reference/llama-16": 256}
        assert fitting.client
        assert fitting.client.refusal is None
        assert refusal(odd) == (
            "chunk size 256 is not a multiple of 56, the tokens per block of KV group 0 of reference/odd-56; "
            "use 224, 280, 336…"
        )
        assert refusal(hybrid) == (
            "chunk size 256 is not a multiple of 784, the tokens per block of KV group 0 of reference/hybrid-784; "
            "use 784, 1568, 2352…"
        )
        # the refused go on without the cache, and the other has all of it
        for refused, alone in ((odd, odd_alone), (hybrid, hybrid_alone)):
            (expected,) = alone.generate([tokens], max_tokens=2)
            for _ in range(2):
                (answer,) = refused.generate([tokens], max_tokens=2)
                refused.drop_prefix_cache()
                assert answer.hit_tokens == 0
                assert_same(expected, answer)
        (cold,) = fitting.generate([tokens])
        server.wait_idle()
        fitting.drop_prefix_cache()
        (served,) = fitting.generate([tokens])
        assert (cold.hit_tokens, served.hit_tokens) == (0, HITS["llama-16"])
        assert_same(cold, served)


def test_an_explicit_size_that_fits_all_serves_all(start_server: StartServer, seed: int) -> None:
    # 784 tokens are 49 blocks of 16 and 14 of 56
    server = start_server("--chunk-size", "784")
    tokens = prompt(TOKENS, seed=seed)
    for model in MODELS:
        with engine_at(server, model, seed=seed) as engine:
            (cold,) = engine.generate([tokens], max_tokens=2)
            server.wait_idle()
            engine.drop_prefix_cache()
            (served,) = engine.generate([tokens], max_tokens=2)
        assert (cold.hit_tokens, served.hit_tokens) == (0, 2 * 784)
        assert_same(cold, served)


def refusal(engine: Engine) -> str:
    """What the server told it."""
    assert engine.client
    error = engine.client.refusal
    assert isinstance(error, Refused)
    return str(error)
