"""LoRA requests through both halves of the connector and a real server; the test says what vLLM has loaded."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from vllm_stand import ServerProcess
from weights_folders import begins_later, lora_folder
from worker_stand import CHUNK, Host, full

from lmcache.engines.vllm import lora as lora_module
from lmcache.engines.vllm.lora import Loads, LoraBook
from lmcache.geometry.groups import Geometry

TOKENS = list(range(100, 100 + 3 * CHUNK + 5))
"""Three chunks and a rest, in six blocks and a seventh."""
BLOCKS = [1, 2, 3, 4, 5, 6, 7]


@pytest.fixture
def host(server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(lora_module, "_loads", Loads())
    host = Host(server.port, Geometry((full(),)))
    yield host
    host.close()


@pytest.fixture
def path(host: Host, tmp_path: Path) -> str:
    """A LoRA that was there when the engine started, which it has loaded as number 1."""
    path = str(lora_folder(tmp_path / "lora"))
    host.scheduler._loras = LoraBook(begins_later())
    loads(1, path)
    return path


def loads(number: int, path: str) -> None:
    """What `watch_loads` notes when vLLM loads."""
    lora_module._loads.note(number, path)


def request(host: Host, name: str, path: str = "", number: int = 1) -> SimpleNamespace:
    request = host.request(name, TOKENS)
    if path:
        request.lora_request = SimpleNamespace(lora_int_id=number, lora_path=path, load_inplace=False)
    host.scheduler.arrived(request)
    return request


def stored(host: Host, name: str, path: str = "", number: int = 1) -> np.ndarray:
    """Run a request to its end; returns the pages of its whole chunks."""
    pages = host.ranks[0].fill(BLOCKS, seed=len(name) + number)
    first = request(host, name, path, number)
    host.prefill(first, (BLOCKS,), len(TOKENS))
    host.end(first)
    return pages[:, :6]


def hit(host: Host, name: str, path: str = "", number: int = 1) -> int:
    asking = request(host, name, path, number)
    tokens = host.matched(asking)
    host.end(asking)
    return tokens


def test_a_request_with_a_lora_comes_back_to_the_same_weights_only(
    host: Host, server: ServerProcess, path: str, tmp_path: Path
) -> None:
    other = str(lora_folder(tmp_path / "other", fill=b"b"))
    pages = stored(host, "a", path)
    assert [hit(host, "base"), hit(host, "other", other, 2), hit(host, "same", path)] == [0, 0, 3 * CHUNK]
    again = request(host, "again", path)
    assert host.matched(again) == 3 * CHUNK
    assert host.load(again, ([20, 21, 22, 23, 24, 25, 26],), 0, 3 * CHUNK) == set()
    assert np.array_equal(host.ranks[0].memory[:, 20:26], pages)
    host.end(again)
    # a copy of the folder under another name and number is the same weights
    copy = str(lora_folder(tmp_path / "copy"))
    assert hit(host, "copied", copy, 3) == 3 * CHUNK
    server.quiet()


def test_nothing_is_stored_of_a_request_whose_lora_was_exchanged_while_it_ran(
    host: Host, server: ServerProcess, path: str, tmp_path: Path
) -> None:
    running = request(host, "running", path)
    host.prefill(running, (BLOCKS,), CHUNK)
    assert server.settle()["gauges"]["nodes"] == 1
    loads(1, str(lora_folder(tmp_path / "other", fill=b"b")))
    host.prefill(running, (BLOCKS,), CHUNK)
    # what was doubted once stays so for this request, even if all were well by now
    lora_module._loads.forget()
    loads(1, path)
    host.prefill(running, (BLOCKS,), CHUNK + 5)
    host.end(running)
    assert server.settle()["gauges"]["nodes"] == 1
    # a new request of that name is not held responsible
    assert stored(host, "running", path).any()
    assert server.settle()["gauges"]["nodes"] == 3


def test_nothing_is_stored_of_a_request_whose_lora_changed_on_disk_while_it_ran(
    host: Host, server: ServerProcess, path: str
) -> None:
    running = request(host, "running", path)
    lora_folder(Path(path), fill=b"b")
    host.prefill(running, (BLOCKS,), len(TOKENS))
    host.end(running)
    assert server.settle()["gauges"]["nodes"] == 0


def test_a_hit_is_given_up_when_the_lora_changes_before_the_request_has_its_turn(
    host: Host, server: ServerProcess, path: str
) -> None:
    stored(host, "a", path)
    waiting = request(host, "waiting", path)
    lora_folder(Path(path), fill=b"b")
    assert host.matched(waiting) == 0
    # vLLM says that it uses no hit
    host.scheduler.allocated(waiting, lambda: (BLOCKS,), 0)
    host.end(waiting)
    server.quiet()


def test_nothing_is_stored_by_a_worker_that_did_not_see_the_load(host: Host, server: ServerProcess, path: str) -> None:
    lora_module._loads.forget()
    stored(host, "a", path)
    assert server.settle()["gauges"]["nodes"] == 0


def test_a_number_that_stands_for_two_loras_ends_the_storing_of_what_runs(
    host: Host, server: ServerProcess, path: str, tmp_path: Path
) -> None:
    running = request(host, "running", path)
    host.prefill(running, (BLOCKS,), CHUNK)
    request(host, "wrong", str(lora_folder(tmp_path / "other", fill=b"b")), 1)
    host.prefill(running, (BLOCKS,), len(TOKENS) - CHUNK)
    host.end(running)
    assert server.settle()["gauges"]["nodes"] == 1
