"""Both doors on a tensor-parallel SGLang: its ranks hold different bytes, and must come to the same decisions."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_stand import PAGE, SglangProcess, hicache, linker, prompt, same_answer

from lmcache.plugins.testing.served import LoadFault, ServerUnderControl

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.may_leave("the engine of a module connects anew whenever a test starts another server"),
]

DOORS: dict[str, Callable[[int], dict[str, Any]]] = {"linker": linker, "hicache": hicache}
FLAGS = ("--l1-size-gb", "0.125", "--l1-cell-kb", "16")


class Stand:
    """One engine of two ranks, and the server beside it."""

    def __init__(self, door: str, model: Path, folder: Path) -> None:
        self.door = door
        self.server = ServerUnderControl(folder, *FLAGS)
        self._options = {"model_path": str(model), "tp_size": 2} | DOORS[door](self.server.address.port)
        self._folder = folder
        self.engine = self._start()

    def _start(self) -> SglangProcess:
        engine = SglangProcess(self._options, self._folder / "engine.log", SGLANG_CPU_OMP_THREADS_BIND="0|1")
        engine.await_start()
        return engine

    def ready(self) -> None:
        """Have a new server, the engine registered, and nothing in the engine's own cache."""
        self.server.kill()
        self.server.start()
        self.server.await_clients(2)
        self.engine.flush()

    def restart_engine(self) -> None:
        self.engine.close()
        self.engine = self._start()
        self.server.await_clients(2)

    def close(self) -> None:
        self.engine.close()
        self.server.kill()


@pytest.fixture(scope="module", params=DOORS)
def two_ranks(request: pytest.FixtureRequest, sglang_models: Path, tmp_path_factory: Any) -> Iterator[Stand]:
    stand = Stand(request.param, sglang_models / "llama", tmp_path_factory.mktemp(request.param))
    yield stand
    stand.close()


@pytest.fixture
def stand(two_ranks: Stand) -> Iterator[Stand]:
    two_ranks.ready()
    yield two_ranks
    two_ranks.server.fail_loads(LoadFault.NONE)
    two_ranks.server.await_nothing_held()


def store(stand: Stand, seed: int, length: int) -> tuple[list[int], dict[str, Any]]:
    """A prompt that nobody has asked before, and its answer; it is in the server, and the engine has forgotten it."""
    ids = prompt(seed, length)
    cold = stand.engine.ask_one(ids)
    assert cold["cached"] == 0
    pages = (length + 7) // PAGE  # the last generated token is never computed
    stand.server.wait_until(lambda: stand.server.counters()["shards_committed"] >= 2 * pages, "both ranks have stored")
    stand.engine.flush()
    return ids, cold


def test_both_ranks_store_their_own_part_and_load_it_back(stand: Stand) -> None:
    ids, cold = store(stand, 1, 100)
    again = stand.engine.ask_one(ids)

    assert again["cached"] == 96
    assert again["details"][{"linker": "host", "hicache": "storage"}[stand.door]] == 96
    assert same_answer(cold, again)
    counters = stand.server.counters()
    assert counters["shards_committed"] == 12
    assert [each["chunks"] for each in stand.server.status()["namespaces"] if each["chunks"]] == [6]


@pytest.mark.parametrize("fault", [LoadFault.OPEN, LoadFault.CONFIRM, LoadFault.LAST_RANK])
def test_a_load_that_fails_on_one_rank_is_computed_by_both(stand: Stand, fault: LoadFault) -> None:
    ids, cold = store(stand, 2, 100)
    stand.server.fail_loads(fault)
    computed = stand.engine.ask_one(ids)

    assert computed["cached"] == 0
    assert same_answer(cold, computed)
    stand.server.fail_loads(LoadFault.NONE)
    stand.engine.flush()
    served = stand.engine.ask_one(ids)
    assert served["cached"] == 96
    assert same_answer(cold, served)


def test_a_server_that_is_killed_and_comes_back_empty_is_filled_and_used(stand: Stand) -> None:
    ids, cold = store(stand, 3, 100)
    stand.server.kill()
    alone = stand.engine.ask_one(ids)
    assert alone["cached"] == 0
    assert same_answer(cold, alone)

    stand.ready()
    assert same_answer(cold, store(stand, 3, 100)[1])
    served = stand.engine.ask_one(ids)
    assert served["cached"] == 96
    assert same_answer(cold, served)


def test_salts_and_extra_keys_share_nothing(stand: Stand) -> None:
    ids, cold = store(stand, 4, 100)
    for more in ({"cache_salt": "a"}, {"cache_salt": "b"}):
        salted = stand.engine.ask_one(ids, **more)
        assert salted["cached"] == 0
        assert same_answer(cold, salted)
    stand.engine.flush()
    assert stand.engine.ask_one(ids)["cached"] == 96


def test_a_restarted_engine_is_served_what_it_stored_before(two_ranks: Stand) -> None:
    two_ranks.ready()
    ids, cold = store(two_ranks, 5, 100)
    if two_ranks.door == "hicache":
        pytest.skip("the suite of HiCache storage has a second engine, and a start takes a minute")
    two_ranks.restart_engine()
    served = two_ranks.engine.ask_one(ids)

    assert served["cached"] == 96
    assert same_answer(cold, served)


def test_weights_that_are_exchanged_in_a_running_engine_take_over_nothing(stand: Stand, sglang_models: Path) -> None:
    # the last test here: from now on, the engine shares with nobody
    ids, cold = store(stand, 6, 100)
    stand.engine.call("exchange_weights", folder=str(sglang_models / "other_llama"))
    other = stand.engine.ask_one(ids)
    assert other["cached"] == 0
    assert not same_answer(cold, other)

    stand.engine.call("exchange_weights", folder=str(sglang_models / "llama"))
    back = stand.engine.ask_one(ids)
    assert back["cached"] == 0
    assert same_answer(cold, back)
