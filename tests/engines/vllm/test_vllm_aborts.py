"""Requests aborted on a real vLLM, at every stage: the engine serves the next one, and nothing stays pinned."""

from collections.abc import Iterator

import pytest
from vllm_stand import EngineProcess, ServerProcess, Stand, prompt, same_answer

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("llama_stand", "plain")]

IDS = prompt(90, 1500)


@pytest.fixture(scope="module")
def stand(llama_stand: Stand) -> Iterator[Stand]:
    llama_stand.serve("--chunk-size", "256")
    yield llama_stand
    llama_stand.server.kill()


@pytest.fixture(scope="module")
def cold(stand: Stand) -> dict:
    """The answer to IDS, which is in the server from here on."""
    [answer] = stand.engine.generate(IDS)
    stand.server.settle()
    return answer


@pytest.fixture
def engine(stand: Stand, cold: dict) -> Iterator[EngineProcess]:
    stand.engine.forget()
    yield stand.engine
    # whatever was aborted: the next request hits, is right, and every ticket has ended
    stand.engine.forget()
    [warm] = stand.engine.generate(IDS)
    assert warm["cached"] == 1280
    assert same_answer(cold, warm)
    assert stand.server.quiet()["gauges"]["pinned_nodes"] == 0


@pytest.fixture
def server(stand: Stand) -> ServerProcess:
    return stand.server


HOLD = """
import threading
gate, reached, {name} = threading.Event(), threading.Event(), type(loader).{name}
def held(*arguments):
    reached.set()
    gate.wait(60)
    return {name}(loader, *arguments)
loader.{name} = held
driver.names.update(gate=gate, reached=reached)
"""


def test_aborted_while_it_is_queued(engine: EngineProcess) -> None:
    engine.call("add", name="a", ids=IDS, max_tokens=8)
    engine.call("abort", name="a")
    engine.call("step", times=3)


def test_aborted_before_the_lookup_is_answered(engine: EngineProcess) -> None:
    engine.run(
        "from lmcache.core.link import Pending\n"
        "poll, Pending.poll = Pending.poll, lambda self, patience=0.0: None\n"
        "driver.add('a', ids, 8); driver.step(2); driver.abort('a'); driver.step(2)\n"
        "busy = looking.busy()\n"
        "Pending.poll = poll\n"
        "assert busy\n"
        "while looking.busy(): driver.step()",
        ids=IDS,
    )


@pytest.mark.parametrize("step", ["_load", "_copy_in"])
def test_aborted_while_it_is_loading(engine: EngineProcess, step: str) -> None:
    engine.run(HOLD.format(name=step))
    engine.call("add", name="a", ids=IDS, max_tokens=8)
    engine.run("while not reached.is_set(): driver.step()")
    engine.call("abort", name="a")
    engine.call("step", times=3)
    assert engine.run("result = len(scheduler.requests)") == 1, "its blocks must stay while ranks copy"
    # others are served meanwhile
    [other] = engine.generate(prompt(91, 200), max_tokens=2)
    assert other["finish"] == "length"
    engine.run(f"gate.set(); del loader.{step}\nwhile scheduler.requests: driver.step()")


def test_aborted_while_it_is_loading_and_the_load_fails(engine: EngineProcess) -> None:
    engine.run(HOLD.format(name="_load") + "\n_load = lambda *_: 1 / 0\n")
    engine.call("add", name="a", ids=IDS, max_tokens=8)
    engine.run("while not reached.is_set(): driver.step()")
    engine.call("abort", name="a")
    engine.run("gate.set()\nwhile scheduler.requests: driver.step()\ndel loader._load")


def test_aborted_while_it_prefills(engine: EngineProcess) -> None:
    engine.call("add", name="a", ids=prompt(92, 3000), max_tokens=8)
    engine.call("step", times=2)
    engine.call("abort", name="a")
    engine.call("step", times=2)


def test_aborted_while_it_decodes(engine: EngineProcess) -> None:
    engine.call("add", name="a", ids=IDS, max_tokens=50)
    engine.run("while next(iter(scheduler.requests.values())).num_tokens < 1510: driver.step()")
    engine.call("abort", name="a")
    engine.call("step", times=2)


def test_aborted_in_crowds_at_random_moments(engine: EngineProcess, server: ServerProcess) -> None:
    engine.run(
        "import random\n"
        "dice = random.Random(7)\n"
        "for round in range(25):\n"
        "    names = [f'{round}-{i}' for i in range(3)]\n"
        "    for i, name in enumerate(names): driver.add(name, ids[: 600 + 300 * i], 4)\n"
        "    driver.step(dice.randrange(1, 5))\n"
        "    for name in names: driver.abort(name)\n"
        "    if dice.random() < 0.5: driver.reset()\n"
        "while scheduler.requests or looking.busy(): driver.step()",
        ids=IDS,
    )
    server.quiet()
